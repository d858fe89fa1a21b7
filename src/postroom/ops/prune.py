"""`postroom prune`: delete now what is finished and old, as relays do by themselves.

The statements are the relay's own, so nothing that is undecided can go. Small batches, so that a
relay beside it waits for none of them for long; two that prune at once only share the work.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from postroom import audit
from postroom.config import DAY_SECONDS, RelaySettings
from postroom.databases.database import Database, DatabaseLost, WorkerLink
from postroom.errors import ConfigurationError
from postroom.ops.house import ROOM as HOUSE
from postroom.outbox.store import ROOM as OUTBOX

__all__ = ["KINDS", "Pruned", "duration", "plan", "prune"]

ROWS = 5000
MOST = 100_000
TRIES = 5
PAUSE_SECONDS = 0.01  # between two batches, for those who wait for the same rows or the same file

_DURATION = re.compile(r"([0-9]+) ?([smhd])")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": DAY_SECONDS}


@dataclass(frozen=True, slots=True)
class _Kind:
    what: str
    setting: str | None
    count: str
    deletes: tuple[tuple[str, str], ...]


KINDS = {
    "archive": _Kind(
        "delivered messages", "keep_delivered_seconds", "old_archive",
        ((OUTBOX, "prune_archive"), (OUTBOX, "prune_overflow")),
    ),
    "dedup": _Kind("dedup keys", "keep_dedup_seconds", "old_dedup", ((OUTBOX, "prune_dedup"),)),
    "dead": _Kind(
        "resolved and discarded dead letters", "keep_dead_seconds", "old_dead",
        ((OUTBOX, "prune_dead"),),
    ),
    "inbox": _Kind(
        "records of handled messages", "keep_inbox_seconds", "old_inbox",
        ((OUTBOX, "prune_inbox"),),
    ),
    "keys": _Kind(
        "answers to requests, expired", "", "old_keys", ((OUTBOX, "prune_keys"),),
    ),
    "jobs": _Kind("ended jobs", "keep_dead_seconds", "old_jobs", ((OUTBOX, "prune_jobs"),)),
    "workers": _Kind("workers not seen", None, "old_workers", ((HOUSE, "prune_workers"),)),
    "consumers": _Kind(
        "consumers not seen", "keep_inbox_seconds", "old_consumers",
        ((HOUSE, "prune_consumers"),),
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pruned:
    """What was deleted of one kind, or would be. `more`: the count stopped at its limit."""

    kind: str
    what: str
    older_than_seconds: int
    count: int
    more: bool
    left: int


def duration(text: str) -> int:
    """Seconds of `90s`, `15m`, `24h` or `7d`."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ConfigurationError(f"{text!r} is no time span: write 90s, 15m, 24h or 7d.")
    seconds = int(match[1]) * _UNITS[match[2]]
    if seconds > 100 * 366 * DAY_SECONDS:
        raise ConfigurationError(f"{text!r} is more than a hundred years: write 90s, 15m or 7d.")
    return seconds


def plan(settings: RelaySettings, only: Sequence[str], older_than: str | None) -> dict[str, int]:
    """What to prune, and how old it must be, in seconds."""
    for name in only:
        if name not in KINDS:
            known = ", ".join(KINDS)
            raise ConfigurationError(f"{name!r} is nothing that can be pruned: choose of {known}.")
    if older_than is not None and not only:
        raise ConfigurationError(
            "--older-than for everything would take dedup keys and inbox records too, which keep "
            f"duplicates away: say what with --only ({', '.join(KINDS)})."
        )
    wanted = {}
    for name, kind in KINDS.items():
        if not only or name in only:
            keep = DAY_SECONDS if kind.setting is None else 0
            if kind.setting:  # a key's own expiry counts, and nothing is added to it
                keep = int(getattr(settings, kind.setting))
            wanted[name] = keep if older_than is None else duration(older_than)
    return wanted


async def prune(
    url: str,
    wanted: dict[str, int],
    *,
    given: bool,
    dry_run: bool = False,
    why: str | None = None,
    tell: Callable[[str, int, int | None], None] = lambda *_: None,
) -> list[Pruned]:
    """Prune by a plan. `given`: the ages were asked for; else a relay's record may raise them."""
    desk = _Desk(Database(url))
    try:
        if not given and "archive" in wanted:
            wanted = {**wanted, "archive": await desk.kept(wanted["archive"])}
        return [await _prune(desk, name, keep, dry_run, why, tell) for name, keep in wanted.items()]
    except DatabaseLost as lost:
        raise desk.database.explain(lost) from lost
    finally:
        await desk.close()


async def _prune(
    desk: _Desk,
    name: str,
    keep: int,
    dry_run: bool,
    why: str | None,
    tell: Callable[[str, int, int | None], None],
) -> Pruned:
    kind = KINDS[name]
    found = await desk.count(kind.count, keep)
    if dry_run or not found:
        return Pruned(name, kind.what, keep, found, found >= MOST, found)
    await desk.audit(f"{name} before {_moment(keep)}", why)
    total = None if found >= MOST else found
    gone = 0
    for room, query in kind.deletes:
        while count := await desk.delete(room, query, keep):
            gone += count
            tell(kind.what, gone, total)
            await asyncio.sleep(PAUSE_SECONDS)
    left = await desk.count(kind.count, keep)
    # Days of the archive are dropped whole, and not counted one by one: what was there, then.
    counted = found - left if name in ("archive", "jobs") and desk.whole(name) else gone
    return Pruned(name, kind.what, keep, max(0, counted), found >= MOST, left)


def _moment(keep: int) -> str:
    moment = dt.datetime.now(dt.UTC) - dt.timedelta(seconds=keep)
    return moment.isoformat(timespec="seconds")


class _Desk:
    """A link that is opened again when a batch gave way to another's."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self._link: WorkerLink | None = None

    def whole(self, name: str) -> bool:
        """Whether a delete takes more than it counts: days of PostgreSQL's archive, jobs."""
        return name == "jobs" or self.database.dialect == "postgresql"

    async def kept(self, keep: int) -> int:
        """How long delivered messages are kept: what relays have written down, if that is more."""
        link = await self._open()
        rows = await link.query(OUTBOX, "meta_read", item="keep_delivered_seconds")
        return max(keep, int(rows[0][0])) if rows else keep

    async def count(self, name: str, keep: int) -> int:
        link = await self._open()
        ((count,),) = await link.query(HOUSE, name, keep_seconds=keep, most=MOST)
        return int(count)

    async def delete(self, room: str, name: str, keep: int) -> int:
        """One batch. A deadlock with a relay that prunes too costs another try, not more."""
        for attempt in range(1, TRIES + 1):
            link = await self._open()
            try:
                ((gone,),) = await link.query(room, name, keep_seconds=keep, rows=ROWS)
                return int(gone)
            except DatabaseLost as lost:
                text = str(lost).lower()
                if attempt == TRIES or not ("deadlock" in text or "lock" in text):
                    raise
                await asyncio.sleep(0.1 * attempt)
        raise AssertionError("unreachable")

    async def audit(self, subject: str, why: str | None) -> None:
        link = await self._open()
        await link.ask(audit.record("prune", subject, why))

    async def _open(self) -> WorkerLink:
        if self._link is None or self._link.lost:
            self._link = await self.database.connect()
        return self._link

    async def close(self) -> None:
        if self._link is not None:
            await self._link.close()
