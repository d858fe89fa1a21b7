"""The arguments of a call of `@idempotent`: members by their dotted names, and a fingerprint.

Promise: equal arguments have equal fingerprints in every process, and unequal ones have unequal
fingerprints. Dataclasses, pydantic models and msgspec structs are compared by class name and
members, so that a `Card` and a `Transfer` with the same members are two calls. The module is not
compared: moving a class to another file does not change the calls that clients repeat.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import enum
import hashlib
import json
import uuid
from collections.abc import Iterable, Mapping, Set
from contextlib import suppress
from typing import Any

from postroom.errors import ConfigurationError, with_article
from postroom.spelling import spelled

__all__ = ["fingerprint_of", "member"]

_PLAIN = (uuid.UUID, decimal.Decimal, dt.date, dt.datetime, dt.time)
_REMEDY = 'name the arguments or members that make it the same call, with compare=["…"].'


def member(arguments: Mapping[str, Any], path: str, operation: str) -> Any:
    """Return the value of a dotted name such as `order.id`; None if a value before it is None."""
    name, *names = path.split(".")
    value = arguments[name]
    for name in names:
        if value is None:
            return None
        try:
            value = value[name] if isinstance(value, Mapping) else getattr(value, name)
        except (AttributeError, KeyError):
            holder = with_article(type(value).__name__)
            raise ConfigurationError(
                f"{operation} names {path}, but {holder} has no member {name!r}."
            ) from None
    return value


def fingerprint_of(values: Mapping[str, Any], operation: str) -> str:
    """Return the SHA-256 of the arguments that make two calls the same, in hexadecimal.

    Arguments that are JSON, dates or UUIDs keep the form in which released versions stored them.
    Models have a form of their own, which begins with a letter and so is never equal to JSON.
    """
    try:
        text = json.dumps(values, sort_keys=True, default=_text)
    except (TypeError, ValueError):
        try:
            pairs = [[name, _form(values[name], name)] for name in sorted(values)]
        except _Incomparable as error:
            raise ConfigurationError(f"{operation} cannot compare {error}: {_REMEDY}") from None
        except RecursionError:
            raise ConfigurationError(
                f"{operation} has arguments that hold themselves: {_REMEDY}"
            ) from None
        text = f"models:{spelled(pairs)}"
    return hashlib.sha256(text.encode()).hexdigest()


class _Incomparable(Exception):
    """A value whose equality this module does not know; the text is its dotted name and class."""


def _text(value: object) -> str:
    if isinstance(value, _PLAIN):
        return str(value)
    raise TypeError


def _form(value: Any, path: str) -> Any:
    """Return a value as text, numbers and lists; a list begins with the kind of its value."""
    if (members := _members(value)) is not None:
        pairs = [[name, _form(each, f"{path}.{name}")] for name, each in sorted(members.items())]
        return ["model", type(value).__qualname__, pairs]
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float | decimal.Decimal):
        number = decimal.Decimal(value)
        return value if number.is_finite() else ["number", str(number)]
    if isinstance(value, list | tuple):
        return ["list", *(_form(each, f"{path}[{n}]") for n, each in enumerate(value))]
    if isinstance(value, Set):
        return ["set", *_sorted(_form(each, f"{path}[…]") for each in value)]
    if isinstance(value, Mapping):
        names = ((_form(name, f"{path}[…]"), name) for name in value)
        return [
            "dict",
            *_sorted([form, _form(value[name], f"{path}[{name!r}]")] for form, name in names),
        ]
    if isinstance(value, enum.Enum):
        return ["enum", type(value).__qualname__, _form(value.value, path)]
    return _scalar(value, path)


def _scalar(value: object, path: str) -> list[str]:
    if isinstance(value, dt.datetime):
        if value.utcoffset() is not None:
            with suppress(OverflowError):  # within a day of datetime.min and datetime.max
                value = value.astimezone(dt.UTC)
        return ["datetime", value.isoformat()]
    if isinstance(value, dt.date | dt.time):
        return ["date" if isinstance(value, dt.date) else "time", value.isoformat()]
    if isinstance(value, dt.timedelta):
        return ["timedelta", str(value)]
    if isinstance(value, uuid.UUID):
        return ["uuid", str(value)]
    if isinstance(value, bytes):
        return ["bytes", value.hex()]
    raise _Incomparable(f"{path}, which is {with_article(type(value).__name__)}")


def _members(value: Any) -> dict[str, Any] | None:
    """Return the members that make two models of a class equal; None for other values.

    The values come from the model, not from its JSON, which hides secrets and excluded members and
    writes sets in the order of the process.
    """
    kind = type(value)
    if dataclasses.is_dataclass(kind):
        names = [item.name for item in dataclasses.fields(kind) if item.compare]
    elif hasattr(kind, "model_dump"):
        names = [*kind.model_fields, *(value.model_extra or ())]
    elif hasattr(kind, "__struct_fields__"):
        from msgspec import UNSET

        found = {name: getattr(value, name) for name in kind.__struct_fields__}
        return {name: each for name, each in found.items() if each is not UNSET}
    else:
        return None
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _sorted(forms: Iterable[Any]) -> list[Any]:
    return sorted(forms, key=spelled)
