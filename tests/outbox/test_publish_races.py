"""Two writers at once, and writers that die: nothing lost, nothing invented, nobody aborted."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import psycopg.errors
import pytest

from doors import DOORS, Door, Open
from postroom import Draft, Outbox, Published
from postroom.errors import IdReused
from stages import Stage, Stages

outbox = Outbox()
BLOCKED_SECONDS = 0.3

# Each driver of a server once, and a session; SQLite has one writer at a time anyway.
RACERS = {
    str(door): door
    for door in DOORS
    if str(door)
    in (
        "psycopg.Connection-postgresql-default",
        "psycopg2.connection-postgresql-default",
        "asyncpg.Connection-postgresql-default",
        "sqlalchemy.AsyncSession-postgresql-asyncpg-plain",
        "pymysql.Connection-mariadb-default",
        "MySQLdb.Connection-mariadb-default",
        "asyncmy.Connection-mariadb-default",
        "aiomysql.Connection-mariadb-default",
        "sqlalchemy.AsyncSession-mariadb-asyncmy-plain",
        "sqlite3.Connection-sqlite-default",
    )
}


class Writer:
    """One transaction in progress; what it does may block without stopping the others."""

    def __init__(self, opened: Open) -> None:
        self.opened = opened

    async def publish(self, payload: bytes, **wishes: Any) -> Published:
        """Publish and make sure it is written: a queue would only be written at the commit."""
        (published,) = await self.publish_many([Draft(payload=payload, type="t", **wishes)])
        return published

    async def publish_many(self, drafts: list[Draft], **how: Any) -> list[Published]:
        tx = self.opened.tx
        if self.opened.is_async:
            return await outbox.publish_many_async(tx, drafts, **how)
        return await asyncio.to_thread(outbox.publish_many, tx, drafts, **how)

    async def execute(self, statement: str) -> None:
        await self.opened.execute(statement)

    async def commit(self) -> None:
        await self.opened.commit()

    async def rollback(self) -> None:
        await self.opened.rollback()


@pytest.fixture(params=RACERS)
def door(request: pytest.FixtureRequest) -> Door:
    return RACERS[request.param]


@pytest.fixture
def stage(door: Door, stages: Stages) -> Stage:
    return stages[door.database]


@pytest.fixture
async def writers(door: Door, stage: Stage) -> AsyncIterator[list[Writer]]:
    options = {"check_same_thread": False} if door.database == "sqlite" else {}
    async with AsyncExitStack() as stack:
        yield [
            Writer(
                await stack.enter_async_context(
                    door.opener(stage.url, **options, **dict(door.options))
                )
            )
            for _ in range(3)
        ]


async def blocked(task: asyncio.Task[Any]) -> bool:
    done, _ = await asyncio.wait([task], timeout=BLOCKED_SECONDS)
    return not done


async def test_the_later_claim_waits_and_is_a_duplicate(
    writers: list[Writer], stage: Stage
) -> None:
    first, second, _ = writers
    held = await first.publish(b"1", dedup_key="d")
    waiting = asyncio.create_task(second.publish(b"2", dedup_key="d"))
    assert await blocked(waiting)
    await first.commit()
    duplicate = await waiting
    assert (duplicate.duplicate, duplicate.id) == (True, held.id)
    await second.execute("INSERT INTO thing VALUES ('second')")
    await second.publish(b"3")
    await second.commit()
    assert stage.payloads() == [b"1", b"3"]
    assert stage.things() == ["second"]


async def test_a_claim_that_was_rolled_back_is_free(
    writers: list[Writer], stage: Stage, door: Door
) -> None:
    first, second, third = writers
    await first.publish(b"1", dedup_key="d")
    waiting = [asyncio.create_task(second.publish(b"2", dedup_key="d"))]
    if door.database == "postgresql":  # InnoDB makes a deadlock of two who wait for a rollback
        waiting.append(asyncio.create_task(third.publish(b"2", dedup_key="d")))
    assert await blocked(waiting[0])
    await first.rollback()
    done, pending = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    (winner,) = done
    published = await winner
    assert not published.duplicate
    await (second if winner is waiting[0] else third).commit()
    for loser in pending:
        assert (await loser).duplicate
        assert (await loser).id == published.id
        await (second if loser is waiting[0] else third).commit()
    assert stage.payloads() == [b"2"]


async def test_a_race_with_one_chosen_id_writes_it_once(
    writers: list[Writer], stage: Stage
) -> None:
    id = "018f0000-0000-7000-8000-00000000abcd"
    first, second, _ = writers
    await first.publish(b"1", dedup_key="d", id=id)
    waiting = asyncio.create_task(second.publish(b"1", dedup_key="d", id=id))
    assert await blocked(waiting)
    await first.commit()
    assert (await waiting).duplicate
    await second.commit()
    assert stage.payloads() == [b"1"]


async def test_a_race_with_one_chosen_id_and_two_contents_is_refused(
    writers: list[Writer], stage: Stage
) -> None:
    id = "018f0000-0000-7000-8000-00000000abcd"
    first, second, third = writers
    await first.publish(b"1", id=id)
    waiting = asyncio.create_task(second.publish(b"2", id=id))
    assert await blocked(waiting)
    await first.commit()
    with pytest.raises(IdReused, match=id):
        await waiting
    await second.rollback()
    assert (await third.publish(b"1", id=id)).duplicate
    await third.commit()
    assert stage.payloads() == [b"1"]


async def test_writers_of_one_key_take_turns(writers: list[Writer], stage: Stage) -> None:
    """Without the lock the second would commit first with the higher position."""
    first, second, third = writers
    await first.publish_many([Draft(payload=b"1", type="t", key="k")], serialize_key=True)
    waiting = asyncio.create_task(
        second.publish_many([Draft(payload=b"2", type="t", key="k")], serialize_key=True)
    )
    assert await blocked(waiting)
    if stage.database != "sqlite":
        await third.publish_many([Draft(payload=b"other", type="t", key="x")], serialize_key=True)
        await third.commit()
    await first.commit()
    assert b"2" not in stage.payloads()
    await waiting
    await second.commit()
    assert [each for each in stage.payloads() if each != b"other"] == [b"1", b"2"]


async def test_position_order_is_the_order_of_turns(writers: list[Writer], stage: Stage) -> None:
    turns: list[bytes] = []

    async def write(number: int, writer: Writer) -> None:
        for turn in range(20):
            payload = b"%d.%d" % (number, turn)
            draft = Draft(payload=payload, type="t", key="k")
            await writer.publish_many([draft], serialize_key=True)
            turns.append(payload)
            await asyncio.sleep(0.001 * ((turn * 7 + number) % 3))
            await writer.commit()

    if stage.database == "sqlite":
        writers = writers[:1]  # its busy handler is not fair, and its order needs no lock
    await asyncio.gather(*(write(number, writer) for number, writer in enumerate(writers)))
    assert stage.payloads() == turns


async def test_crossing_key_sets_do_not_deadlock(writers: list[Writer], stage: Stage) -> None:
    names = [f"n{n}" for n in range(8)]
    fresh = iter(range(1000))

    async def write(writer: Writer, order: list[str]) -> None:
        for turn in range(8):
            drafts = [
                Draft(payload=b"", type="t", key=name, dedup_key=f"{name} {turn}") for name in order
            ]
            drafts.append(Draft(payload=b"", type="t", key=f"fresh {next(fresh)}"))
            await writer.publish_many(drafts, serialize_key=True)
            await writer.commit()

    if stage.database == "sqlite":
        writers = writers[:1]
    orders = [names, names[::-1], names[3:] + names[:3]]
    await asyncio.gather(*(write(w, o) for w, o in zip(writers, orders, strict=False)))
    assert len(stage.messages()) == 8 * 8 + 8 * len(writers)


@pytest.mark.parametrize("door", ["pymysql.Connection-mariadb-default"], indirect=True)
async def test_an_old_snapshot_does_not_hide_a_claim(writers: list[Writer], stage: Stage) -> None:
    first, second, _ = writers
    await second.execute("SELECT * FROM thing")
    held = await first.publish(b"1", dedup_key="d")
    await first.commit()
    duplicate = await second.publish(b"2", dedup_key="d")
    assert (duplicate.duplicate, duplicate.id) == (True, held.id)
    await second.commit()
    assert stage.payloads() == [b"1"]


@pytest.mark.parametrize("door", ["psycopg.Connection-postgresql-default"], indirect=True)
async def test_repeatable_read_fails_as_the_database_says(
    writers: list[Writer], stage: Stage
) -> None:
    """PostgreSQL itself aborts here; the driver's error passes through for the user's retry."""
    first, second, _ = writers
    second.opened.tx.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    await second.execute("SELECT * FROM thing")
    held = await first.publish(b"1", dedup_key="d")
    await first.commit()
    with pytest.raises(psycopg.errors.SerializationFailure):
        await second.publish(b"2", dedup_key="d")
    await second.rollback()
    assert (await second.publish(b"2", dedup_key="d")).id == held.id


@pytest.mark.parametrize("door", ["pymysql.Connection-mariadb-default"], indirect=True)
async def test_a_lock_wait_timeout_leaves_neither_row(writers: list[Writer], stage: Stage) -> None:
    first, second, _ = writers
    await second.execute("SET innodb_lock_wait_timeout = 1")
    await first.publish(b"1", dedup_key="d")
    await second.execute("INSERT INTO thing VALUES ('second')")
    with pytest.raises(Exception, match="Lock wait timeout"):
        await second.publish(b"2", dedup_key="d")
    await second.rollback()
    await first.rollback()
    assert stage.things() == []
    assert stage.payloads() == []


# Writers that die.

# Imports everything once, then forks a writer for each point it is told to die at.
NURSERY = """
import asyncio, os, sys
from doors import DOORS
from postroom import Draft, Outbox, failpoints

async def write(door, url):
    async with door.open(url) as opened:
        await opened.execute("INSERT INTO thing VALUES ('a')")
        drafts = [Draft(payload=b"1", type="t", dedup_key="d", key="k")]
        await opened.publish_many(Outbox(), drafts, serialize_key=True)
        failpoints.hit("child.commit.before")
        await opened.commit()
        failpoints.hit("child.commit.after")

door = next(door for door in DOORS if str(door) == sys.argv[1])
for line in sys.stdin:
    pid = os.fork()
    if not pid:
        name, _, value = line.strip().partition("=")
        os.environ[name] = value
        failpoints.load_environment()
        asyncio.run(write(door, sys.argv[2]))
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.fixture
def nursery(door: Door, stage: Stage) -> Iterator[Callable[[str], int]]:
    paths = [str(Path(__file__).parent), *filter(None, sys.path)]
    with subprocess.Popen(
        [sys.executable, "-c", NURSERY, str(door), stage.url],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:

        def run(setting: str) -> int:
            process.stdin.write(f"{setting}\n")
            process.stdin.flush()
            return int(process.stdout.readline())

        yield run
        process.stdin.close()


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
def test_a_writer_killed_anywhere_leaves_both_or_neither(
    door: Door, stage: Stage, nursery: Callable[[str], int], tmp_path: Path
) -> None:
    log = tmp_path / "points"
    assert nursery(f"POSTROOM_FAILPOINTS_LOG={log}") == 0
    points = log.read_text().split()
    assert points.index("sql.claim_dedup_key.before") < points.index("sql.insert_outbox.after")
    for point in points:
        stage.clear()
        assert nursery(f"POSTROOM_FAILPOINTS={point}=kill") == -signal.SIGKILL
        claims = stage.query("SELECT * FROM {p}dedup")
        assert len(stage.things()) == len(stage.messages()) == len(claims)
        assert len(stage.things()) == (point == "child.commit.after")
