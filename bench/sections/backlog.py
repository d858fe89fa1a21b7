"""Whether reading a batch stays cheap: with a large backlog, under a pinned snapshot, behind an
open publisher. The reads are a relay's own, timed where it asks the database."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from bench.figures import Figures, at_most, median
from bench.room import OURS, Room

SIZES = ((10_000, 100_000, 1_000_000, 5_000_000), (2_000, 10_000))
READ = (200_000, 10_000)
DELIVERED = (150_000, 4_000)
PINNED = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; SELECT count(*) FROM postroom.lane"
PUBLISHING = "BEGIN; LOCK TABLE postroom.outbox IN ROW EXCLUSIVE MODE"


def backlog(room: Room) -> Figures:
    """Batch after batch, the same number of messages in all, in front of ever more that wait."""
    figures = Figures("Reading a batch, milliseconds for 1,000 messages, by backlog")
    sizes = SIZES[1] if room.quick else SIZES[0]
    times: dict[int, float] = {}
    for size in sizes:
        room.tick(f"{size:,} pending")
        with room.database() as url:
            room.run(OURS, "prepare", database=url, messages=size)
            found = room.run(OURS, "read", database=url, messages=room.size(*READ))
            times[size] = _millis(found["reads"][1:])  # the first one fills caches
    least, most = min(sizes), max(sizes)
    figures.numbers["millis_by_backlog"] = times
    for size, millis in times.items():
        bar = at_most(2.0) if size == most else None
        figures.add(
            f"{size:,} pending", f"{millis:.2f} ms", millis / times[least], to=f"{least:,}", bar=bar
        )
    return figures


def pinned(room: Room) -> Figures:
    """What somebody else's open transaction does to reading, from the first tenth to the last."""
    count = room.size(*DELIVERED)
    figures = Figures(
        f"Reading a batch while {count:,} messages are delivered, last to first tenth"
    )
    for name, begin, bar in (
        ("nothing open", None, None),
        ("a read-only snapshot pinned", PINNED, 1.3),
        ("a publisher open", PUBLISHING, None),
    ):
        room.tick(name)
        with room.database() as url:
            room.run(OURS, "prepare", database=url, messages=count)
            with _open(url, begin):
                reads = room.run(OURS, "drain", database=url, messages=count)["reads"]
        first, last = _tenths(reads)
        must = at_most(bar) if bar else None
        figures.add(name, f"{first:.2f} → {last:.2f} ms", last / first, to="its start", bar=must)
        figures.numbers[name] = [first, last]
    return figures


@contextmanager
def _open(url: str, begin: str | None) -> Iterator[None]:
    with psycopg.connect(url, autocommit=True) as connection:
        if begin:
            connection.execute(begin)
        yield


def _millis(reads: list[Any]) -> float:
    """Milliseconds for a thousand messages, as the median of reads that brought many."""
    full = max(rows for rows, _ in reads)
    return median(seconds / rows * 1e6 for rows, seconds in reads if rows * 2 >= full)


def _tenths(reads: list[Any]) -> tuple[float, float]:
    """The same of the first and of the last tenth of what was read."""
    total, seen = sum(rows for rows, _ in reads), 0
    first: list[Any] = []
    last: list[Any] = []
    for rows, seconds in reads:
        if rows and seen < total / 10:
            first.append((rows, seconds))
        if rows and seen >= total * 0.9:
            last.append((rows, seconds))
        seen += rows
    return _millis(first), _millis(last)
