"""What an operator does to a dead letter, as flows; fenced against the relay and written down.

Every change first locks the row of the letter's lane, as a relay's settle does, so neither sees the
other half-way. A redriven message keeps its id; its broker id gets a suffix, or the broker would
take it for a duplicate.
"""

from __future__ import annotations

from dataclasses import dataclass

from postroom.errors import Refused
from postroom.flow import Flow, Statement, Value

__all__ = ["Decided", "discard", "retry"]

ROOM = __package__ or "postroom.dead_letters"


@dataclass(frozen=True, slots=True)
class Decided:
    """What was done to a letter. `in_order`: it still goes before the later ones of its key."""

    id: str
    in_order: bool


def retry(id: str, *, who: str, why: str | None) -> Flow[Decided]:
    """Send a dead letter again. If it holds its key it goes first, in its old place."""
    lane, position, holds_key, *_ = yield from _take(id, "retried")
    if holds_key:
        yield _query("unblock", lane=lane, position=position)
    else:
        yield _query("requeue", id=id)
    yield _query("queue", id=id)
    yield _query("audit", who=who, what="dead.retry", subject=id, why=why)
    return Decided(id, bool(holds_key))


def discard(id: str, *, who: str, why: str) -> Flow[Decided]:
    """Give a dead letter up. If it holds its key, the next message of the key goes on."""
    lane, position, holds_key, topic, key = yield from _take(id, "discarded")
    if holds_key:
        yield _query("drop_held", lane=lane, position=position)
        yield _query("arm_next", lane=lane, topic=topic, key=key)
    yield _query("discard", id=id, note=why)
    yield _query("audit", who=who, what="dead.discard", subject=id, why=why)
    return Decided(id, bool(holds_key))


def _take(id: str, done: str) -> Flow[tuple[int, int, int, str, str | None]]:
    """Lock the letter's lane and see that the letter still waits for a decision."""
    found = yield _query("where_is", id=id)
    if not found:
        raise Refused(f"there is no dead letter {id}; `postroom dead list` shows them.")
    yield _query("lock_lane", lane=found[0][0])
    ((lane, position, holds_key, topic, key, state),) = yield _query("where_is", id=id)
    if state != "dead":
        raise Refused(f"dead letter {id} is {state} already, so it was not {done}.")
    return lane, position, holds_key, topic, key


def _query(name: str, **values: Value) -> Statement:
    return Statement(ROOM, name, values)
