"""Lanes, held keys and waiting messages, mended by hand: flows fenced against the relays.

Every change first locks the lane's row, as a relay's settle does. What takes a message away that a
relay may have read already takes the lane away with it (`yield_lane`): the relay finds its fence
gone before it sends, and takes the lane again a moment later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from postroom import audit
from postroom.dead_letters import store as letters
from postroom.errors import Refused
from postroom.flow import Flow, Statement, Value
from postroom.ledger import store as ledger
from postroom.messages import lane_of

__all__ = [
    "ROOM",
    "Cancelled",
    "cancel",
    "release_key",
    "release_lane",
    "set_paused",
    "skip_key",
    "still",
]

ROOM = __package__ or "postroom.ops.repairs"
# How a waiting message is kept as a letter and taken from where it is.
_WAYS = {
    "outbox": ("set_aside_outbox", "drop_outbox"),
    "held": ("set_aside_held", "drop_held"),
    "delayed": ("set_aside_delayed", "drop_delayed"),
}


@dataclass(frozen=True, slots=True)
class Cancelled:
    """A message that was taken back. It may have arrived all the same, if it was ever tried."""

    id: str
    may_have_arrived: bool


class _Waiting(NamedTuple):
    place: str
    lane: int
    position: int
    topic: str
    key: str | None
    attempts: int
    blocked: int
    id: str


# ── lanes ──────────────────────────────────────────────────────────────────────────────────────


def set_paused(lane: int, paused: bool, *, who: str, why: str | None) -> Flow[bool]:
    """Pause or resume a lane; returns whether that changed anything."""
    yield from letters.lock_lanes([lane])
    ((_, now),) = yield _query("lane_now", lane=lane)
    if bool(now) == paused:
        return False
    yield _query("pause_lane" if paused else "resume_lane", lane=lane)
    yield audit.record("lanes.pause" if paused else "lanes.resume", f"lane {lane}", why, who=who)
    return True


def still(lane: int) -> Flow[bool]:
    """Whether a paused lane has come to rest: nothing of it is under way, and nothing will be.

    Its relay may have read messages before it noticed the pause, so it is taken from it too.
    """
    yield from letters.lock_lanes([lane])
    ((sending,),) = yield _query("lane_sending", lane=lane)
    if not sending:
        yield _query("yield_lane", lane=lane)
    return not sending


def release_lane(lane: int, *, who: str, why: str | None) -> Flow[bool]:
    """Take a lane from its owner, whatever that is doing; returns whether it had one."""
    yield from letters.lock_lanes([lane])
    ((owner, _),) = yield _query("lane_now", lane=lane)
    if owner is None:
        return False
    yield _query("yield_lane", lane=lane)
    yield audit.record("lanes.release", f"lane {lane} of {owner}", why, who=who)
    return True


# ── messages and keys ──────────────────────────────────────────────────────────────────────────


def cancel(id: str, *, who: str, why: str) -> Flow[Cancelled]:
    """Take back a message that was not sent yet. It is kept as a discarded letter."""
    found = yield from _find(id)
    yield from letters.lock_lanes([one.lane for one in found])
    found = yield from _find(id)
    if not found:
        raise Refused(f"message {id} does not wait any more; nothing was changed.")
    doubtful = False
    for one in found:
        doubtful = (yield from _set_aside(one, why)) or doubtful
    yield audit.record("messages.cancel", id, why, who=who)
    return Cancelled(id, doubtful)


def skip_key(topic: str, key: str, *, who: str, why: str) -> Flow[Cancelled]:
    """Give up the message at the head of a held key, so that the next one goes on."""
    head = yield from _head(topic, key)
    if head.blocked:
        letter = letters.Letter(head.id, head.lane, head.position, 1, topic, key, "dead")
        yield from letters.give_up(letter, why)
        doubtful = head.attempts > 0
    else:
        doubtful = yield from _set_aside(head, why)
    yield audit.record("keys-held.skip", f"{topic} {key} {head.id}", why, who=who)
    return Cancelled(head.id, doubtful)


def release_key(topic: str, key: str, *, who: str, why: str | None) -> Flow[str]:
    """Let the message at the head of a held key be tried now; returns its id."""
    head = yield from _head(topic, key)
    if head.blocked:
        letter = letters.Letter(head.id, head.lane, head.position, 1, topic, key, "dead")
        yield from letters.send_again([letter])
    else:
        yield _query("try_now", lane=head.lane, position=head.position)
    yield audit.record("keys-held.release", f"{topic} {key} {head.id}", why, who=who)
    return head.id


def _head(topic: str, key: str) -> Flow[_Waiting]:
    lane = lane_of(topic, key, "")
    yield from letters.lock_lanes([lane])
    rows = yield _query("head", lane=lane, topic=topic, key=key)
    if not rows:
        raise Refused(
            f"nothing of key {key!r} in topic {topic!r} is held; `postroom keys-held list` shows "
            "what is."
        )
    return _Waiting._make(rows[0])


def _find(id: str) -> Flow[list[_Waiting]]:
    rows = yield _query("waiting", id=id)
    found = [_Waiting._make((*row, id)) for row in rows]
    if any(one.blocked for one in found):
        raise Refused(f"message {id} is a dead letter: use `postroom dead discard`.")
    if not found:
        gone = yield _query("gone", id=id)
        if not gone:
            raise Refused(f"there is no message {id}: never committed, or delivered and pruned.")
        state = {"dead": "a dead letter: use `postroom dead discard`"}.get(gone[0][0], gone[0][0])
        raise Refused(f"message {id} is {state}, so it cannot be taken back.")
    return found


def _set_aside(one: _Waiting, why: str) -> Flow[bool]:
    """Move a waiting message to the discarded letters; returns whether it may have arrived."""
    place: dict[str, Value] = {"lane": one.lane, "position": one.position}
    batches = []
    if one.place != "delayed":
        batches = yield _query("under_way", **place, held=int(one.place == "held"))
        if any(alive for (alive,) in batches):
            raise Refused(f"message {one.id} is being sent right now; try again in a moment.")
    keep, drop = _WAYS[one.place]
    yield _query(keep, **place, id=one.id, note=why)
    letter: dict[str, Value] = {"id": one.id, "position": one.position, "source": letters.OUTBOX}
    yield Statement(letters.ROOM, "discard", letter | {"note": why})
    yield _query(drop, **place, id=one.id)
    if one.place == "held" and one.key is not None:
        of_key: dict[str, Value] = {"lane": one.lane, "topic": one.topic, "key": one.key}
        yield Statement(letters.ROOM, "arm_next", of_key)
    if one.place != "delayed":
        yield _query("yield_lane", lane=one.lane)
    yield from ledger.give_up(one.id, why, doubtful=bool(batches))
    return one.attempts > 0 or bool(batches)


def _query(name: str, **values: Value) -> Statement:
    return Statement(ROOM, name, values)
