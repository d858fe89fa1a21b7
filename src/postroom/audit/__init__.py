"""The audit: who changed what, when and why, written in the transaction of the change itself.

Operators' commands, relays that are started with `--rebind`, and rules that redrive dead letters
write here. Entries are only ever added; no role may change or delete one.
"""

from __future__ import annotations

import getpass
import socket
from collections.abc import Iterable
from typing import NamedTuple

from postroom.flow import Flow, Statement, Value

__all__ = ["Entry", "entries", "operator", "record", "record_each"]

ROOM = __package__ or "postroom.audit"
NAME_CHARACTERS = 255
# The end of time for a database that knows one: 9999-12-30.
NEVER_US = 253_402_128_000_000_000


class Entry(NamedTuple):
    """One entry, as it is read back. `at` is in microseconds."""

    id: int
    at: int
    who: str
    what: str
    subject: str
    why: str | None


def operator() -> str:
    """Return the account and host that act, as `user@host`."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = "unknown"
    return f"{user}@{socket.gethostname()}"[:NAME_CHARACTERS]


def record(what: str, subject: str, why: str | None, *, who: str | None = None) -> Statement:
    """Add an entry inside the transaction of the change. `who` defaults to `operator()`."""
    return Statement(ROOM, "record", _values(who or operator(), what, subject, why))


def record_each(what: str, subjects: Iterable[tuple[str, str]], *, who: str) -> Statement:
    """Add an entry for each (subject, why) inside the transaction of the change."""
    many = [_values(who, what, subject, why) for subject, why in subjects]
    return Statement(ROOM, "record", many=many)


def _values(who: str, what: str, subject: str, why: str | None) -> dict[str, Value]:
    return {
        "who": who[:NAME_CHARACTERS],
        "what": what,
        "subject": subject[:NAME_CHARACTERS],
        "why": why,
    }


def entries(
    *,
    who: str | None = None,
    what: str | None = None,
    subject: str | None = None,
    since: int | None = None,
    until: int | None = None,
    before: int | None = None,
    rows: int = 100,
) -> Flow[list[Entry]]:
    """Return entries, newest first. `what` matches a name or its beginning up to a dot, `subject`
    any part; `before` is the id of the last entry of the previous page."""
    found = yield Statement(
        ROOM,
        "entries",
        {
            "who": who,
            "what": what,
            "subject": subject,
            "since": since or 0,
            "until": until or NEVER_US,
            "before": before or 2**62,
            "rows": rows,
        },
    )
    return [Entry(*row) for row in found]
