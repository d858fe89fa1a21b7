"""The housekeeper of a relay: promotes delayed messages that are due, and prunes what is old."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from postroom import signals
from postroom.databases.database import DatabaseLost
from postroom.outbox.pruning import prune
from postroom.worker.waiting import pause

if TYPE_CHECKING:
    from postroom.outbox.office import Office

__all__ = ["Housekeeper"]

PRUNE_EVERY_SECONDS = 60


class Housekeeper:
    """Keeps house for one connected life of a relay, on a connection of its own."""

    def __init__(self, office: Office) -> None:
        self._office = office

    async def keep(self, stopping: asyncio.Event) -> None:
        """Promote what has become due, and prune what is finished and old."""
        office, prune_at = self._office, time.monotonic()
        while not stopping.is_set():
            office.relay.vitals.beat("keep house")
            if await office.promote():
                office.pulse.hint()
                continue
            if time.monotonic() >= prune_at:
                prune_at = time.monotonic() + PRUNE_EVERY_SECONDS
                await self.prune(stopping)
            await pause(stopping, min(0.5, office.settings.poll_max_seconds))

    async def prune(self, stopping: asyncio.Event) -> None:
        """Log prune failures and retry in the next cycle; pruning must never delay delivery."""
        office = self._office
        try:
            beat = office.relay.vitals.beat
            await prune(office.house, office.settings, stopping, lambda: beat("keep house"))
        except DatabaseLost as error:
            signals.emit("prune.failed", error=str(office.relay.database.explain(error)))
            await office.reconnect_house()
