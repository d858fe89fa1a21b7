"""The one spelling of a JSON document, so that two that mean the same have the same digest.

The order of members, white space, escapes and the spelling of numbers do not matter: `100`, `100.0`
and `1E+2` are the same number, and `-0` is `0`.
"""

from __future__ import annotations

import json
from decimal import MAX_EMAX, MAX_PREC, MIN_EMIN, Context, Decimal
from typing import Any

__all__ = ["LONGEST_WHOLE", "spelled"]

# Digits of a number that is spelled as a whole one; above it mantissa and exponent, so that a few
# letters (1e4000) never stand for many.
LONGEST_WHOLE = 40
_FIRST_LONG = 10**LONGEST_WHOLE
_EXACT = Context(prec=MAX_PREC, Emax=MAX_EMAX, Emin=MIN_EMIN)


def spelled(value: Any) -> str:
    """As `json.dumps` would, with every number in one spelling; ValueError for what is no JSON."""
    if isinstance(value, int) and not -_FIRST_LONG < value < _FIRST_LONG:
        return _number(Decimal(value))
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
    if not value.is_finite():
        raise ValueError("numbers in JSON are finite")
    if not value:
        return "0"
    exact = _EXACT.normalize(value)  # without the zeros behind its last digit, and not rounded
    if exact.adjusted() < LONGEST_WHOLE and exact == exact.to_integral_value():
        return str(int(exact))
    return str(exact)
