"""Redrive and replay as jobs: many messages sent again, at a pace, by a worker that may die.

    begin ──► page by page: lock, queue, reach ──► done
                │ canary died again, or too many errors ──► stopped ──resume──► running
                └ the worker died: its lease ends, and anybody may resume

What a job is about is written down when it begins. Each page is one transaction under the job's own
fence (owner, epoch) and the locks of the lanes it touches, so a worker that wakes up late, or was
stopped by somebody else, changes nothing. A redriven letter that holds its key goes first in it.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from postroom import audit
from postroom.databases.database import WorkerLink
from postroom.dead_letters import store as letters
from postroom.errors import ConfigurationError, InvalidMessage, Refused
from postroom.flow import Flow, Statement, Value
from postroom.messages import check_topic, lane_of
from postroom.ops.desk import checked_source, desk, known_sources

__all__ = ["Job", "Wish", "begin", "count", "jobs", "left_out", "show", "stop", "work"]

ROOM = __package__ or "postroom.ops.jobs"
LEASE_SECONDS = 30.0
PAGE_ROWS = 200
LOOK_SECONDS = 2.0
ALL = 2**62
# The end of time for a database that knows one: 9999-12-30.
NEVER_US = 253_402_128_000_000_000
NIL = "00000000-0000-0000-0000-000000000000"
_MATTER = {"redrive": "dead letters", "replay": "delivered messages"}


@dataclass(frozen=True, slots=True)
class Wish:
    """Which messages, and how they are to be sent. Times are microseconds, and None is any.

    `source`: letters of this source only; None means every source.
    `requests`: a replay sends requests of the ledger too, to whoever has carried them out already.
    """

    topic: str | None = None
    key: str | None = None
    type: str | None = None
    error_code: str | None = None
    since: int | None = None
    until: int | None = None
    limit: int | None = None
    rate: float = 100.0
    canary: int = 0
    canary_seconds: float = 60.0
    max_errors: int = 10
    to: str | None = None
    source: str | None = None
    requests: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 100_000:
            raise ConfigurationError("the rate must be above 0 and at most 100000 a second.")
        if self.canary < 0 or self.max_errors < 0 or (self.limit is not None and self.limit < 1):
            raise ConfigurationError(
                "canary and errors must be 0 or more, and the limit 1 or more."
            )
        if self.to is not None:
            try:
                check_topic(self.to)
            except InvalidMessage as error:
                raise ConfigurationError(str(error)) from None

    def values(self) -> dict[str, Value]:
        """As the queries take it."""
        since, until = self.since or 0, self.until or NEVER_US
        first, last = (dt.datetime.fromtimestamp(us / 1e6, dt.UTC).date() for us in (since, until))
        return {
            "topic": self.topic,
            "key": self.key,
            "type": self.type,
            "error_code": self.error_code,
            "since": since,
            "until": until,
            "first_day": first.isoformat(),
            "last_day": last.isoformat(),
            "most": self.limit or ALL,
            "source": self.source,
            "requests": int(self.requests),
        }


@dataclass(slots=True)
class Job:
    """How a job stands."""

    id: str
    kind: str
    state: str
    wish: Wish
    total: int
    queued: int
    note: str | None
    who: str
    why: str | None
    idle: bool  # nobody works on it
    created_us: int
    updated_us: int
    outcomes: dict[str, int]
    reached: tuple[int, str] = (-1, NIL)
    epoch: int = 0

    def told(self) -> dict[str, Any]:
        """For people and programs."""
        at = dt.datetime.fromtimestamp(self.created_us / 1e6, dt.UTC)
        wish = {name: value for name, value in asdict(self.wish).items() if value is not None}
        return {
            "job": self.id,
            "kind": self.kind,
            "state": self.state,
            "total": self.total,
            "queued": self.queued,
            "delivered": self.outcomes.get("resolved", 0),
            "died_again": self.outcomes.get("dead", 0),
            "note": self.note,
            "who": self.who,
            "why": self.why,
            "idle": self.idle,
            "created_at": at.isoformat(timespec="milliseconds"),
            "wish": wish,
        }


async def count(url: str, kind: str, wish: Wish) -> list[dict[str, Any]]:
    """What a job would be about, in groups; nothing is changed."""
    name = "letters_groups" if kind == "redrive" else "archive_groups"
    async with desk(url) as link:
        await checked_source(link, wish.source)
        rows = await link.query(ROOM, name, **wish.values())
    fields = ("topic", "type", "error_code", "count", "source")
    return [dict(zip(fields, row, strict=True)) for row in rows]


async def left_out(url: str, kind: str, wish: Wish) -> int:
    """How many requests of the ledger a replay leaves alone."""
    if kind != "replay" or wish.requests:
        return 0
    async with desk(url) as link:
        ((found,),) = await link.query(ROOM, "archive_requests", **wish.values())
    return int(found)


async def begin(url: str, kind: str, wish: Wish, *, why: str | None) -> Job:
    """Write down what the job is about and take it; `work` does it.

    Raises Refused if no message matches: a job about nothing would look like success.
    """
    id, values = str(uuid.uuid4()), wish.values()
    take = "letters_take" if kind == "redrive" else "archive_take"

    def flow() -> Flow[None]:
        yield _query(take, job=id, **values)
        ((total,),) = yield _query("items_count", job=id)
        if not total:
            raise Refused(f"No {_MATTER[kind]} match; nothing was changed.")
        yield _query(
            "begin",
            job=id,
            kind=kind,
            wish=json.dumps(asdict(wish)),
            total=total,
            who=audit.operator(),
            why=why,
            owner=None,
            lease_us=0,
        )
        yield audit.record(f"{kind}.begin", id, why)

    async with desk(url) as link:
        await checked_source(link, wish.source)
        await link.transact(flow())
        return await _read(link, id)


async def show(url: str, id: str) -> Job:
    """One job, and what became of the messages it has queued."""
    async with desk(url) as link:
        return await _read(link, _checked(id))


async def jobs(url: str, *, rows: int = 20) -> list[Job]:
    """The newest jobs."""
    async with desk(url) as link:
        return [_job(row) for row in await link.query(ROOM, "list", rows=rows)]


async def stop(url: str, id: str, *, why: str | None) -> Job:
    """Stop a job; whoever works on it finds its fence gone and queues no more."""
    id = _checked(id)

    def flow() -> Flow[None]:
        rows = yield _query("lock", job=id)
        if not rows:
            raise _no_job(id)
        if rows[0][2] != "running":
            raise Refused(f"job {id} is {rows[0][2]} already.")
        yield _query("finish", job=id, state="stopped", note=why or "stopped by an operator")
        yield audit.record("job.stop", id, why)

    async with desk(url) as link:
        await link.transact(flow())
        return await _read(link, id)


async def work(
    url: str,
    id: str,
    *,
    progress: Callable[[Job], None] = lambda job: None,
    lease_seconds: float = LEASE_SECONDS,
) -> Job:
    """Take a job that nobody works on, and do it to its end; returns how it ended."""
    async with desk(url) as link:
        worker = _Worker(link, _checked(id), progress, int(lease_seconds * 1e6))
        await worker.take()
        try:
            return await worker.run()
        except asyncio.CancelledError:
            await asyncio.shield(_give_back(url, worker))
            raise


async def _give_back(url: str, worker: _Worker) -> None:
    # On a connection of its own: the worker's ended with the statement that was cut short.
    async with desk(url) as link:
        worker.link = link
        await worker.end("stopped", "interrupted; resume it to go on")


class _Worker:
    """One run of a job."""

    def __init__(
        self, link: WorkerLink, id: str, progress: Callable[[Job], None], lease_us: int
    ) -> None:
        self.link = link
        self.id = id
        self.owner = str(uuid.uuid4())
        self.progress = progress
        self.lease_us = lease_us
        self.job: Job
        self._sources: list[str]  # in one order for every job, so that two never deadlock
        self._looked_at = 0.0

    async def take(self) -> None:
        """Become the owner, unless somebody else works on it or it is done."""

        def flow() -> Flow[None]:
            rows = yield _query("lock", job=self.id)
            if not rows:
                raise _no_job(self.id)
            owner, _, state, idle = rows[0]
            if state == "done":
                raise Refused(f"job {self.id} is done already.")
            if not idle:
                raise Refused(f"job {self.id} is being worked on by {owner}; `postroom jobs stop`.")
            yield _query("take_over", job=self.id, owner=self.owner, lease_us=self.lease_us)

        await self.link.transact(flow())
        self.job = await _read(self.link, self.id)
        self._sources = await _sources(self.link, self.job)

    async def run(self) -> Job:
        """Page after page, at the pace that was asked for."""
        wish, begun, sent = self.job.wish, time.monotonic(), 0
        canary = wish.canary if self.job.queued < wish.canary else 0
        most = max(1, min(PAGE_ROWS, int(wish.rate / 4)))
        while True:
            queued, more = await self._page(canary or most)
            sent += queued
            self.progress(self.job)
            if canary and not await self._canary_lives():
                return await self.end(
                    "stopped", "the canary was not delivered; look at it, then resume"
                )
            canary = 0
            if await self._too_many_errors(at_once=not more):
                return await self.end(
                    "stopped", f"more than {wish.max_errors} died again; look at them, then resume"
                )
            if not more:
                return await self.end("done", None)
            await self._pause(begun + sent / wish.rate - time.monotonic())

    async def _page(self, rows: int) -> tuple[int, bool]:
        """Queue the next messages; returns how many, and whether there may be more."""
        position, last = self.job.reached
        items = await self.link.query(
            ROOM, "items_page", job=self.id, position=position, id=last, rows=rows
        )
        if not items:
            return 0, False
        lo, (hi, last) = items[0][0], items[-1]
        # Those that share the last position are taken with it.
        reached = (hi, "ffffffff-ffff-ffff-ffff-ffffffffffff")

        def flow() -> Flow[int]:
            yield from self._fence()
            act = self._redrive if self.job.kind == "redrive" else self._replay
            queued = yield from act(lo, hi)
            yield _query(
                "reach",
                job=self.id,
                reached=json.dumps(reached),
                queued=queued,
                lease_us=self.lease_us,
            )
            return queued

        queued = await self.link.transact(flow())
        self.job.reached = reached
        self.job.queued += queued
        return queued, True

    def _redrive(self, lo: int, hi: int) -> Flow[int]:
        queued = 0
        for source in self._sources:
            found = yield from self._letters(lo, hi, source)
            yield from letters.lock(found)
            # Read again under the locks: somebody may have decided about some of them meanwhile.
            found = yield from self._letters(lo, hi, source)
            waiting = [one for one in found if one.state == "dead"]
            if waiting:
                yield from letters.send_again(waiting)
            queued += len(waiting)
        return queued

    def _letters(self, lo: int, hi: int, source: str) -> Flow[list[letters.Letter]]:
        rows = yield _query("letters_page", job=self.id, lo=lo, hi=hi, source=source)
        return [letters.Letter(*row)._replace(source=source) for row in rows]

    def _replay(self, lo: int, hi: int) -> Flow[int]:
        rows = yield _query("archive_page", job=self.id, lo=lo, hi=hi)
        copies: list[dict[str, Value]] = []
        for id, position, topic, key in rows:
            topic = self.job.wish.to or topic
            lane = lane_of(topic, key, id)
            copies.append({"id": id, "position": position, "topic": topic, "lane": lane})
        if copies:
            yield Statement(ROOM, "count_replay", many=copies)
            yield Statement(ROOM, "replay", many=copies)
        return len(copies)

    def _fence(self) -> Flow[None]:
        rows = yield _query("lock", job=self.id)
        if not rows or rows[0][:3] != (self.owner, self.job.epoch, "running"):
            raise Refused(f"job {self.id} was stopped or taken over by somebody else.")

    async def _canary_lives(self) -> bool:
        """Whether the first few were delivered; None of them may die again."""
        until = time.monotonic() + self.job.wish.canary_seconds
        while time.monotonic() < until:
            outcomes = await self._outcomes()
            if outcomes.get("dead", 0):
                return False
            if not outcomes.get("queued", 0):
                return True
            await self._pause(0.2)
        return False

    async def _too_many_errors(self, *, at_once: bool) -> bool:
        if not at_once and time.monotonic() - self._looked_at < LOOK_SECONDS:
            return False
        self._looked_at = time.monotonic()
        outcomes = await self._outcomes()
        return outcomes.get("dead", 0) > self.job.wish.max_errors

    async def _outcomes(self) -> dict[str, int]:
        self.job.outcomes = await _outcomes(self.link, self.job)
        self.progress(self.job)
        return self.job.outcomes

    async def _pause(self, seconds: float) -> None:
        """Wait, and keep the lease and an eye on the fence meanwhile."""

        def renew() -> Flow[None]:
            yield from self._fence()
            yield _query("renew", job=self.id, lease_us=self.lease_us)

        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            await asyncio.sleep(min(left, self.lease_us / 4e6))
            if left > self.lease_us / 4e6:
                await self.link.transact(renew())

    async def end(self, state: str, note: str | None) -> Job:
        """Write down how it ended, unless that is somebody else's business by now."""

        def flow() -> Flow[None]:
            yield from self._fence()
            yield _query("finish", job=self.id, state=state, note=note)
            yield audit.record(f"{self.job.kind}.{state}", self.id, note)

        await self.link.transact(flow())
        return await _read(self.link, self.id)


async def _read(link: WorkerLink, id: str) -> Job:
    rows = await link.query(ROOM, "read", job=id)
    if not rows:
        raise _no_job(id)
    job = _job(rows[0])
    job.outcomes = await _outcomes(link, job)
    return job


async def _outcomes(link: WorkerLink, job: Job) -> dict[str, int]:
    name = "outcomes" if job.kind == "redrive" else "died_again"
    found: Counter[str] = Counter()
    for source in await _sources(link, job):
        rows = await link.query(ROOM, name, job=job.id, position=job.reached[0], source=source)
        found.update(dict(rows))
    return {state: number for state, number in found.items() if number}


async def _sources(link: WorkerLink, job: Job) -> list[str]:
    """The sources a job's messages may have; those of a replay are all the outbox's."""
    if job.kind != "redrive":
        return [letters.OUTBOX]
    return [job.wish.source] if job.wish.source else await known_sources(link)


def _job(row: tuple[Any, ...]) -> Job:
    id, kind, state, wish, reached, total, queued, note, who, why, _, epoch, idle, made, changed = (
        row
    )
    position, last = json.loads(reached) if reached else (-1, NIL)
    return Job(
        id=id,
        kind=kind,
        state=state,
        wish=Wish(**json.loads(wish)),
        total=total,
        queued=queued,
        note=note,
        who=who,
        why=why,
        idle=bool(idle),
        created_us=made,
        updated_us=changed,
        outcomes={},
        reached=(position, last),
        epoch=epoch,
    )


def _checked(id: str) -> str:
    try:
        return str(uuid.UUID(id))
    except ValueError:
        raise ConfigurationError(f"{id!r} is not a job: `postroom jobs list` shows them.") from None


def _no_job(id: str) -> Refused:
    return Refused(f"there is no job {id}; `postroom jobs list` shows them.")


def _query(name: str, **values: Value) -> Statement:
    return Statement(ROOM, name, values)
