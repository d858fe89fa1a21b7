"""What the ledger says of a request, decided without touching anything."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from postroom.brokers.base import REQUEST_HEADER, REQUEST_MARK, is_request
from postroom.derivation import KEY_CHARACTERS
from postroom.errors import InvalidMessage
from postroom.messages import Message
from postroom.spelling import spelled

__all__ = [
    "HEADER",
    "STATES",
    "Entry",
    "Note",
    "State",
    "canonical",
    "checked_name",
    "digest",
    "entered",
    "fingerprint",
    "is_entered",
    "key_of",
]

HEADER = REQUEST_HEADER

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
    return is_request(message)


def entered(messages: Sequence[Message]) -> list[Message]:
    """Those of many messages that have a row in the ledger: for most relays none of them."""
    return [m for m in messages if m.headers_json is not None and REQUEST_MARK in m.headers_json]


def key_of(message: Message) -> str:
    """The key under which a message's request stands in the ledger."""
    return message.headers.get(HEADER, "")


def checked_name(what: str, value: object) -> str:
    """A key or a scope that every database can keep, and a header can carry."""
    if not isinstance(value, str) or not 1 <= len(value) <= KEY_CHARACTERS:
        raise InvalidMessage(f"{what} must be text of 1 to {KEY_CHARACTERS} characters")
    if not value.isprintable():
        raise InvalidMessage(f"{what} must hold only characters that can be printed")
    return value


# ── The digest of a request ────────────────────────────────────────────────────────────────────


def canonical(document: Any) -> bytes:
    """The one spelling of a request's document."""
    try:
        return spelled(document).encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidMessage(f"a request's document must be JSON: {error}") from None


def fingerprint(document: Any) -> str:
    """SHA-256 of a document's one spelling: what tells the same request from another."""
    return digest(canonical(document))


def digest(content: bytes) -> str:
    """SHA-256 of what `canonical` has spelled, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()
