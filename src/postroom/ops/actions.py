"""All an operator can see or do, for the command line and everything else that shows it.

Every action opens a connection, does one thing, and answers with plain values. What changes
anything is written to the audit table: who, when, what, why.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from postroom import audit
from postroom.audit import operator
from postroom.dead_letters import store as letters
from postroom.errors import ConfigurationError, Refused
from postroom.messages import LANES
from postroom.ops import repairs
from postroom.ops.desk import checked_id, checked_reason, checked_source, desk, readable
from postroom.ops.states import observed
from postroom.ops.status import look, waits_for

__all__ = [
    "audit_list",
    "cancel",
    "dead_list",
    "dead_show",
    "discard",
    "keys_held",
    "lanes",
    "message",
    "pause",
    "release_key",
    "release_lane",
    "resume",
    "retry",
    "skip_key",
    "status",
]

ROOM = __package__ or "postroom.ops"

_MESSAGE_FIELDS = (
    *("place", "lane", "position", "topic", "key", "type", "aggregate_type", "aggregate_id"),
    *("content_type", "headers", "payload", "redrives", "attempts", "error_code", "error"),
    *("created_at", "at", "history"),
)
_LETTER_FIELDS = (
    *("id", "topic", "key", "type", "state", "error_code", "error", "attempts", "redrives"),
    *("holds_key", "died_at", "source"),
)
_LETTER_MORE = (
    *("aggregate_type", "aggregate_id", "content_type", "headers", "payload", "history", "note"),
    *("lane", "position", "created_at", "retried_at"),
)
# Where a message is in two tables, the first of these tells its state.
_TELLING = ("archive", "outbox", "delayed", "held", "blocked", "dead", "queued", "discarded")


async def status(url: str) -> dict[str, Any]:
    """How the outbox stands: depth, age, lanes and their owners. Costs the same at any size."""
    async with desk(url) as link:
        return await look(link)


async def message(url: str, id: str) -> dict[str, Any]:
    """One message, wherever it is."""
    id = checked_id(id)
    async with desk(url) as link:
        rows = await link.query(ROOM, "find", id=id)
        found = [dict(zip(_MESSAGE_FIELDS, row, strict=True)) for row in rows]
        found.sort(key=lambda one: _TELLING.index(one["place"]) if one["place"] in _TELLING else 99)
        if not found:
            raise Refused(f"there is no message {id}: never committed, or delivered and pruned.")
        told = found[0]
        sending = await link.query(ROOM, "sending", lane=told["lane"], position=told["position"])
        told["state"] = observed(
            told["place"],
            attempts=told["attempts"],
            error_code=told["error_code"],
            sending=bool(sending),
        )
        waiting = told["place"] in ("outbox", "held")
        why = waits_for(await look(link), told["topic"]) if waiting else None
    return {"id": id, **readable(told), **({"waits_for": why} if why else {})}


async def dead_list(
    url: str, *, state: str = "dead", rows: int = 100, source: str | None = None
) -> list[dict[str, Any]]:
    """Dead letters, newest first; of all sources unless told."""
    async with desk(url) as link:
        await checked_source(link, source)
        found = await link.query(letters.ROOM, "list", state=state, rows=rows, source=source)
    return [readable(dict(zip(_LETTER_FIELDS, row, strict=True))) for row in found]


async def dead_show(url: str, id: str, *, source: str | None = None) -> dict[str, Any]:
    """One dead letter with its payload and all its attempts."""
    id = checked_id(id)
    async with desk(url) as link:
        await checked_source(link, source)
        found = await link.query(letters.ROOM, "show", id=id, source=source)
    if not found:
        raise Refused(f"there is no dead letter {id}; `postroom dead list` shows them.")
    return readable(dict(zip(_LETTER_FIELDS + _LETTER_MORE, found[0], strict=True)))


async def retry(
    url: str, id: str, *, why: str | None = None, source: str | None = None
) -> letters.Decided:
    """Send a dead letter again, to where it died."""
    id = checked_id(id)
    async with desk(url) as link:
        await checked_source(link, source)
        return await link.transact(letters.retry(id, who=operator(), why=why, source=source))


async def discard(url: str, id: str, *, why: str, source: str | None = None) -> letters.Decided:
    """Give a dead letter up."""
    id, why = checked_id(id), checked_reason(why)
    async with desk(url) as link:
        await checked_source(link, source)
        return await link.transact(letters.discard(id, who=operator(), why=why, source=source))


async def cancel(url: str, id: str, *, why: str) -> repairs.Cancelled:
    """Take back a message that was not sent yet; it is kept as a discarded letter."""
    id, why = checked_id(id), checked_reason(why)
    async with desk(url) as link:
        return await link.transact(repairs.cancel(id, who=operator(), why=why))


async def audit_list(
    url: str,
    *,
    who: str | None = None,
    what: str | None = None,
    subject: str | None = None,
    since: int | None = None,
    until: int | None = None,
    before: int | None = None,
    rows: int = 100,
) -> list[dict[str, Any]]:
    """Audit entries, newest first. Times are microseconds; `before` is an entry's number."""
    async with desk(url) as link:
        found = await link.transact(
            audit.entries(
                who=who,
                what=what,
                subject=subject,
                since=since,
                until=until,
                before=before,
                rows=rows,
            )
        )
    return [
        readable({"entry": id, "at": at, "who": who, "what": what, "subject": subject, "why": why})
        for id, at, who, what, subject, why in found
    ]


# ── lanes ──────────────────────────────────────────────────────────────────────────────────────


async def lanes(url: str) -> list[dict[str, Any]]:
    """Every lane: who works it, whether it is paused, what waits in it. Counts stop at 1,000."""
    found = []
    async with desk(url) as link:
        for lane, owner, name, epoch, paused, lease_ms in await link.query(repairs.ROOM, "lanes"):
            ((pending, held),) = await link.query(repairs.ROOM, "lane_depth", lane=lane)
            oldest = await link.query(repairs.ROOM, "lane_oldest", lane=lane)
            found.append(
                {
                    "lane": lane,
                    "owner": owner,
                    "owner_name": name,
                    "epoch": epoch,
                    "lease_seconds": None if lease_ms is None else lease_ms / 1000,
                    "paused": bool(paused),
                    "pending": pending,
                    "held": held,
                    "oldest_seconds": max(0, oldest[0][0]) / 1000 if oldest else None,
                }
            )
    return found


async def pause(
    url: str, lanes: Sequence[int], *, why: str | None = None, wait_seconds: float = 15.0
) -> list[dict[str, Any]]:
    """Stop sending from these lanes; returns once nothing of them is under way, or says it is."""
    told = []
    async with desk(url) as link:
        for lane in _checked_lanes(lanes):
            changed = await link.transact(repairs.set_paused(lane, True, who=operator(), why=why))
            told.append({"lane": lane, "paused": True, "changed": changed, "sending": False})
        give_up_at = time.monotonic() + wait_seconds
        waiting = told
        while waiting := [
            one for one in waiting if not await link.transact(repairs.still(one["lane"]))
        ]:
            if time.monotonic() > give_up_at:
                break
            await asyncio.sleep(0.1)
        for one in waiting:
            one["sending"] = True
    return told


async def resume(url: str, lanes: Sequence[int], *, why: str | None = None) -> list[dict[str, Any]]:
    """Let these lanes go on."""
    told = []
    async with desk(url) as link:
        for lane in _checked_lanes(lanes):
            flow = repairs.set_paused(lane, False, who=operator(), why=why)
            told.append({"lane": lane, "paused": False, "changed": await link.transact(flow)})
    return told


async def release_lane(
    url: str, lanes: Sequence[int], *, why: str | None = None
) -> list[dict[str, Any]]:
    """Take lanes from their owners; what those had under way may be sent again."""
    told = []
    async with desk(url) as link:
        for lane in _checked_lanes(lanes):
            flow = repairs.release_lane(lane, who=operator(), why=why)
            told.append({"lane": lane, "released": await link.transact(flow)})
    return told


def _checked_lanes(lanes: Sequence[int]) -> list[int]:
    for lane in lanes:
        if not 0 <= lane < LANES:
            raise ConfigurationError(f"there is no lane {lane}: they are 0 to {LANES - 1}.")
    return sorted(set(lanes))


# ── held keys ──────────────────────────────────────────────────────────────────────────────────


async def keys_held(url: str, *, rows: int = 100) -> list[dict[str, Any]]:
    """Keys that wait behind a failed message or a dead letter, and how many of them wait."""
    names = ("lane", "topic", "key", "position", "id", "attempts", "error_code", "error")
    found = []
    async with desk(url) as link:
        blocked = await link.query(repairs.ROOM, "keys_blocked", rows=rows)
        waiting = await link.query(repairs.ROOM, "keys_in_back_off", rows=rows)
        for number, row in enumerate((list(blocked) + list(waiting))[:rows]):
            key = dict(zip(names, row[:8], strict=True))
            ((count,),) = await link.query(
                repairs.ROOM, "behind", lane=key["lane"], topic=key["topic"], key=key["key"]
            )
            key["dead"] = number < len(blocked)
            key["messages"] = count
            key["retry_in_seconds"] = None if row[8] is None else max(0, row[8]) / 1000
            found.append(key)
    return found


async def skip_key(url: str, topic: str, key: str, *, why: str) -> repairs.Cancelled:
    """Give up the message at the head of a held key, so that the next one goes on."""
    why = checked_reason(why)
    async with desk(url) as link:
        return await link.transact(repairs.skip_key(topic, key, who=operator(), why=why))


async def release_key(url: str, topic: str, key: str, *, why: str | None = None) -> str:
    """Let the message at the head of a held key be tried now; returns its id."""
    async with desk(url) as link:
        return await link.transact(repairs.release_key(topic, key, who=operator(), why=why))
