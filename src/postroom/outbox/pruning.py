"""Deleting what is finished and old, in small steps, beside the work of a relay."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from postroom import signals
from postroom.config import RelaySettings
from postroom.databases.database import WorkerLink
from postroom.outbox.store import ROOM

__all__ = ["prune"]

# Another room's, of which a relay knows the name alone.
KEYS = "postroom.idempotency"
LOST_ROWS = 1000
PRUNE_ROWS = 5000
PRUNE_ROUNDS = 100


async def prune(
    link: WorkerLink, settings: RelaySettings, stopping: asyncio.Event, beat: Callable[[], None]
) -> None:
    """Everything once, or until told to stop; `beat` is called between two steps, for whoever
    watches that it goes on."""
    await link.query(ROOM, "archive_days")
    for name, keep in (
        ("prune_archive", settings.keep_delivered_seconds),
        ("prune_overflow", settings.keep_delivered_seconds),
        ("prune_dedup", settings.keep_dedup_seconds),
        ("prune_dead", settings.keep_dead_seconds),
        ("prune_jobs", settings.keep_dead_seconds),
        ("prune_inbox", settings.keep_inbox_seconds),
        ("prune_keys", 0),
    ):
        for _ in range(PRUNE_ROUNDS):
            if stopping.is_set():
                return
            beat()
            ((gone,),) = await link.query(ROOM, name, keep_seconds=int(keep), rows=PRUNE_ROWS)
            if not gone:
                break
    await _tell_lost_requests(link)
    await link.query(ROOM, "workers_forget")
    ((overflow,),) = await link.query(ROOM, "archive_overflow")
    if overflow:
        signals.emit("archive.overflow", count=overflow)


async def _tell_lost_requests(link: WorkerLink) -> None:
    """A request whose process is gone waits for a person, who must hear of it though its client
    never comes back."""
    for scope, operation, key, epoch in await link.query(KEYS, "lost", rows=LOST_ROWS):
        name = {"scope": scope, "operation": operation, "key": key}
        if await link.query(KEYS, "lose", **name, epoch=int(epoch)):
            why = "the process that had it was lost"
            signals.emit("key.indeterminate", operation=operation, idempotency_key=key, error=why)
