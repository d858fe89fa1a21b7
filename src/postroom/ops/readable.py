"""`postroom doctor --readable`: can the code about to be deployed read what is on its way?

Promise: every message that waits (pending, held, delayed, dead, and held by a consumer) is decoded
as its handler would get it, upcasters and all, and nothing is handled or changed. All of them,
however many: in pages, so it takes little memory, and with a word now and then about how far it is.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from postroom.brokers.receiving import Delivery
from postroom.databases.database import WorkerLink
from postroom.inbox.decoding import decode, plain
from postroom.inbox.rules import Letter, letter_of
from postroom.messages import LANES, declared_types
from postroom.ops.consumers import ROOM
from postroom.ops.desk import desk

if TYPE_CHECKING:
    from postroom.inbox.consumer import Consumer

__all__ = ["Reading", "read_all"]

PAGE_ROWS = 100
MOST_EXAMPLES = 20
NIL = "00000000-0000-0000-0000-000000000000"
OUTBOX = "outbox"


@dataclass(slots=True)
class Reading:
    """What was read, what could not be, and of which types nobody here knows anything."""

    read: dict[str, int] = field(default_factory=dict)
    unreadable: int = 0
    examples: list[dict[str, Any]] = field(default_factory=list)
    foreign: dict[str, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.unreadable


async def read_all(
    url: str,
    consumers: Sequence[Consumer],
    tell: Callable[[str, int, int | None], None] = lambda *_: None,
) -> Reading:
    """Read everything that waits with the code that is loaded now."""
    reading = Reading()
    async with desk(url) as link:
        places = [
            ("pending", _by_lane(link, "read_outbox")),
            ("held", _by_lane(link, "read_held")),
            ("delayed", _delayed(link)),
            ("dead", _dead(link)),
            *((f"held by {each.name}", _waiting(link, each.name)) for each in consumers),
        ]
        for place, pages in places:
            seen = 0
            async for source, id, topic, type, content_type, payload in pages:
                seen += 1
                letter = _letter(id, topic, type, content_type, bytes(payload))
                _read(reading, place, source, letter, consumers)
                if seen % PAGE_ROWS == 0:
                    tell(place, seen, None)
            reading.read[place] = seen
    return reading


def _read(
    reading: Reading, place: str, source: str, letter: Letter, consumers: Sequence[Consumer]
) -> None:
    """Read one message as each of those would that it goes to."""
    mine = [one for one in consumers if source in (OUTBOX, f"consumer:{one.name}")]
    known = False
    for consumer in mine:
        handler = consumer.handlers.find(letter.type)
        if handler is not None:
            known = True
            try:
                consumer.handlers.content(handler, letter)
            except Exception as error:
                _note(reading, place, letter, f"{consumer.name}: {error}")
        elif letter.topic in consumer.topics and consumer.settings.unknown == "refuse":
            known = True
            _note(reading, place, letter, f"{consumer.name} has no handler for {letter.type}")
    if known:
        return
    if (cls := declared_types().get(letter.type)) is None:
        reading.foreign[letter.type] = reading.foreign.get(letter.type, 0) + 1
        return
    try:
        decode(cls, plain(letter.payload, letter.content_type))
    except Exception as error:
        _note(reading, place, letter, str(error))


def _note(reading: Reading, place: str, letter: Letter, text: str) -> None:
    reading.unreadable += 1
    if len(reading.examples) < MOST_EXAMPLES:
        reading.examples.append(
            {"place": place, "id": letter.id, "type": letter.type, "error": text}
        )


def _letter(id: str, topic: str, type: str, content_type: str, payload: bytes) -> Letter:
    return letter_of(Delivery(id, type, topic, None, content_type, {}, payload, topic, 0, 0, None))


async def _by_lane(link: WorkerLink, name: str) -> AsyncIterator[tuple[Any, ...]]:
    for lane in range(LANES):
        after = 0
        while page := await link.query(ROOM, name, lane=lane, after=after, rows=PAGE_ROWS):
            for row in page:
                yield (OUTBOX, *row[1:])
            after = page[-1][0]


async def _delayed(link: WorkerLink) -> AsyncIterator[tuple[Any, ...]]:
    for lane in range(LANES):
        after = NIL
        while page := await link.query(
            ROOM, "read_delayed", lane=lane, after=after, rows=PAGE_ROWS
        ):
            for row in page:
                yield (OUTBOX, *row)
            after = page[-1][0]


async def _dead(link: WorkerLink) -> AsyncIterator[tuple[Any, ...]]:
    source, id, position = "", NIL, -1
    while page := await link.query(
        ROOM, "read_dead", source=source, id=id, position=position, rows=PAGE_ROWS
    ):
        for row in page:
            yield (row[0], row[1], *row[3:])
        source, id, position = page[-1][:3]


async def _waiting(link: WorkerLink, consumer: str) -> AsyncIterator[tuple[Any, ...]]:
    after = 0
    while page := await link.query(
        ROOM, "read_waiting", consumer=consumer, after=after, rows=PAGE_ROWS
    ):
        for row in page:
            yield (f"consumer:{consumer}", *row[1:])
        after = page[-1][0]
