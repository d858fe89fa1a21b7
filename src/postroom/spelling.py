"""The one spelling of a JSON document, so that two that mean the same have the same digest.

The order of members, white space, escapes and the spelling of numbers do not matter: `100`, `100.0`
and `1E+2` are the same number, and `-0` is `0`.
"""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

__all__ = ["spelled"]

LONGEST_NUMBER = 4000  # digits; beyond it a number stays as mantissa and exponent


def spelled(value: Any) -> str:
    """As `json.dumps` would, with every number in one spelling; ValueError for what is no JSON."""
    if value is None or isinstance(value, str | bool | int):
        return json.dumps(value)
    if isinstance(value, dict):
        members = (f"{json.dumps(str(name))}:{spelled(value[name])}" for name in sorted(value))
        return "{" + ",".join(members) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(spelled, value)) + "]"
    if isinstance(value, float | Decimal):
        return _number(Decimal(str(value)))
    raise ValueError(f"a {type(value).__name__} has no place in a JSON document")


def _number(value: Decimal) -> str:
    # Not normalize(), which rounds to the context's digits.
    negative, digits, exponent = value.as_tuple()
    if not isinstance(exponent, int):
        raise ValueError("numbers in JSON are finite")
    text = "".join(map(str, digits)).lstrip("0")
    stripped = text.rstrip("0")
    exponent += len(text) - len(stripped)
    if not stripped:
        return "0"
    sign = "-" if negative else ""
    if 0 <= exponent <= LONGEST_NUMBER:  # a whole number, spelled as one
        return f"{sign}{stripped}{'0' * exponent}"
    return f"{sign}{stripped}e{exponent}"
