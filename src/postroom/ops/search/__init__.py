"""Looking through messages wherever they are, in pages: bounded in memory and in rows looked at."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from postroom.databases.database import WorkerLink
from postroom.flow import Row
from postroom.messages import LANES, lane_of
from postroom.ops.desk import archive_blocks, desk, readable
from postroom.ops.states import observed

__all__ = ["PLACES", "WAITING", "Found", "Wanted", "search"]

ROOM = __package__ or "postroom.ops.search"
PAGE_ROWS = 2000
NIL = "00000000-0000-0000-0000-000000000000"

# Which queries page through messages of each state. A word for a place narrows a state further.
PLACES: dict[str, tuple[str, ...]] = {
    "pending": ("outbox_page", "held_page", "delayed_page"),
    "sending": ("outbox_page", "held_page"),
    "succeeded": ("archive_page", "dead_letter_page"),
    "failed": ("held_page",),
    "aborted": ("dead_letter_page",),
    "held": ("held_page",),
    "delayed": ("delayed_page",),
    "delivered": ("archive_page",),
    **dict.fromkeys(("dead", "queued", "resolved", "discarded", "expired"), ("dead_letter_page",)),
}
WAITING = ("pending", "sending", "failed")
# The words of `messages show` for places that have another word here.
_NAMES = {"pending": "outbox", "delivered": "archive"}
_FIELDS = (
    *("place", "lane", "position", "id", "topic", "key", "type", "aggregate_type", "aggregate_id"),
    *("size", "attempts", "error_code", "created_at", "at"),
)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is looked for; None is anything. Times are microseconds of the message's creation."""

    topic: str | None = None
    key: str | None = None
    type: str | None = None
    aggregate_type: str | None = None
    aggregate_id: str | None = None
    error_code: str | None = None
    since: int | None = None
    until: int | None = None
    text: str | None = None

    def fits(self, row: Row) -> bool:
        """Whether a row of a page is one of these."""
        _, _, _, _, topic, key, type, aggregate_type, aggregate_id, _, _, code, created, _ = row[
            :14
        ]
        return (
            self.topic in (None, topic)
            and self.key in (None, key)
            and self.type in (None, type)
            and self.aggregate_type in (None, aggregate_type)
            and self.aggregate_id in (None, aggregate_id)
            and self.error_code in (None, code)
            and (self.since is None or created >= self.since)
            and (self.until is None or created < self.until)
            and (self.text is None or self.text.encode() in bytes(row[14] or b""))
        )

    @property
    def lanes(self) -> Sequence[int]:
        """The lanes it can be in: one, if topic and key are known."""
        if self.topic is not None and self.key is not None:
            return [lane_of(self.topic, self.key, "")]
        return range(LANES)

    @property
    def is_empty(self) -> bool:
        """Whether nothing in particular is looked for."""
        return all(getattr(self, spec.name) is None for spec in dataclasses.fields(self))


@dataclass(slots=True)
class Found:
    """What was found, after how many rows, and whether there was more to look at."""

    messages: list[dict[str, Any]]
    looked_at: int = 0
    complete: bool = True


async def search(
    url: str,
    wanted: Wanted,
    *,
    states: Sequence[str] = WAITING,
    limit: int = 100,
    scan: int = 100_000,
    progress: Callable[[int], None] = lambda looked_at: None,
) -> Found:
    """The first `limit` messages that fit, looking at no more than `scan` rows of each place."""
    found = Found([])
    seen: set[tuple[str, int]] = set()
    async with desk(url) as link:
        batches = await link.query(ROOM, "batches")
        for place in dict.fromkeys(page for state in states for page in PLACES[state]):
            looked_at = 0
            async for page in _pages(link, place, wanted, scan):
                looked_at += len(page)
                progress(found.looked_at + looked_at)
                for row in page:
                    # A dead letter that holds its key is in two places: told once.
                    told, message = (row[3], row[2]), _message(row, batches)
                    words = {message["state"], row[0] if row[0] != "pending" else ""}
                    if words & set(states) and told not in seen and wanted.fits(row):
                        seen.add(told)
                        found.messages.append(message)
                if len(found.messages) >= limit or looked_at >= scan:
                    break
            found.looked_at += looked_at
            found.complete = found.complete and looked_at < scan
            if len(found.messages) >= limit:
                found.complete = False
                break
    del found.messages[limit:]
    return found


def _message(row: Row, batches: Sequence[Row]) -> dict[str, Any]:
    """A row of a page for people and programs, with the state it is in."""
    fields = dict(zip(_FIELDS, row[:14], strict=True))
    fields["place"] = place = _NAMES.get(str(row[0]), str(row[0]))
    state = observed(
        place,
        attempts=fields["attempts"],
        error_code=fields["error_code"],
        sending=any(lane == row[1] and lo <= row[2] <= hi for lane, lo, hi in batches),
    )
    return readable({"state": state, **fields})


async def _pages(
    link: WorkerLink, place: str, wanted: Wanted, scan: int
) -> AsyncIterator[list[Row]]:
    payloads, rows = int(wanted.text is not None), min(PAGE_ROWS, scan)
    ask = {"rows": rows, "payloads": payloads}
    if place == "archive_page" and link.dialect == "postgresql":
        async for page in archive_blocks(link, ROOM, place, **ask):
            yield page
        return
    if place in ("archive_page", "dead_letter_page"):
        page = await link.query(ROOM, place, after_id=NIL, **ask)
        while page:
            yield page
            page = await link.query(ROOM, place, after_id=page[-1][3], **ask)
        return
    for lane in wanted.lanes:
        if place == "delayed_page":
            yield await link.query(ROOM, place, lane=lane, **(ask | {"rows": scan}))
            continue
        after = 0
        while page := await link.query(ROOM, place, lane=lane, after=after, **ask):
            yield page
            after = page[-1][2]
