"""`postroom verify`: committed = delivered + pending + held + dead + discarded, looked up.

Everything is read in one consistent snapshot, a page at a time. What is found wrong is a `Finding`
of level "wrong"; what cannot be known is said, and is not a finding.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from postroom import audit
from postroom.databases.database import Database, DatabaseLost, WorkerLink
from postroom.dead_letters import store as letters
from postroom.errors import SchemaError
from postroom.flow import Flow, Row, Statement
from postroom.messages import LANES, lane_of
from postroom.ops import committed
from postroom.ops.desk import archive_blocks
from postroom.ops.house import ROOM
from postroom.ops.ledger import Ledger, as_text, born_us

__all__ = ["Balance", "Finding", "Report", "Truth", "mend", "verify"]

ROWS = 5000
EXAMPLES = 100
LONG_SECONDS = 6 * 3600.0  # for one query, and for a transaction that reads while we write our file
NO_ID = "00000000-0000-0000-0000-000000000000"

Tell = Callable[[str, int, int | None], None]
Page = Callable[[str, list[Row]], None]

# A query that returns what is wrong, in a few words, and what to do.
_CHECKS: tuple[tuple[str, str, str, str], ...] = (
    (
        "stuck_heads", "wrong",
        "{n} held keys are stuck for ever: nothing says when their first message is tried again",
        "run `postroom verify --mend`",
    ),
    (
        "armed_followers", "wrong",
        "{n} held messages would be tried though an earlier one of their key waits, or though "
        "they are dead letters",
        "pause their lanes and set their next_attempt_at to NULL",
    ),
    (
        "blocked_alone", "wrong",
        "{n} held messages hold their key and no dead letter says why, so nobody can decide",
        "restore the dead letter, or set blocked to false so that the message is tried again",
    ),
    (
        "letter_alone", "wrong",
        "{n} dead letters say that they hold their key and do not",
        "decide with `postroom dead retry ID` or `postroom dead discard ID`; later messages of "
        "the key may have gone on",
    ),
    (
        "queued_alone", "wrong",
        "{n} dead letters are queued and there is no message to send",
        "set their state back to dead, then `postroom dead retry ID`",
    ),
    (
        "two_places", "wrong",
        "{n} positions are in the outbox and in held at once, so the lane cannot move on",
        "keep one of the two rows of each",
    ),
    (
        "reused_ids", "wrong",
        "{n} ids stand for messages of different content, and receivers drop all but the first",
        "compare them with `postroom messages show ID`, and publish the others under new ids",
    ),
    (
        "two_letters", "wrong",
        "{n} positions have more than one dead letter",
        "compare them with `postroom dead show ID`",
    ),
    (
        "decided_and_pending", "wrong",
        "{n} messages have a dead letter and are in the outbox at the same position",
        "compare them with `postroom messages show ID`",
    ),
    (
        "overdue", "wrong",
        "{n} delayed messages are due for more than a minute, in lanes that a relay owns",
        "look at that relay's log, and restart it",
    ),
    (
        "stale_journal", "note",
        "{n} lines of the journal are of workers that are gone, and no message of them is left",
        "nothing: the next owner of the lane removes them",
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that should not be. `level` is "wrong", or "note" where nothing suffers."""

    check: str
    level: str
    text: str
    remedy: str
    count: int
    examples: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Truth:
    """What the application says was committed: a file of ids, or a query for them."""

    file: str | None = None
    query: str | None = None
    invented: bool = False


@dataclass(slots=True)
class Balance:
    """Where the committed ids are. `untold`: too old to tell delivered from lost."""

    committed: int = 0
    repeated: int = 0
    places: dict[str, int] = field(default_factory=dict)
    missing: int = 0
    missing_ids: list[str] = field(default_factory=list)
    untold: int = 0
    unknown: int = 0
    unknown_ids: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Report:
    """All that was found."""

    counts: dict[str, int]
    kept_seconds: int | None
    findings: list[Finding] = field(default_factory=list)
    balance: Balance | None = None

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not any(finding.level == "wrong" for finding in self.findings)

    @property
    def document(self) -> dict[str, Any]:
        """The report for programs."""
        return {"ok": self.ok, **asdict(self)}


@asynccontextmanager
async def _snapshot(url: str) -> AsyncIterator[WorkerLink]:
    database = Database(url)
    link = await database.connect(idle_seconds=LONG_SECONDS)
    database.timeout_seconds = LONG_SECONDS
    try:
        await link.begin_snapshot()
        yield link
    except DatabaseLost as lost:
        raise database.explain(lost) from lost
    finally:
        await link.close()


async def verify(url: str, truth: Truth | None = None, tell: Tell = lambda *_: None) -> Report:
    """Look at everything; `tell` hears how far it has come: what, so many, of so many."""
    truth = truth or Truth()
    query = None if truth.query is None else committed.check_query(truth.query)
    async with AsyncExitStack() as stack:
        ledger = stack.enter_context(Ledger()) if truth.file or query else None
        if ledger is not None and truth.file:
            # Before the snapshot begins: whatever the file names was committed by then.
            for ids in committed.from_file(truth.file):
                ledger.commit(ids)
                tell("ids of the application", ledger.given, None)
        link = await stack.enter_async_context(_snapshot(url))
        report, horizon_us = await _begin(link)
        if ledger is not None and query:
            async for ids in committed.from_query(link, query):
                ledger.commit(ids)
                tell("ids of the application", ledger.given, None)
        await _read_tables(link, report, ledger, tell)
        for number, check in enumerate(_CHECKS):
            tell("checks", number, len(_CHECKS))
            await _ask(link, report, *check)
        tell("checks", len(_CHECKS), len(_CHECKS))
        await link.close()
        if ledger is not None:
            report.balance = _balance(ledger, report, horizon_us, truth.invented, tell)
    return report


async def _begin(link: WorkerLink) -> tuple[Report, int | None]:
    """Counts, and since when delivered messages are remembered; None: since ever."""
    meta = {str(row[0]): str(row[1]) for row in await link.query("postroom.ops", "meta")}
    if "schema_version" not in meta:
        raise SchemaError("the tables say no schema version; run `postroom db install` again.")
    ((outbox, delayed, held, blocked, archive),) = await link.query(ROOM, "totals")
    states = {str(row[0]): int(row[1]) for row in await link.query(ROOM, "letter_totals")}
    counts = {
        "pending": outbox,
        "delayed": delayed,
        "held": held,
        "held_by_dead": blocked,
        "delivered": archive,
    }
    for state in ("dead", "queued", "resolved", "discarded", "expired"):
        counts[state] = states.get(state, 0)
    kept = meta.get("keep_delivered_seconds")
    report = Report(counts, None if kept is None else int(kept))
    ((now_us,),) = await link.query(ROOM, "now_us")
    known = [] if kept is None else [now_us - int(kept) * 1_000_000]
    for (subject,) in await link.query(ROOM, "pruned"):
        moment = dt.datetime.fromisoformat(subject.removeprefix("archive before "))
        known.append(int(moment.timestamp() * 1e6))
    lanes = sorted(row[0] for row in await link.query("postroom.ops", "lanes"))
    if lanes != list(range(LANES)):
        absent = sorted(set(range(LANES)) - set(lanes))
        report.findings.append(
            Finding(
                "lanes", "wrong", f"{len(absent)} rows of the lane table are missing",
                "insert them: INSERT INTO lane (lane) VALUES (…); nobody delivers their messages",
                len(absent), [{"lane": lane} for lane in absent],
            )
        )  # fmt: skip
    return report, max(known, default=None)


# ── reading the tables ─────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class _Rows:
    """What is looked at in every row of a message."""

    wrong_lane: list[Row] = field(default_factory=list)
    wrong_size: list[Row] = field(default_factory=list)
    wrong_lanes: int = 0
    wrong_sizes: int = 0
    last_position: int = 0

    def look(self, rows: list[Row], *, positions: bool) -> None:
        for row in rows:
            lane, position, id, topic, key, size, real = row[:7]
            if lane_of(topic, key, id) != lane:
                self.wrong_lanes += 1
                self._keep(self.wrong_lane, row)
            if size != real:
                self.wrong_sizes += 1
                self._keep(self.wrong_size, row)
            if positions and position > self.last_position:
                self.last_position = position

    def _keep(self, examples: list[Row], row: Row) -> None:
        if len(examples) < EXAMPLES:
            examples.append(row)


async def _read_tables(link: WorkerLink, report: Report, ledger: Ledger | None, tell: Tell) -> None:
    seen = _Rows()
    counts, done = report.counts, 0
    held = counts["held"] + counts["held_by_dead"]
    told = sum(counts[name] for name in ("dead", "queued", "resolved", "discarded", "expired"))
    total = counts["pending"] + counts["delayed"] + held + told
    total += counts["delivered"] if ledger is not None else 0

    def page(rows: list[Row], place: Callable[[Row], str], positions: bool = True) -> None:
        nonlocal done
        seen.look(rows, positions=positions)
        if ledger is not None:
            ledger.place((row[2], place(row)) for row in rows)
        done += len(rows)
        tell("messages", done, total)

    for lane in range(LANES):
        async for rows in _pages(link, "page_outbox", lane=lane):
            page(rows, lambda _: "pending")
        async for rows in _pages(link, "page_held", lane=lane):
            page(rows, lambda row: "dead" if row[7] else "held")
        async for rows in _pages(link, "page_delayed", lane=lane, after_id=NO_ID):
            page(rows, lambda _: "delayed", positions=False)
    async for rows in _pages(link, "page_letters", after_id=NO_ID):
        page(rows, _letter_place)
    if ledger is not None:
        async for ids in _archived(link):
            ledger.place((id, "delivered") for id in ids)
            done += len(ids)
            tell("messages", done, total)
    await _judge_rows(link, report, seen)


def _letter_place(row: Row) -> str:
    state, code = row[7], row[8]
    return "expired" if state == "resolved" and code == "expired" else str(state)


async def _archived(link: WorkerLink) -> AsyncIterator[list[str]]:
    """Yield the ids of delivered messages, a page at a time."""
    if link.dialect == "postgresql":
        async for rows in archive_blocks(link, ROOM, "page_archive"):
            yield [id for (id,) in rows]
        return
    after = NO_ID
    while rows := await link.query(ROOM, "page_archive", after_id=after, rows=ROWS + 1):
        ids = [id for (id,) in rows if id != after]
        if not ids:
            break
        yield ids
        after = ids[-1]


async def _pages(link: WorkerLink, name: str, **where: Any) -> AsyncIterator[list[Row]]:
    """The rows of a table, a page at a time; the second and third column are where it goes on."""
    where = {"after": -1, **where}
    while rows := await link.query(ROOM, name, rows=ROWS, **where):
        yield rows
        where["after"] = rows[-1][1]
        if "after_id" in where:
            where["after_id"] = rows[-1][2]


async def _judge_rows(link: WorkerLink, report: Report, seen: _Rows) -> None:
    if seen.wrong_lanes:
        report.findings.append(
            Finding(
                "lane_of_key", "wrong",
                f"{seen.wrong_lanes:,} messages are in another lane than that of their topic and "
                "key, so their order is not kept",
                "find who writes to Postroom's tables without Postroom",
                seen.wrong_lanes, [_example(row) for row in seen.wrong_lane],
            )
        )  # fmt: skip
    if seen.wrong_sizes:
        report.findings.append(
            Finding(
                "size", "wrong",
                f"{seen.wrong_sizes:,} messages have another size than their size column says, so "
                "a relay reads more than it should",
                "find who changes Postroom's rows",
                seen.wrong_sizes, [_example(row) for row in seen.wrong_size],
            )
        )  # fmt: skip
    rows = await link.query(ROOM, "last_position")
    last = rows[0][0] if rows else None
    if last is not None and seen.last_position > last:
        report.findings.append(
            Finding(
                "positions", "wrong",
                f"the next position is {last + 1:,}, and {seen.last_position:,} is in use: new "
                "messages will be refused or go before older ones",
                "set the sequence of the outbox above it",
                1, [{"position": seen.last_position}],
            )
        )  # fmt: skip


async def _ask(
    link: WorkerLink, report: Report, name: str, level: str, text: str, remedy: str
) -> None:
    rows = await link.query(ROOM, name, rows=EXAMPLES)
    if rows:
        count = rows[0][5]
        examples = [_example(row) for row in rows]
        report.findings.append(
            Finding(name, level, text.format(n=f"{count:,}"), remedy, count, examples)
        )


def _example(row: Row) -> dict[str, Any]:
    lane, position, id, topic, key = row[:5]
    return {"id": id, "lane": lane, "position": position, "topic": topic, "key": key}


# ── the application's truth ────────────────────────────────────────────────────────────────────


def _balance(
    ledger: Ledger, report: Report, horizon_us: int | None, invented: bool, tell: Tell
) -> Balance:
    tell("comparing", 0, None)
    ledger.close_books()
    balance = Balance(places=ledger.counts())
    for id in ledger.missing():
        born = born_us(id)
        forgets = report.kept_seconds == 0
        old = horizon_us is not None and born is not None and born < horizon_us
        if forgets or old:
            balance.untold += 1
        else:
            balance.missing += 1
            if len(balance.missing_ids) < EXAMPLES:
                balance.missing_ids.append(as_text(id))
    for id in ledger.unknown():
        balance.unknown += 1
        if invented and len(balance.unknown_ids) < EXAMPLES:
            balance.unknown_ids.append(as_text(id))
    balance.committed = sum(balance.places.values()) + balance.missing + balance.untold
    balance.repeated = ledger.given - balance.committed
    if balance.missing:
        report.findings.append(
            Finding(
                "missing", "wrong",
                f"{balance.missing:,} committed messages are nowhere",
                "look for who deletes from Postroom's tables, and whether the ids were committed "
                "in this database; then publish them again",
                balance.missing, [{"id": id} for id in balance.missing_ids],
            )
        )  # fmt: skip
    if invented and balance.unknown:
        report.findings.append(
            Finding(
                "invented", "wrong",
                f"{balance.unknown:,} messages are unknown to the application",
                "see what they are with `postroom messages show ID`",
                balance.unknown, [{"id": id} for id in balance.unknown_ids],
            )
        )  # fmt: skip
    return balance


# ── mending ────────────────────────────────────────────────────────────────────────────────────


async def mend(url: str, report: Report, *, why: str | None) -> int:
    """Give the stuck heads a report names their turn; returns how many. Fenced and audited."""
    stuck = [f.examples for f in report.findings if f.check == "stuck_heads"]
    database = Database(url)
    link = await database.connect()
    mended = 0
    try:
        for head in stuck[0] if stuck else []:
            mended += await link.transact(_arm(head, why))
    except DatabaseLost as lost:
        raise database.explain(lost) from lost
    finally:
        await link.close()
    return mended


def _arm(head: dict[str, Any], why: str | None) -> Flow[int]:
    place = {"lane": head["lane"], "position": head["position"]}
    yield from letters.lock_lanes([head["lane"]])
    if not (yield Statement(ROOM, "is_head", place)):
        return 0
    yield Statement(ROOM, "arm_head", place)
    yield audit.record("verify.mend", head["id"], why)
    return 1
