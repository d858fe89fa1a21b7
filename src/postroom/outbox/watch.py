"""How the outbox stands, measured for everybody by one relay: the one that owns lane 0.

Promise: a look costs the same at any size. What is few is counted, up to a limit; what is many is
estimated; ages are those of the first row of each lane. Whoever loses lane 0 says so at once, so
that no figure is told twice or grows old.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from postroom import signals
from postroom.databases.database import WorkerLink
from postroom.messages import LANES
from postroom.outbox.store import ROOM
from postroom.worker.waiting import pause

if TYPE_CHECKING:
    from postroom.outbox.office import Office

__all__ = ["COUNT_LIMIT", "Measured", "Publishers", "Watch", "measure"]

COUNT_LIMIT = 10_000
MEASURE_SECONDS = 5.0
ELECTION_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Measured:
    """How the outbox stands. Pending: in the outbox or held, and not a dead letter."""

    pending: int
    oldest_pending_seconds: float
    held: int
    held_keys: int
    blocked_keys: int
    delayed: int
    dead: int
    lanes_unowned: int
    workers_silent: int
    oldest_open_publisher_seconds: float | None


class Publishers:
    """Since when each publisher is seen open: not every role may read how long it really is."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: dict[str, float] = {}

    def oldest(self, seen: Iterable[tuple[str, int | None]]) -> float:
        """Seconds for which the oldest of those that are open now is open."""
        now, rows = self._clock(), list(seen)
        self._since = {name: self._since.get(name, now) for name, _ in rows}
        ages = [max(now - self._since[name], (told or 0) / 1000) for name, told in rows]
        return max(ages, default=0.0)


async def measure(
    link: WorkerLink, publishers: Publishers, *, after: Mapping[int, int] | None = None
) -> Measured:
    """Look once. `after`: positions of lanes up to which nothing is left in the outbox."""
    counted, heads, ages = 0, 0, list[int | None]()
    for lane in range(LANES):
        ((found, due, *waits),) = await link.query(
            ROOM,
            "measure_lane",
            lane=lane,
            after=(after or {}).get(lane, 0),
            most=COUNT_LIMIT + 1 - min(counted, COUNT_LIMIT + 1),
        )
        counted, heads = counted + found, heads + due
        ages += waits
    if counted > COUNT_LIMIT:
        ((estimate,),) = await link.query(ROOM, "measure_outbox")
        counted = max(counted, int(estimate or 0))
    ((held, delayed, unowned, silent),) = await link.query(ROOM, "measure_totals", most=COUNT_LIMIT)
    ((dead, blocked),) = await link.query(ROOM, "measure_dead", most=COUNT_LIMIT)
    if held:
        for lane in range(1 if link.dialect == "sqlite" else LANES):
            ((wait,),) = await link.query(ROOM, "measure_held", lane=lane)
            ages.append(wait)
    open_seconds = None
    if link.dialect == "postgresql":
        rows = await link.query(ROOM, "open_publishers")
        open_seconds = publishers.oldest((str(name), told) for name, told in rows)
    return Measured(
        pending=counted + max(held - int(blocked), 0),
        oldest_pending_seconds=max([0, *(age for age in ages if age is not None)]) / 1000,
        held=held,
        held_keys=min(heads, COUNT_LIMIT) + int(blocked),
        blocked_keys=int(blocked),
        delayed=delayed,
        dead=dead,
        lanes_unowned=unowned,
        workers_silent=silent,
        oldest_open_publisher_seconds=open_seconds,
    )


class Watch:
    """Measures for everybody while its relay is the elected one; else only what its own open
    alerts need to end."""

    def __init__(self, office: Office) -> None:
        self._office = office
        self._publishers = Publishers()
        self._told = False
        self._looked_at = float("-inf")

    async def keep(self, stopping: asyncio.Event) -> None:
        """Look and tell, again and again; on leaving, say that nobody does."""
        try:
            while not stopping.is_set():
                self._office.relay.vitals.beat("watch")
                if self._told and not self._office.elected():
                    self._end()
                if time.monotonic() - self._looked_at >= MEASURE_SECONDS:
                    await self._look()
                await pause(stopping, ELECTION_SECONDS)
        finally:
            self._end()

    async def _look(self) -> None:
        office, relay = self._office, self._office.relay
        if office.elected():
            found = await measure(office.house, self._publishers, after=office.horizon.settled())
            if office.elected():
                self._tell(found)
        elif relay.alerts.waiting:
            ((dead, blocked),) = await office.house.query(ROOM, "measure_dead", most=COUNT_LIMIT)
            relay.alerts.letters(dead, int(blocked))
        self._looked_at = time.monotonic()

    def _tell(self, found: Measured) -> None:
        self._told = True
        signals.emit(
            "outbox.measured",
            incarnation=self._office.owner,
            pending=found.pending,
            oldest_pending_seconds=found.oldest_pending_seconds,
            held=found.held,
            held_keys=found.held_keys,
            blocked_keys=found.blocked_keys,
            delayed=found.delayed,
            dead=found.dead,
            lanes_unowned=found.lanes_unowned,
            workers_silent=found.workers_silent,
            oldest_open_publisher_seconds=found.oldest_open_publisher_seconds,
        )

    def _end(self) -> None:
        if self._told:
            self._told = False
            signals.emit("outbox.unmeasured", incarnation=self._office.owner)
