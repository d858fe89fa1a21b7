"""CloudEvents in structured mode: one JSON document that holds attributes and data. No I/O.

Promise: an event in structured mode is received as the same event in binary mode would be. One that
cannot be read does not raise, since the broker would redeliver it forever: it has no type, and the
header `postroom-unreadable` holds the reason, with which the consumer rejects it.
"""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any

__all__ = ["MEDIA_TYPE", "UNREADABLE", "unfolded"]

MEDIA_TYPE = "application/cloudevents"
UNREADABLE = "postroom-unreadable"
_REQUIRED = ("id", "source", "specversion", "type")
_DATA = ("data", "data_base64")
_JSON = "application/json"


def unfolded(
    known: dict[str, str], payload: bytes, content_type: str
) -> tuple[dict[str, str], bytes]:
    """Return headers and payload of the event that a message in structured mode holds.

    A message of another media type is returned as it is.
    """
    kind = content_type.partition(";")[0].strip().lower()
    if not kind.startswith((f"{MEDIA_TYPE}+", f"{MEDIA_TYPE}-batch")) and kind != MEDIA_TYPE:
        return known, payload
    try:
        event = _event(kind, payload)
        data, data_type = _data(event)
    except _Unreadable as reason:
        bare = {name: known[name] for name in known if name not in ("ce-type", "event_type")}
        return {**bare, UNREADABLE: str(reason)}, payload
    attributes = {
        f"ce-{name.lower()}": _text(value)
        for name, value in event.items()
        if name not in _DATA and value is not None
    }
    return {**known, **attributes, "content-type": data_type}, data


class _Unreadable(Exception):
    """Why the message cannot be read, without anything of its payload."""


def _event(kind: str, payload: bytes) -> dict[str, Any]:
    if kind.startswith(f"{MEDIA_TYPE}-batch"):
        raise _Unreadable(
            f"CloudEvents in batch mode ({kind}) are not read; send each event as a message of "
            "its own"
        )
    if kind != f"{MEDIA_TYPE}+json":
        raise _Unreadable(
            f"CloudEvents in the format {kind[:100]} are not read; send {MEDIA_TYPE}+json, or "
            "binary mode"
        )
    try:
        event = json.loads(payload)
    except (ValueError, RecursionError):
        event = None
    if not isinstance(event, dict):
        raise _Unreadable(f"the content type is {kind}, but the payload is not a JSON object")
    lacking = [
        name for name in _REQUIRED if not isinstance(event.get(name), str) or not event[name]
    ]
    if lacking:
        raise _Unreadable(f"the CloudEvent has no text for {', '.join(lacking)}")
    if not event["specversion"].startswith("1."):
        raise _Unreadable("the specversion of the CloudEvent is not 1.0")
    return event


def _data(event: dict[str, Any]) -> tuple[bytes, str]:
    """The data of an event as bytes, and its media type, which is JSON unless given."""
    kind = event.get("datacontenttype") or _JSON
    if not isinstance(kind, str):
        raise _Unreadable("the datacontenttype of the CloudEvent is not a text")
    if event.get("data_base64") is not None:
        if event.get("data") is not None:
            raise _Unreadable("the CloudEvent has both data and data_base64")
        try:
            return base64.b64decode(event["data_base64"], validate=True), kind
        except (binascii.Error, ValueError, TypeError):
            raise _Unreadable("the data_base64 of the CloudEvent is not base64") from None
    if "data" not in event:
        return b"", event.get("datacontenttype") or "application/octet-stream"
    data = event["data"]
    if isinstance(data, str) and not _holds_json(kind):
        return data.encode("utf-8", "surrogatepass"), kind
    try:
        return json.dumps(data, separators=(",", ":")).encode(), kind
    except RecursionError:
        raise _Unreadable("the data of the CloudEvent is nested too deeply") from None


def _holds_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind.endswith(("/json", "+json"))


def _text(value: Any) -> str:
    """An attribute as the header of binary mode: text as it is, true and 7 as JSON has them."""
    return value if isinstance(value, str) else json.dumps(value)
