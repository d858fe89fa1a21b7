"""What an operator does to a dead letter, as flows; fenced against the relay and written down.

Every change first locks the rows of the letters' lanes, as a relay's settle does, so neither sees
the other half-way. A redriven message keeps its id; its broker id gets a suffix, or the broker
would take it for a duplicate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from postroom.errors import Refused
from postroom.flow import Flow, Statement, Value

__all__ = ["Decided", "Letter", "discard", "give_up", "lock_lanes", "retry", "send_again"]

ROOM = __package__ or "postroom.dead_letters"


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


def retry(id: str, *, who: str, why: str | None) -> Flow[Decided]:
    """Send a dead letter again. If it holds its key it goes first, in its old place."""
    waiting = yield from _take(id, "retried")
    kept = yield from send_again(waiting)
    yield _query("audit", who=who, what="dead.retry", subject=id, why=why)
    return Decided(id, kept == len(waiting))


def discard(id: str, *, who: str, why: str) -> Flow[Decided]:
    """Give a dead letter up. If it holds its key, the next message of the key goes on."""
    for letter in (yield from _take(id, "discarded")):
        yield from give_up(letter, why)
    yield _query("audit", who=who, what="dead.discard", subject=id, why=why)
    return Decided(id, True)


def send_again(waiting: Sequence[Letter]) -> Flow[int]:
    """Queue letters whose lanes are locked; returns how many kept their place in their key's order.

    What does not hold its key any more comes back in its old position among what waits.
    """
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
    """Discard a letter whose lane is locked; the next message of its key gets its turn."""
    yield _query("drop_held", lane=letter.lane, position=letter.position)
    if letter.key is not None:
        yield _query("arm_next", lane=letter.lane, topic=letter.topic, key=letter.key)
    yield _query("discard", id=letter.id, position=letter.position, note=why)


def lock_lanes(lanes: Sequence[int]) -> Flow[None]:
    """Wait for what relays are writing in these lanes, and keep them waiting until we commit."""
    for lane in sorted(set(lanes)):
        yield _query("lock_lane", lane=lane)


def _take(id: str, done: str) -> Flow[list[Letter]]:
    """Lock the letter's lane and see that the letter still waits for a decision."""
    found = yield from _letters(id)
    if not found:
        raise Refused(f"there is no dead letter {id}; `postroom dead list` shows them.")
    yield from lock_lanes([letter.lane for letter in found])
    found = yield from _letters(id)
    if waiting := [letter for letter in found if letter.state == "dead"]:
        return waiting
    raise Refused(f"dead letter {id} is {found[-1].state} already, so it was not {done}.")


def _letters(id: str) -> Flow[list[Letter]]:
    rows = yield _query("where_is", id=id)
    return [Letter(id, *row) for row in rows]


def _each(name: str, waiting: Sequence[Letter]) -> Flow[None]:
    if waiting:
        yield Statement(ROOM, name, many=[letter._asdict() for letter in waiting])


def _query(name: str, **values: Value) -> Statement:
    return Statement(ROOM, name, values)
