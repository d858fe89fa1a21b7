"""What is written down of a failure: short, storable everywhere, and without end only in number."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Sequence

__all__ = ["CODE_CHARACTERS", "ERROR_CHARACTERS", "add_history", "in_doubt", "storable"]

HISTORY_ENTRIES = 50
ERROR_CHARACTERS = 2000
CODE_CHARACTERS = 200


def storable(text: str, limit: int = ERROR_CHARACTERS) -> str:
    """Somebody else's text as every database takes it: no NUL, no lone surrogates, not too long."""
    if not text.isascii():
        text = text.encode("utf-8", "replace").decode()
    return text.replace("\x00", "\\0")[:limit]


def add_history(
    history: str | None,
    *,
    attempt: int,
    at: dt.datetime,
    code: str,
    text: str,
    worker: str,
    doubt: bool = False,
    where: Sequence[str] = (),
) -> str:
    """The history of a message with one more attempt; the oldest go first when it grows long.

    `doubt`: it may have arrived, by this attempt or an earlier one. `where`: the frames in which
    the attempt failed, outermost first.
    """
    entries = json.loads(history) if history else []
    entry: dict[str, object] = {
        "attempt": attempt,
        "at": at.isoformat(timespec="milliseconds"),
        "code": code,
        "error": text[:ERROR_CHARACTERS],
        "worker": worker,
    }
    if where:
        entry["where"] = list(where)
    entries.append(entry | {"doubt": True} if doubt else entry)
    return json.dumps(entries[-HISTORY_ENTRIES:], ensure_ascii=False)


def in_doubt(history: str | None) -> bool:
    """Whether a message with this history may have arrived."""
    entries = json.loads(history) if history else []
    return bool(entries) and bool(entries[-1].get("doubt"))
