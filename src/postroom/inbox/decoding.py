"""From bytes to what a handler takes: an object of a declared type, or plain JSON, or bytes.

Promise: what `messages.encode` makes of an object of a declared type, `decode` makes an equal
object of. Whatever does not fit raises `InvalidMessage`, which says where and holds no payload.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import enum
import json
import types
import typing
import uuid
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Union

from postroom.errors import InvalidMessage

__all__ = ["decode", "plain"]

_FROM_TEXT: dict[type, Callable[[str], Any]] = {
    dt.datetime: dt.datetime.fromisoformat,
    dt.date: dt.date.fromisoformat,
    dt.time: dt.time.fromisoformat,
    decimal.Decimal: decimal.Decimal,
    uuid.UUID: uuid.UUID,
}
_COLLECTIONS: dict[Any, Callable[[Any], Any]] = {
    list: list,
    set: set,
    frozenset: frozenset,
    typing.get_origin(typing.Sequence[Any]): list,
    typing.get_origin(typing.Iterable[Any]): list,
}


def plain(payload: bytes, content_type: str) -> Any:
    """JSON as Python's own values; anything else as the bytes it is."""
    if not _is_json(content_type):
        return payload
    try:
        return json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise InvalidMessage(f"the payload says it is JSON and is none: {_short(error)}") from None


@lru_cache(maxsize=1024)
def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or kind.endswith("+json")


def decode(cls: type, value: Any) -> Any:
    """An object of a dataclass, pydantic model or msgspec struct from plain values."""
    try:
        return _decode(cls, value)
    except (InvalidMessage, MemoryError):
        raise
    except Exception as error:
        # Numbers too large, values that cannot be compared: another try would end the same. By
        # its name alone, since the text of Python's own errors holds the value.
        said = type(error).__name__
        raise InvalidMessage(f"{cls.__name__} cannot be made of the payload: {said}") from error


def _decode(cls: type, value: Any) -> Any:
    if dataclasses.is_dataclass(cls):
        return _value(cls, value, cls.__name__)
    try:
        model: Any = cls
        if hasattr(model, "model_validate_json"):
            # In pydantic's JSON mode text may stand for what JSON has no word for.
            return model.model_validate_json(json.dumps(value))
        import msgspec

        return msgspec.convert(value, cls)
    except Exception as error:
        # Pydantic's own text holds the input, which is payload.
        places = getattr(error, "errors", None)
        told = [e["loc"] for e in places(include_input=False)][:5] if callable(places) else ""
        where = ", ".join(".".join(map(str, each)) for each in told) or _short(error)
        raise InvalidMessage(f"the payload does not fit {cls.__name__}: {where}") from None


def _value(hint: Any, value: Any, where: str) -> Any:
    if hint is Any or isinstance(hint, typing.TypeVar):
        return value
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        return _value(typing.get_args(hint)[0], value, where)
    if origin in (Union, types.UnionType):
        return _union(typing.get_args(hint), value, where)
    if origin is typing.Literal:
        if value in typing.get_args(hint):
            return value
        raise _misfit(where, hint)
    if origin is not None:
        return _collection(origin, typing.get_args(hint), value, where)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _dataclass(hint, value, where)
    return _scalar(hint, value, where)


def _union(options: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in options:
        return None
    last: InvalidMessage | None = None
    for option in (each for each in options if each is not type(None)):
        try:
            return _value(option, value, where)
        except InvalidMessage as error:
            last = error
        except (ValueError, TypeError, ArithmeticError) as error:
            last = InvalidMessage(f"{where} cannot be made: {type(error).__name__}")
    raise last or _misfit(where, "None")


def _collection(origin: Any, hints: tuple[Any, ...], value: Any, where: str) -> Any:
    if origin is dict or (isinstance(origin, type) and issubclass(origin, typing.Mapping)):
        if not isinstance(value, dict):
            raise _misfit(where, "an object")
        of_key, of_value = hints or (Any, Any)
        return {
            _key(of_key, k, where): _value(of_value, v, f"{where}.{k}") for k, v in value.items()
        }
    if not isinstance(value, list):
        raise _misfit(where, "a list")
    if origin is tuple and not (len(hints) == 2 and hints[1] is ...):
        if len(hints) != len(value):
            raise _misfit(where, f"{len(hints)} values")
        return tuple(_value(h, v, where) for h, v in zip(hints, value, strict=True))
    made = [_value(hints[0] if hints else Any, each, f"{where}[]") for each in value]
    return tuple(made) if origin is tuple else _COLLECTIONS.get(origin, list)(made)


def _key(hint: Any, key: str, where: str) -> Any:
    """JSON writes numbers as text where they are keys."""
    if hint is not int:
        return _value(hint, key, where)
    try:
        return int(key)
    except ValueError:
        raise _misfit(f"a key of {where}", hint) from None


def _dataclass(cls: type, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise _misfit(where, f"an object for {cls.__name__}")
    given: dict[str, Any] = {}
    for name, hint, needed in _fields(cls):
        if name in value:
            given[name] = _value(hint, value[name], f"{where}.{name}")
        elif needed:
            raise InvalidMessage(f"{where} lacks {name}")
    try:
        return cls(**given)
    except MemoryError:
        raise
    except Exception as error:  # its __post_init__ may raise anything
        raise InvalidMessage(f"{where} cannot be made: {_short(error)}") from None


@lru_cache(maxsize=1024)
def _fields(cls: type) -> tuple[tuple[str, Any, bool], ...]:
    hints = typing.get_type_hints(cls, include_extras=True)
    missing = dataclasses.MISSING
    return tuple(
        (each.name, hints[each.name], each.default is missing and each.default_factory is missing)
        for each in dataclasses.fields(cls)
        if each.init
    )


def _scalar(hint: Any, value: Any, where: str) -> Any:
    if hint in _FROM_TEXT:
        try:
            if isinstance(value, str):
                return _FROM_TEXT[hint](value)
            if hint is decimal.Decimal and isinstance(value, int | float):
                return decimal.Decimal(str(value))
        except (ValueError, decimal.InvalidOperation):
            pass
        raise _misfit(where, hint)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        try:
            return hint(value)
        except ValueError:
            raise _misfit(where, hint) from None
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise _misfit(where, hint) from None
    if hint in (int, float, str, bool):
        if type(value) is hint:
            return value
        raise _misfit(where, hint)
    if hint is tuple and isinstance(value, list):
        return tuple(value)
    if hint in _COLLECTIONS and isinstance(value, list):
        return _COLLECTIONS[hint](value)
    if isinstance(hint, type) and hint not in (list, dict, set, tuple) and hint is not object:
        if hasattr(hint, "model_validate") or hasattr(hint, "__struct_fields__"):
            return decode(hint, value)
        if not isinstance(value, hint):
            raise _misfit(where, hint)
    return value


def _misfit(where: str, wanted: Any) -> InvalidMessage:
    name = getattr(wanted, "__name__", None) or str(wanted)
    return InvalidMessage(f"{where} is not {name}")


def _short(error: BaseException) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
