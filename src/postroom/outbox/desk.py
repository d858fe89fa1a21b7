"""What a lane has from its relay: the shared ways to the database, limits, and a tally."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from postroom.messages import Message
from postroom.outbox.rules import Horizon, Leftover
from postroom.outbox.sending import Sender
from postroom.outbox.settling import Settling
from postroom.outbox.store import Ask, Change, Entry
from postroom.outbox.together import Budget, Gate, Pulse

__all__ = ["Desk", "Tally"]


@dataclass(slots=True)
class Tally:
    """What a relay has done so far."""

    delivered: int = 0
    held: int = 0
    dead: int = 0


class Desk(Protocol):
    """What a lane has from its relay: the shared ways to the database, and limits."""

    owner: str
    sender: Sender
    settling: Settling
    horizon: Horizon
    budget: Budget
    gate: Gate
    pulse: Pulse
    tally: Tally
    batch_rows: int
    batch_bytes: int
    rescan_seconds: float
    margin_seconds: float
    holds_key: bool
    safe_reads: bool

    async def read(self, ask: Ask) -> tuple[list[Message], bool]: ...
    async def held_due(self, lane: int) -> list[Message]: ...
    async def held_run(self, head: Message) -> list[Message]: ...
    async def held_any(self, lane: int) -> bool: ...
    async def journal(self, entry: Entry) -> bool: ...
    async def settle(self, change: Change) -> bool: ...
    async def load(self, lane: int) -> tuple[list[Leftover], bool]: ...
    async def forget(self, lane: int) -> list[Leftover]: ...
    def next_batch(self) -> int: ...
    def now_us(self) -> int: ...
