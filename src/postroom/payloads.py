"""Payloads as bytes: bytes as they are, everything else as strict JSON.

Promise: a reader of the bytes learns exactly the published values. A value without an unambiguous
JSON form, such as NaN or a datetime without a time zone, is refused in the publisher's call.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import enum
import json
import uuid
from collections.abc import Mapping, Sequence, Set
from typing import Any

import uuid_utils

from postroom.errors import InvalidMessage, with_article

__all__ = ["dump_json", "encode_payload"]

JSON_CONTENT = "application/json"
BYTES_CONTENT = "application/octet-stream"


def encode_payload(payload: object, content_type: str | None) -> tuple[bytes, str]:
    """Return a payload as bytes with their content type."""
    if type(payload) is bytes:
        return payload, content_type or BYTES_CONTENT
    if isinstance(payload, bytes | bytearray | memoryview):
        return bytes(payload), content_type or BYTES_CONTENT
    return dump_json(payload, "payload"), content_type or JSON_CONTENT


def dump_json(value: object, what: str) -> bytes:
    """Return a value as JSON, or raise InvalidMessage with the reason; `what` names the value."""
    try:
        return _JSON.encode(value).encode()
    except UnicodeEncodeError:
        raise InvalidMessage(f"{what} holds a lone surrogate: it is not text") from None
    except RecursionError:
        raise InvalidMessage(f"{what} is nested too deeply, or holds itself") from None
    except (TypeError, ValueError) as error:
        hint = ""
        if "float" in str(error).lower():
            hint = ": NaN and Infinity are not JSON; send None or a string instead"
        raise InvalidMessage(f"{what} cannot be encoded as JSON ({error}){hint}") from error


def _builtin(value: object) -> object:
    """What json does not know by itself; every choice here is reversible by the reader."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
    if hasattr(type(value), "model_dump"):
        return _from_pydantic(value)
    if hasattr(type(value), "__struct_fields__"):
        return _from_msgspec(value)
    if isinstance(value, dt.datetime):
        _refuse_naive(value)
        return value.isoformat()
    if isinstance(value, dt.date | dt.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        if not value.is_finite():
            raise TypeError(f"{value!r} is not a number")
        return str(value)
    if isinstance(value, uuid.UUID | uuid_utils.UUID):
        return str(value)
    if isinstance(value, enum.Enum):
        return value.value
    raise TypeError(
        f"{with_article(type(value).__name__)} is not JSON: "
        "pass a str, number, list or dict, or bytes"
    )


# Made once: json.dumps makes an encoder for every call that wants more than its defaults.
_JSON = json.JSONEncoder(
    allow_nan=False, ensure_ascii=False, separators=(",", ":"), default=_builtin
)


def _from_pydantic(model: Any) -> object:
    """Return pydantic's own JSON form, which honours the serializers and settings of the model."""
    form = model.model_dump(mode="json")
    _compare(model.model_dump(mode="python", warnings=False), form)
    return form


def _from_msgspec(struct: object) -> object:
    import msgspec

    form = msgspec.to_builtins(struct)
    _compare(msgspec.to_builtins(struct, builtin_types=(dt.datetime,)), form)
    return form


def _compare(values: object, form: object) -> None:
    """Refuse naive datetimes among `values` that the JSON form of the same values repeats as text.

    A serializer of the model's own may give a naive datetime an unambiguous form; that form differs
    from the ISO text, and the model is accepted.
    """
    if isinstance(values, dt.datetime):
        if form == values.isoformat():
            _refuse_naive(values)
    elif isinstance(values, Mapping) and isinstance(form, dict):
        for name, shown in zip(values, form, strict=False):
            _compare(name, shown)
            _compare(values[name], form[shown])
    elif isinstance(values, list | tuple) and isinstance(form, list | tuple):
        for value, shown in zip(values, form, strict=False):
            _compare(value, shown)
    elif isinstance(values, set | frozenset) and isinstance(form, list | tuple):
        _compare_unordered(values, form)


def _compare_unordered(values: Set[object], form: Sequence[object]) -> None:
    """Compare the members of a set, which the JSON form may hold in another order."""
    texts = {shown for shown in form if isinstance(shown, str)}
    for value in values:
        if isinstance(value, dt.datetime):
            if value.isoformat() in texts:
                _refuse_naive(value)
        elif isinstance(value, tuple | frozenset):
            for shown in form:
                _compare(value, shown)


def _refuse_naive(value: dt.datetime) -> None:
    if value.utcoffset() is None:
        raise TypeError(
            f"naive datetime {value!r}: give it a time zone, datetime.now(timezone.utc)"
        )
