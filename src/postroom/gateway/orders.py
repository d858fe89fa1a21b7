"""What an order is: checked, every fault named by its field, and brought into one form.

Pure. Two documents that mean the same order become the same document here, so they have the same
digest: the order of fields, `100` or `100.0`, "1.50" or "1.5", and a default that is spelled out do
not matter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

__all__ = ["BODY_BYTES", "BadBody", "Fault", "checked", "parse"]

BODY_BYTES = 16_384
MOST_QUANTITY = 1_000_000_000_000
MOST_NOTE = 200
SIDES = ("buy", "sell")
ORDER_TYPES = ("market", "limit")
TIMES_IN_FORCE = ("day", "gtc", "ioc", "fok")

SYMBOL = r"[A-Za-z0-9][A-Za-z0-9./:-]{0,31}"
ACCOUNT = r"[A-Za-z0-9_.:-]{1,64}"
PRICE = r"[0-9]{1,15}(\.[0-9]{1,10})?"

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
        document = json.loads(
            body.decode("utf-8"),
            parse_float=_number,
            parse_constant=_no_constant,
            object_pairs_hook=_once_each,
        )
        for name, value in document.items() if isinstance(document, dict) else ():
            _storable(name, value)
    except BadBody:
        raise
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        raise BadBody("the body is not JSON") from None
    if not isinstance(document, dict):
        raise BadBody("the body must be a JSON object")
    return document


class _TooLarge(str):
    """A number that no decimal can hold, as it was spelled."""


def _number(text: str) -> Any:
    try:
        return Decimal(text)
    except ArithmeticError:
        return _TooLarge(text)


def _storable(name: str, value: Any) -> None:
    """Refuse what could be written down and never be read or sent again."""
    try:
        json.dumps({name: value}, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        shown = name.encode("ascii", "backslashreplace").decode()
        raise BadBody(f"{shown} holds half of a character", shown) from None
    if _too_large(value):
        raise BadBody(f"{name} holds a number that is too large", name)


def _too_large(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(map(_too_large, value.values() if isinstance(value, dict) else value))
    return isinstance(value, _TooLarge)


def _no_constant(name: str) -> Any:
    raise BadBody(f"{name} is not a number in JSON")


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):
        raise BadBody("a field stands in it twice")
    return document


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
