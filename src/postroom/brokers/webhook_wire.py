"""What a webhook says and what its answers mean: CloudEvents, signatures, statuses. No I/O.

Promise: no header can end its own line or steer the request, and every answer has one meaning.

==========================  ===========================================================
the receiver answers …      the message is …
==========================  ===========================================================
2xx                         delivered
3xx                         refused for ever: redirects are never followed
408, 425, 500, other 5xx    sent again later
429, 502, 503, 504          sent again later, and the receiver rests (`Retry-After`)
410                         kept, and nothing more is sent there
any other 4xx               refused for ever
==========================  ===========================================================
"""

from __future__ import annotations

import base64
import datetime as dt
import email.utils
import hashlib
import hmac
import re
from collections.abc import Mapping, Sequence

from postroom.brokers.base import DELIVERED, Outcome, Permanent, Scope, Transient
from postroom.messages import Message, attribute_text, wire_headers
from postroom.signals import redact

__all__ = ["is_gone", "meaning", "request_headers", "retry_after", "sign"]

LONGEST_RETRY_AFTER_SECONDS = 3600.0
_EXCERPT_CHARACTERS = 200
_PLAIN = re.compile(r"(?:[!-~](?:[ -~]*[!-~])?)?")
_OURS = {"event_id", "event_type", "aggregate_type", "aggregate_id"}
# What steers the connection or the request is not for publishers to say.
_STEERING = {
    *("accept-encoding", "connection", "content-encoding", "content-length", "expect", "host"),
    *("keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "http2-settings"),
}
_RESTING = {429, 502, 503, 504}
_AGAIN = {408, 425}
_GONE = 410


def request_headers(
    message: Message, *, source: str, epoch: int, secrets: Sequence[bytes], now: float
) -> dict[str, str]:
    """The headers of a request, in lower case; ValueError if one cannot be sent.

    CloudEvents attributes come percent-encoded as the binding for HTTP demands, and our four names
    are; a header of the publisher's own only where it is not plain ASCII.
    """
    headers: dict[str, str] = {}
    # A publisher's header comes first, so ours win whatever case it is written in.
    for name, value in wire_headers(message, source=source, epoch=epoch).items():
        name = name.lower()
        if name in _STEERING or name.startswith(("proxy-", "webhook-")):
            continue
        if name in _OURS or not _PLAIN.fullmatch(value):
            value = _content_type(value) if name == "content-type" else attribute_text(value)
        headers[name] = value
    return headers | sign(message.id, message.payload, secrets, now)


def _content_type(value: str) -> str:
    raise ValueError(f"the content type {value!r} is not plain ASCII")


def sign(id: str, payload: bytes, secrets: Sequence[bytes], now: float) -> dict[str, str]:
    """Standard Webhooks: id, time and one signature for each secret.

    By hand, because the library signs text only and a payload is bytes.
    """
    headers = {"webhook-id": id, "webhook-timestamp": str(int(now))}
    if secrets:
        signed = b"%b.%d.%b" % (id.encode(), int(now), payload)
        marks = (hmac.digest(secret, signed, hashlib.sha256) for secret in secrets)
        headers["webhook-signature"] = " ".join(
            f"v1,{base64.b64encode(mark).decode()}" for mark in marks
        )
    return headers


def meaning(status: int, headers: Mapping[str, str], body: bytes, *, scope: Scope) -> Outcome:
    """What an answer means. `headers` are in lower case; `scope` is what rests when it must."""
    if 200 <= status < 300:
        return DELIVERED
    code = f"http_{status}"
    said = f"the receiver answered {status}{_excerpt(headers, body)}"
    if 300 <= status < 400:
        return Permanent(code, f"{said}: redirects are not followed, give its final address")
    if status == _GONE:
        text = f"{said} (gone): nothing more is sent there until its route is changed"
        return Transient(code, text, down=scope)
    if status in _RESTING:
        return Transient(code, said, down=scope, retry_after_seconds=retry_after(headers))
    if status in _AGAIN or status >= 500:
        return Transient(code, said, retry_after_seconds=retry_after(headers))
    if status >= 400:
        return Permanent(code, said)
    return Transient(code, f"{said}, which ends no request")


def is_gone(outcome: Outcome) -> bool:
    """Whether the receiver said that it is no more."""
    return isinstance(outcome, Transient) and outcome.code == f"http_{_GONE}"


def retry_after(headers: Mapping[str, str], now: dt.datetime | None = None) -> float | None:
    """The seconds that `Retry-After` asks for, as a number or a date, within an hour."""
    value = headers.get("retry-after", "").strip()[:100]
    if value.isascii() and value.isdecimal():
        seconds = float(value)
    else:
        try:
            moment = email.utils.parsedate_to_datetime(value)
        except (ValueError, TypeError, IndexError, OverflowError):
            return None
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=dt.UTC)
        seconds = (moment - (now or dt.datetime.now(dt.UTC))).total_seconds()
    return min(max(seconds, 0.0), LONGEST_RETRY_AFTER_SECONDS)


def _excerpt(headers: Mapping[str, str], body: bytes) -> str:
    """The beginning of the answer, if it is text as it came: nothing is decompressed."""
    kind = headers.get("content-type", "").lower()
    encoded = headers.get("content-encoding", "identity").lower() != "identity"
    if encoded or not (kind.startswith("text/plain") or "json" in kind):
        return ""
    text = " ".join(redact(body.decode("utf-8", "replace")).split())
    text = "".join(each if each.isprintable() else "�" for each in text)
    return f' and said "{text[:_EXCERPT_CHARACTERS]}"' if text else ""
