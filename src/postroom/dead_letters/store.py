"""What an operator does to a dead letter, as flows; fenced against workers and written down.

A letter goes back to where it died, and nowhere else. Those of the outbox are the relay's: every
change first locks the rows of their lanes, as a relay's settle does, so neither sees the other
half-way. A redriven message keeps its id; its broker id gets a suffix, or the broker would take it
for a duplicate. Other rooms say with `return_to` how they take theirs back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from postroom import audit
from postroom.errors import Refused
from postroom.flow import Flow, Statement, Value
from postroom.ledger import store as ledger

__all__ = [
    "OUTBOX",
    "Decided",
    "Letter",
    "Returns",
    "discard",
    "give_up",
    "lock",
    "lock_lanes",
    "retry",
    "return_to",
    "send_again",
]

ROOM = __package__ or "postroom.dead_letters"
OUTBOX = "outbox"


@dataclass(frozen=True, slots=True)
class Decided:
    """What was done to a letter. `in_order`: it still goes before the later ones of its key."""

    id: str
    in_order: bool


class Letter(NamedTuple):
    """Where a letter stands. Two messages of one id are two letters, told by their positions."""

    id: str
    lane: int
    position: int
    holds_key: int
    topic: str
    key: str | None
    state: str
    source: str = OUTBOX


class Returns(Protocol):
    """How a room takes its dead letters back. All of them are called inside one transaction."""

    def lock(self, waiting: Sequence[Letter]) -> Flow[None]:
        """Keep the room's workers away from these until we commit."""

    def send_again(self, waiting: Sequence[Letter]) -> Flow[int]:
        """Have these handled again; returns how many kept their place in their key's order."""

    def give_up(self, letter: Letter) -> Flow[None]:
        """Forget this one; the next message of its key gets its turn."""


_rooms: dict[str, Returns] = {}


def return_to(kind: str, room: Returns) -> None:
    """Letters whose source is `kind:name` go back to this room."""
    _rooms[kind] = room


def retry(id: str, *, who: str, why: str | None, source: str | None = None) -> Flow[Decided]:
    """Send a dead letter again. If it holds its key it goes first, in its old place."""
    waiting = yield from _take(id, "retried", source)
    kept = yield from send_again(waiting)
    yield audit.record("dead.retry", id, why, who=who)
    return Decided(id, kept == len(waiting))


def discard(id: str, *, who: str, why: str, source: str | None = None) -> Flow[Decided]:
    """Give a dead letter up. If it holds its key, the next message of the key goes on."""
    for letter in (yield from _take(id, "discarded", source)):
        yield from give_up(letter, why)
    yield audit.record("dead.discard", id, why, who=who)
    return Decided(id, True)


def send_again(waiting: Sequence[Letter]) -> Flow[int]:
    """Queue letters of one source that are locked; returns how many kept their place in the order
    of their key.

    What does not hold its key any more comes back in its old position among what waits.
    """
    if (room := _room(waiting[0].source)) is not None:
        kept = yield from room.send_again(waiting)
        yield from _each("queue", waiting)
        return kept
    yield from ledger.reopen(letter.id for letter in waiting)
    return (yield from _to_the_relay(waiting))


def _to_the_relay(waiting: Sequence[Letter]) -> Flow[int]:
    rows = yield _query(
        "blocked",
        lane_list=[letter.lane for letter in waiting],
        position_list=[letter.position for letter in waiting],
    )
    blocked = {(lane, position) for lane, position in rows}
    kept = [letter for letter in waiting if (letter.lane, letter.position) in blocked]
    moved = [letter for letter in waiting if (letter.lane, letter.position) not in blocked]
    yield from _each("unblock", kept)
    yield from _each("requeue", moved)
    keys = list(
        {(one.lane, one.topic, one.key): one for one in moved if one.key is not None}.values()
    )
    yield from _each("disarm", keys)
    yield from _each("arm_next", keys)
    yield from _each("queue", waiting)
    return len(kept)


def give_up(letter: Letter, why: str) -> Flow[None]:
    """Discard a letter that is locked; the next message of its key gets its turn."""
    if (room := _room(letter.source)) is not None:
        yield from room.give_up(letter)
    else:
        yield _query("drop_held", lane=letter.lane, position=letter.position)
        if letter.key is not None:
            yield _query("arm_next", lane=letter.lane, topic=letter.topic, key=letter.key)
    yield _query("discard", id=letter.id, position=letter.position, source=letter.source, note=why)


def lock(waiting: Sequence[Letter]) -> Flow[None]:
    """Wait for what workers are writing about letters of one source, and keep them waiting."""
    if not waiting:
        return
    if (room := _room(waiting[0].source)) is not None:
        yield from room.lock(waiting)
    else:
        yield from lock_lanes([letter.lane for letter in waiting])


def _room(source: str) -> Returns | None:
    """Who takes letters of a source back; None: the relay."""
    if source == OUTBOX:
        return None
    room = _rooms.get(source.partition(":")[0])
    if room is None:
        raise Refused(f"nobody here takes letters of {source} back; nothing was changed.")
    return room


def lock_lanes(lanes: Sequence[int]) -> Flow[None]:
    """Wait for what relays are writing in these lanes, and keep them waiting until we commit."""
    for lane in sorted(set(lanes)):
        yield _query("lock_lane", lane=lane)


def _take(id: str, done: str, source: str | None) -> Flow[list[Letter]]:
    """Lock the letter and see that it still waits for a decision."""
    found = yield from _letters(id, source)
    if not found:
        raise Refused(f"there is no dead letter {id}; `postroom dead list` shows them.")
    sources = sorted({letter.source for letter in found if letter.state == "dead"})
    if len(sources) > 1:
        raise Refused(
            f"dead letter {id} is one of {' and of '.join(sources)}: say which with --source."
        )
    source = sources[0] if sources else found[-1].source
    yield from lock([letter for letter in found if letter.source == source])
    found = yield from _letters(id, source)
    if waiting := [letter for letter in found if letter.state == "dead"]:
        return waiting
    raise Refused(f"dead letter {id} is {found[-1].state} already, so it was not {done}.")


def _letters(id: str, source: str | None) -> Flow[list[Letter]]:
    rows = yield _query("where_is", id=id, source=source)
    return [Letter(id, *row) for row in rows]


def _each(name: str, waiting: Sequence[Letter]) -> Flow[None]:
    if waiting:
        yield Statement(ROOM, name, many=[letter._asdict() for letter in waiting])


def _query(name: str, **values: Value) -> Statement:
    return Statement(ROOM, name, values)
