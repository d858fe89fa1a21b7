"""The signals of lanes, and of their messages: delivered, held, buried or found expired."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from postroom import signals
from postroom.messages import Message
from postroom.outbox.desk import Desk
from postroom.outbox.rules import Hold
from postroom.outbox.store import Fence

__all__ = ["acquired", "buried", "delivered", "expired", "held", "lost", "ranges", "released"]


def acquired(fences: Sequence[Fence], owner: str) -> None:
    """Emit that a relay owns these lanes from now on: one line, and one each for -v."""
    for fence in fences:
        signals.emit("lane.acquired", lane=fence.lane, epoch=fence.epoch, incarnation=owner)
    if fences:
        signals.emit("lanes.acquired", lanes=_spelled(fences), incarnation=owner)


def released(fences: Sequence[Fence], owner: str) -> None:
    """Emit that a relay gave these lanes back: one line, and one each for -v."""
    for fence in fences:
        signals.emit("lane.released", lane=fence.lane, epoch=fence.epoch, incarnation=owner)
    if fences:
        signals.emit("lanes.released", lanes=_spelled(fences), incarnation=owner)


def _spelled(fences: Sequence[Fence]) -> str:
    return ranges(fence.lane for fence in fences)


def ranges(lanes: Iterable[int]) -> str:
    """Spell numbers as ranges: 0-3,7."""
    runs: list[list[int]] = []
    for lane in sorted(lanes):
        if runs and runs[-1][1] == lane - 1:
            runs[-1][1] = lane
        else:
            runs.append([lane, lane])
    return ",".join(f"{first}-{last}" if first < last else f"{first}" for first, last in runs)


def lost(fence: Fence, owner: str, reason: str) -> None:
    """Emit that a lane has another owner, or its lease ran out."""
    signals.emit("lane.lost", lane=fence.lane, epoch=fence.epoch, incarnation=owner, reason=reason)


def delivered(desk: Desk, lane: int, messages: Sequence[Message]) -> None:
    """Emit one signal for all, with the age of each."""
    if not messages or not signals.heard("message.delivered"):
        return
    now = desk.now_us()
    signals.emit(
        "message.delivered",
        lane=lane,
        status="succeeded",
        count=len(messages),
        ages_seconds=[
            age / 1e6 if (age := now - message.created_us) > 0 else 0.0 for message in messages
        ],
    )


def held(desk: Desk, message: Message, attempts: int, answer: Hold) -> None:
    """Emit that a message failed and will be tried again."""
    signals.emit(
        "message.held",
        id=message.id,
        topic=message.topic,
        key=message.key,
        lane=message.lane,
        status="failed",
        attempts=attempts,
        last_error_code=answer.code,
        adapter=desk.sender.adapter(message.topic),
        delay_seconds=round(answer.delay_seconds, 3),
    )


def buried(desk: Desk, message: Message, attempts: int, code: str, holds_key: bool) -> None:
    """Emit that a message became a dead letter."""
    signals.emit(
        "message.buried",
        id=message.id,
        topic=message.topic,
        key=message.key,
        lane=message.lane,
        status="aborted",
        attempts=attempts,
        last_error_code=code,
        adapter=desk.sender.adapter(message.topic),
        holds_key=holds_key,
        incarnation=desk.owner,
    )


def expired(message: Message) -> None:
    """Emit that a message expired before it was delivered."""
    signals.emit(
        "message.expired",
        id=message.id,
        topic=message.topic,
        key=message.key,
        lane=message.lane,
        status="aborted",
        attempts=message.attempts,
        last_error_code="expired",
    )
