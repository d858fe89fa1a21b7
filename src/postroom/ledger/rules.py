"""What the ledger says of a request, decided without touching anything."""

from __future__ import annotations

import decimal
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from postroom.errors import InvalidMessage
from postroom.messages import Message

__all__ = [
    "HEADER",
    "STATES",
    "Entry",
    "Note",
    "State",
    "canonical",
    "checked_name",
    "entered",
    "fingerprint",
    "is_entered",
    "key_of",
]

# A message with this header has a row in the ledger under its own id; its value is the row's key.
# The relay looks for the name in the headers' text, so that other messages cost it next to nothing.
HEADER = "postroom-ledger"
_MARK = f'"{HEADER}"'
LONGEST_NAME = 255
LONGEST_WHOLE = 40

State: TypeAlias = Literal["accepted", "succeeded", "failed", "unknown"]
STATES: tuple[State, ...] = ("accepted", "succeeded", "failed", "unknown")


class Entry(NamedTuple):
    """One request in the ledger. `finished_us` is None while a relay still has it to send."""

    id: str
    scope: str
    key: str
    digest: str
    state: State
    request: bytes
    answer: str | None
    attempts: int
    error_code: str | None
    error: str | None
    adapter: str | None
    note: str | None
    accepted_us: int
    updated_us: int
    finished_us: int | None

    @property
    def finished(self) -> bool:
        """Whether nothing more happens to it by itself."""
        return self.finished_us is not None


@dataclass(frozen=True, slots=True)
class Note:
    """What a relay has to say of a request: where it stands now, and whether that is the end."""

    id: str
    key: str
    state: State
    attempts: int
    adapter: str
    ends: bool
    answer: str | None = None
    code: str | None = None
    text: str | None = None


def is_entered(message: Message) -> bool:
    """Whether a message has a row in the ledger."""
    headers = message.headers_json
    return headers is not None and _MARK in headers


def entered(messages: Sequence[Message]) -> list[Message]:
    """Those of many messages that have a row in the ledger: for most relays none of them."""
    return [m for m in messages if m.headers_json is not None and _MARK in m.headers_json]


def key_of(message: Message) -> str:
    """The key under which a message's request stands in the ledger."""
    return message.headers.get(HEADER, "")


def checked_name(what: str, value: object) -> str:
    """A key or a scope that every database can keep, and a header can carry."""
    if not isinstance(value, str) or not 1 <= len(value) <= LONGEST_NAME:
        raise InvalidMessage(f"{what} must be text of 1 to {LONGEST_NAME} characters")
    if not value.isprintable():
        raise InvalidMessage(f"{what} must hold only characters that can be printed")
    return value


# ── The digest of a request ────────────────────────────────────────────────────────────────────


def canonical(document: Any) -> bytes:
    """The one spelling of a JSON document: keys in order, no spaces, a number by its value.

    `100`, `100.0` and `1E+2` are the same number, and `-0` is `0`.
    """
    return _spelled(document).encode()


def fingerprint(document: Any) -> str:
    """SHA-256 of a document's one spelling: what tells the same request from another."""
    return hashlib.sha256(canonical(document)).hexdigest()


def _spelled(value: Any) -> str:
    if value is None or isinstance(value, bool | str):
        return json.dumps(value, ensure_ascii=True)
    if isinstance(value, int | float | decimal.Decimal):
        return _number(decimal.Decimal(str(value)))
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_spelled, value))}]"
    if isinstance(value, dict):
        pairs = (f"{_spelled(str(name))}:{_spelled(value[name])}" for name in sorted(value))
        return f"{{{','.join(pairs)}}}"
    raise InvalidMessage(f"a {type(value).__name__} has no place in a request's document")


def _number(value: decimal.Decimal) -> str:
    if not value.is_finite():
        raise InvalidMessage("a request's numbers must be finite")
    # Not normalize(), which rounds to the context's digits.
    sign, digits, exponent = value.as_tuple()
    text = "".join(map(str, digits)).lstrip("0")
    if not text:
        return "0"
    bare = text.rstrip("0")
    exponent = int(exponent) + len(text) - len(bare)
    whole = exponent >= 0 and len(bare) + exponent <= LONGEST_WHOLE
    spelled = bare + "0" * exponent if whole else f"{bare}e{exponent}"
    return f"-{spelled}" if sign else spelled
