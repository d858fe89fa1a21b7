"""Ids by the million in bounded memory: a table on disk that says where each message was seen.

The application's own ids come in on one side, the places of the database on the other, and then
each committed id is looked up. A file of its own, so that nothing is written to the database.
"""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Self

__all__ = ["PLACES", "Ledger", "as_bytes", "as_text", "born_us"]

# What became of a message, most telling first: one that is in two places is counted in the first.
PLACES = (
    *("delivered", "resolved", "pending", "delayed", "held", "dead", "queued", "discarded"),
    "expired",
)
_RANKS = {place: rank for rank, place in enumerate(PLACES)}


def as_bytes(id: str) -> bytes:
    """The 16 bytes of an id; ValueError if it is none."""
    text = id.replace("-", "")
    if len(text) != 32:
        raise ValueError(id)
    return bytes.fromhex(text)


def as_text(id: bytes) -> str:
    """An id as people write it."""
    text = id.hex()
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def born_us(id: bytes) -> int | None:
    """When an id was made, in microseconds, if it tells: a UUIDv7 does."""
    return int.from_bytes(id[:6], "big") * 1000 if id[6] >> 4 == 7 else None


class Ledger:
    """Committed ids and the places ids were seen in."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="postroom-verify-")
        self._file = sqlite3.connect(Path(self._folder.name) / "ledger.db", isolation_level=None)
        for command in (
            "PRAGMA journal_mode = OFF",
            "PRAGMA synchronous = OFF",
            "CREATE TABLE committed (id BLOB NOT NULL)",
            "CREATE TABLE place (id BLOB NOT NULL, rank INTEGER NOT NULL)",
            "BEGIN",
        ):
            self._file.execute(command)
        self.given = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()
        self._folder.cleanup()

    def commit(self, ids: Sequence[bytes]) -> None:
        """Ids the application says were committed."""
        self.given += len(ids)
        self._file.executemany("INSERT INTO committed VALUES (?)", ((id,) for id in ids))

    def place(self, seen: Iterable[tuple[str, str]]) -> None:
        """Ids as the database writes them, and the place each was seen in."""
        rows = ((as_bytes(id), _RANKS[place]) for id, place in seen)
        self._file.executemany("INSERT INTO place VALUES (?, ?)", rows)

    def close_books(self) -> None:
        """No more comes in: sort both sides."""
        self._file.execute("COMMIT")
        self._file.execute("CREATE INDEX committed_id ON committed (id)")
        self._file.execute("CREATE INDEX place_id ON place (id, rank)")

    def counts(self) -> dict[str, int]:
        """How many of the committed ids are in each place; each id counts once."""
        rows = self._file.execute(
            "SELECT rank, count(*) FROM (SELECT (SELECT min(p.rank) FROM place p"
            " WHERE p.id = c.id) AS rank FROM (SELECT DISTINCT id FROM committed) c)"
            " WHERE rank IS NOT NULL GROUP BY rank"
        )
        found = dict(rows.fetchall())
        return {place: found.get(rank, 0) for place, rank in _RANKS.items()}

    def missing(self) -> Iterator[bytes]:
        """Committed ids that were seen nowhere."""
        for (id,) in self._file.execute(
            "SELECT DISTINCT id FROM committed c"
            " WHERE NOT EXISTS (SELECT 1 FROM place p WHERE p.id = c.id)"
        ):
            yield id

    def unknown(self) -> Iterator[bytes]:
        """Ids that were seen, and that the application does not know."""
        for (id,) in self._file.execute(
            "SELECT DISTINCT id FROM place p"
            " WHERE NOT EXISTS (SELECT 1 FROM committed c WHERE c.id = p.id)"
        ):
            yield id
