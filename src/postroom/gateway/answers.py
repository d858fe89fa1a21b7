"""How an exchange's answer is shown: as it was spelled, and so that every client can read it.

Promise: whatever an exchange says, an order's status can be told, in the same bytes each time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from postroom.gateway.orders import MOST_DIGITS, PIECE

__all__ = ["Spelled", "as_json", "body"]

MOST_DEPTH = 60  # with what is around it, less than the strictest usual parsers read: 64


class Spelled(str):
    """A value that is JSON already: to read it and write it again would cost digits and members."""


def as_json(answer: str | None) -> Spelled:
    """An answer, if it is JSON that others can read too; else a JSON text that holds it."""
    if answer is None:
        return Spelled("null")
    return Spelled(answer if _is_json(answer) else json.dumps(answer, ensure_ascii=False))


def body(document: Mapping[str, Any]) -> bytes:
    """An object in UTF-8, as `JSONResponse` spells it, and what is `Spelled` as it is."""
    members = (f"{_dumped(name)}:{_dumped(value)}" for name, value in document.items())
    # A half of a character cannot be sent; it becomes "?".
    return f"{{{','.join(members)}}}".encode("utf-8", "replace")


def _dumped(value: Any) -> str:
    if isinstance(value, Spelled):
        return value
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _is_json(text: str) -> bool:
    try:
        # Its depth first, and not by Python's recursion: that depends on who asks.
        if _depth(text) > MOST_DEPTH:
            return False
        said = json.loads(
            text,
            parse_int=_digits,
            parse_float=str,
            parse_constant=_no_constant,
            object_pairs_hook=list,  # and not a dict: a name that comes twice is looked at twice
        )
        json.dumps(said, ensure_ascii=False).encode()  # half a character, by its escape, is none
    except (ValueError, RecursionError):
        return False
    return True


def _depth(text: str) -> int:
    depth = deepest = 0
    if text.count("[") + text.count("{") > MOST_DEPTH:
        for piece in re.findall(PIECE, text):
            depth += (piece in "[{") - (piece in "]}")
            deepest = max(deepest, depth)
    return deepest


def _digits(text: str) -> str:
    if len(text) > MOST_DIGITS:
        raise ValueError("Python would refuse to read it")
    return text


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number in JSON")
