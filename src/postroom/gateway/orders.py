"""What an order is: checked, every fault named by its field, and brought into one form.

Pure. Two documents that mean the same order become the same document here, so they have the same
digest: the order of fields, `100` or `100.0`, "1.50" or "1.5", and a default that is spelled out do
not matter.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

__all__ = ["BODY_BYTES", "BadBody", "Fault", "checked", "parse"]

BODY_BYTES = 16_384
MOST_DEPTH = 32
MOST_DIGITS = 640  # what Python reads however it is set up
MOST_QUANTITY = 1_000_000_000_000
MOST_NOTE = 200
SIDES = ("buy", "sell")
ORDER_TYPES = ("market", "limit")
TIMES_IN_FORCE = ("day", "gtc", "ioc", "fok")

SYMBOL = r"[A-Za-z0-9][A-Za-z0-9./:-]{0,31}"
ACCOUNT = r"[A-Za-z0-9_.:-]{1,64}"
PRICE = r"[0-9]{1,15}(\.[0-9]{1,10})?"
# A text, even one that does not end, or a bracket outside of all texts.
PIECE = r'(?s)"(?:[^"\\]|\\.)*"?|[][{}]'

FIELDS = (
    *("symbol", "side", "quantity", "order_type", "limit_price", "account", "time_in_force"),
    "client_note",
)
REQUIRED = ("symbol", "side", "quantity", "order_type")


class BadBody(Exception):
    """The body is not what a request may hold; the text says why, `field` where."""

    def __init__(self, text: str, field: str | None = None) -> None:
        super().__init__(text)
        self.field = field


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with one field."""

    field: str
    detail: str


def parse(body: bytes) -> dict[str, Any]:
    """A body as a document with decimal numbers, or `BadBody`."""
    try:
        # As text: json would take other encodings too, and halves of characters with them.
        text = body.decode("utf-8")
        _check_depth(text)
        document = json.loads(
            text,
            parse_int=_integer,
            parse_float=_number,
            parse_constant=_constant,
            object_pairs_hook=_once_each,
        )
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        raise BadBody("the body is not JSON") from None
    if isinstance(document, _Odd) and document.name is not None:
        raise BadBody(f"{document.name} stands in it twice", document.name)
    if not isinstance(document, dict):
        raise BadBody("the body must be a JSON object")
    for name, value in document.items():
        if what := _odd({name: value}):
            raise BadBody(f"{_spelled(name)} holds {what}", _spelled(name))
    return document


def _check_depth(text: str) -> None:
    """Raise if it is nested so deeply that to read it would be a risk; looks at it once."""
    if text.count("[") + text.count("{") <= MOST_DEPTH:
        return
    depth, outermost, name = 0, "", None
    for piece in re.findall(PIECE, text):
        if piece[0] == '"':
            name = piece if depth == 1 else name
        elif piece in "]}":
            depth -= 1
        else:
            depth, outermost = depth + 1, outermost or piece
            if depth > MOST_DEPTH:
                field = _spelled(json.loads(name)) if name and outermost == "{" else None
                raise BadBody(f"{field or 'the body'} is nested too deeply", field)


@dataclass(frozen=True, slots=True)
class _Odd:
    """Stands for what cannot be written down and be read or sent again, until its field is known;
    `name`: a member that an object has twice."""

    text: str
    name: str | None = None


_TOO_LARGE = _Odd("a number that is too large")


def _integer(text: str) -> Any:
    return int(text) if len(text) <= MOST_DIGITS else _TOO_LARGE


def _number(text: str) -> Any:
    try:
        return Decimal(text)
    except ArithmeticError:
        return _TOO_LARGE


def _constant(name: str) -> Any:
    return _Odd(f"{name}, which is no number in JSON")


def _once_each(pairs: list[tuple[str, Any]]) -> Any:
    document = dict(pairs)
    if len(document) < len(pairs):
        names = Counter(name for name, _ in pairs)
        name = _spelled(names.most_common(1)[0][0])
        return _Odd(f"{name} twice", name)
    return document


def _odd(value: Any) -> str | None:
    """What is odd in it, if anything is."""
    if isinstance(value, str):
        return None if _spelled(value) == value else "half of a character"
    if isinstance(value, dict):
        return _odd([*value, *value.values()])
    if isinstance(value, list):
        return next(filter(None, map(_odd, value)), None)
    return value.text if isinstance(value, _Odd) else None


def _spelled(text: str) -> str:
    """With halves of characters spelled out, so that it can be sent."""
    return text.encode("utf-8", "backslashreplace").decode()


def checked(document: Mapping[str, Any]) -> tuple[dict[str, Any], list[Fault]]:
    """The order in its one form, and what is wrong with it: it is one only if nothing is."""
    faults = [Fault(name, "there is no such field") for name in sorted(set(document) - set(FIELDS))]
    faults += [Fault(name, "is required") for name in REQUIRED if name not in document]
    order: dict[str, Any] = {}
    for name, check in _CHECKS.items():
        if name in document:
            try:
                order[name] = check(document[name])
            except ValueError as error:
                faults.append(Fault(name, str(error)))
    faults += _together(document)
    order.setdefault("time_in_force", TIMES_IN_FORCE[0])
    return order, faults


def _together(document: Mapping[str, Any]) -> list[Fault]:
    """What no field shows by itself."""
    priced, kind = "limit_price" in document, document.get("order_type")
    if kind == "limit" and not priced:
        return [Fault("limit_price", "is required for a limit order")]
    if kind == "market" and priced:
        return [Fault("limit_price", "has no place in a market order")]
    return []


def _quantity(value: Any) -> int:
    whole = isinstance(value, int | Decimal) and not isinstance(value, bool)
    # Its size first: to make a number of 1e999999999 would take a while.
    if not whole or not 0 < value <= MOST_QUANTITY or value != int(value):
        raise ValueError(f"must be a whole number from 1 to {MOST_QUANTITY:,}")
    return int(value)


def _price(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(PRICE, value):
        raise ValueError('must be a decimal number as text, such as "101.25"')
    if not Decimal(value):
        raise ValueError("must be above zero")
    whole, _, fraction = value.partition(".")
    fraction = fraction.rstrip("0")
    return (whole.lstrip("0") or "0") + (f".{fraction}" if fraction else "")


def _symbol(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(SYMBOL, value):
        raise ValueError("must be 1 to 32 letters, digits and . / : -, such as AAPL")
    return value.upper()


def _account(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(ACCOUNT, value):
        raise ValueError("must be 1 to 64 letters, digits and _ . : -")
    return value


def _note(value: Any) -> str:
    if not isinstance(value, str) or len(value) > MOST_NOTE:
        raise ValueError(f"must be text of at most {MOST_NOTE} characters")
    return value


def _one_of(*words: str) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in words:
            raise ValueError(f"must be one of {', '.join(words)}")
        return value

    return check


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "symbol": _symbol,
    "side": _one_of(*SIDES),
    "quantity": _quantity,
    "order_type": _one_of(*ORDER_TYPES),
    "limit_price": _price,
    "account": _account,
    "time_in_force": _one_of(*TIMES_IN_FORCE),
    "client_note": _note,
}
