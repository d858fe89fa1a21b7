"""The workers' own way to the database: nothing of a connection is left behind."""

import asyncio
import gc
import sqlite3
import threading
import warnings
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest
from link_room import __name__ as ROOM

from postroom import failpoints
from postroom.databases.database import Database, WorkerLink
from postroom.flow import Flow, Statement


async def test_a_connect_cancelled_at_any_step_leaves_no_connection(database_url: str) -> None:
    """Every step of the loop in turn, until one connects before it is cancelled."""
    if database_url.startswith("sqlite"):
        open(database_url.removeprefix("sqlite:///"), "w").close()
    database = Database(database_url)
    with warnings.catch_warnings(record=True) as left:
        warnings.simplefilter("always")
        for steps in range(2000):
            connecting = asyncio.create_task(database.connect())
            for _ in range(steps):
                await asyncio.sleep(0)
                if steps > 60:
                    await asyncio.sleep(0.0005)
            if connecting.done():
                await connecting.result().close()
                break
            connecting.cancel()
            await asyncio.gather(connecting, return_exceptions=True)
            gc.collect()
        else:
            raise AssertionError("it never connected")
        gc.collect()
    assert [str(one.message) for one in left if "non-checked-in" in str(one.message)] == []


async def test_a_closed_link_has_let_go_of_the_lock_of_its_file(tmp_path: Path) -> None:
    """Though somebody still has a cursor of it, as an error that is kept does."""
    path = tmp_path / "postroom.db"
    path.touch()
    link = await Database(f"sqlite:///{path}").connect()
    await link.driver.execute("BEGIN IMMEDIATE")
    kept = await link.driver.execute("SELECT 1 UNION SELECT 2")
    await link.close()
    with closing(sqlite3.connect(path, timeout=0)) as other:
        other.execute("BEGIN IMMEDIATE")
    del kept


@pytest.fixture
async def counter(tmp_path: Path) -> AsyncIterator[tuple[WorkerLink, Path]]:
    """A worker's link to a file with one table."""
    path = tmp_path / "postroom.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE link_test (n INTEGER, data BLOB)")
    link = await Database(f"sqlite:///{path}").connect()
    yield link, path
    await link.close()
    failpoints.clear()


def several(first: int) -> Flow[None]:
    for n in range(first, first + 3):
        yield Statement(ROOM, "insert", {"n": n, "data": b""})


async def test_a_transaction_on_sqlite_never_waits_for_the_loop(
    counter: tuple[WorkerLink, Path],
) -> None:
    """A writer that blocks the loop gets the lock: the transaction ends without the loop."""
    link, path = counter

    async def work() -> None:
        for n in range(20):
            await link.transact(several(3 * n))
            await link.ask(Statement(ROOM, "insert_returning", {"n": -1, "data": b""}))

    working, written = asyncio.create_task(work()), 0
    locked: list[sqlite3.OperationalError] = []
    with closing(sqlite3.connect(path, isolation_level=None, timeout=2)) as other:
        while not working.done() and not locked:
            await asyncio.sleep(0.001)
            try:
                other.execute("INSERT INTO link_test VALUES (1000, x'')")
            except sqlite3.OperationalError as error:
                locked.append(error)
            written += 1
        assert locked == []
        await working
        ((count,),) = other.execute("SELECT count(*) FROM link_test")
    assert count == written + 20 * 4


async def test_a_transaction_that_is_cancelled_is_rolled_back(
    counter: tuple[WorkerLink, Path],
) -> None:
    link, path = counter
    reached, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        reached.set()
        go_on.wait(20)

    failpoints.arm("sql.insert.after", wait, at=3)
    working = asyncio.create_task(link.transact(several(0)))
    await asyncio.to_thread(reached.wait, 20)
    working.cancel()
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await working
    with closing(sqlite3.connect(path, timeout=0)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert other.execute("SELECT count(*) FROM link_test").fetchall() == [(0,)]
