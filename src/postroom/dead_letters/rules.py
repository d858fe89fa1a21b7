"""What is written down of a failure: short, storable everywhere, and without end only in number."""

from __future__ import annotations

import datetime as dt
import json

__all__ = ["CODE_CHARACTERS", "ERROR_CHARACTERS", "add_history", "storable"]

HISTORY_ENTRIES = 50
ERROR_CHARACTERS = 2000
CODE_CHARACTERS = 200


def storable(text: str, limit: int = ERROR_CHARACTERS) -> str:
    """Somebody else's text as every database takes it: no NUL, no lone surrogates, not too long."""
    return text.encode("utf-8", "replace").decode().replace("\x00", "\\0")[:limit]


def add_history(
    history: str | None, *, attempt: int, at: dt.datetime, code: str, text: str, worker: str
) -> str:
    """The history of a message with one more attempt; the oldest go first when it grows long."""
    entries = json.loads(history) if history else []
    entries.append(
        {
            "attempt": attempt,
            "at": at.isoformat(timespec="milliseconds"),
            "code": code,
            "error": text[:ERROR_CHARACTERS],
            "worker": worker,
        }
    )
    return json.dumps(entries[-HISTORY_ENTRIES:], ensure_ascii=False)
