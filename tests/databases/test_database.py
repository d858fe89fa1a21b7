"""The workers' own way to the database: nothing of a connection is left behind."""

import asyncio
import gc
import sqlite3
import warnings
from contextlib import closing
from pathlib import Path

from postroom.databases.database import Database


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
