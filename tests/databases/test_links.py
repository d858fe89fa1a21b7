"""Links: every kind of connection carries out the same statements and returns the same rows."""

import asyncio
import logging
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from link_room import __name__ as ROOM
from sqlalchemy import create_engine, event
from sqlalchemy.orm import Session

from doors import DOORS, Door, answer
from doors_handed import HANDED_DOORS
from postroom import Outbox, failpoints
from postroom.databases import migrate
from postroom.databases.kinds import KINDS, find_kind, kind_of, link_of
from postroom.databases.sqlalchemy import LeanLink, SQLAlchemyLink, _is_watched, manner_of
from postroom.errors import UnknownConnection
from postroom.flow import Statement
from servers import PostgresServer
from stages import Stage, Stages

DATA_TYPES = {"postgresql": "bytea", "mariadb": "LONGBLOB", "sqlite": "BLOB"}


@pytest.fixture(scope="module")
def stages(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stages]:
    stages = Stages(request, tmp_path_factory.mktemp("stages"))
    yield stages
    stages.close()


@pytest.fixture(params=[*DOORS, *HANDED_DOORS], ids=str)
def door(request: pytest.FixtureRequest) -> Door:
    return request.param


@pytest.fixture
def stage(door: Door, stages: Stages) -> Stage:
    stage = stages[door.database]
    stage.query("DROP TABLE IF EXISTS link_test")
    stage.query(f"CREATE TABLE link_test (n BIGINT, data {DATA_TYPES[door.database]})")
    return stage


class Run:
    """Executes statements of the room on a link of either kind."""

    def __init__(self, link: Any) -> None:
        self.link = link

    async def __call__(self, name: str, **values: Any) -> list[tuple[Any, ...]]:
        return await answer(self.link.execute(Statement(ROOM, name, values)))

    async def many(self, name: str, rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
        return await answer(self.link.execute(Statement(ROOM, name, many=rows)))


@pytest.fixture
async def run(door: Door, stage: Stage) -> AsyncIterator[Run]:
    async with door.open(stage.url) as opened:
        yield Run(opened.link())
        await opened.rollback()


async def test_rows_are_plain_tuples(run: Run) -> None:
    assert await run("insert", n=1, data=b"\x00\xff'%") == []
    assert await run("insert", n=2, data=None) == []
    rows = await run("read", least=1)
    assert rows == [(1, b"\x00\xff'%"), (2, None)]
    assert [type(row) for row in rows] == [tuple, tuple]
    assert await run("read", least=3) == []
    assert await run("change", n=2, by=5) == []
    assert await run("read", least=2) == [(7, None)]


async def test_many_rows_at_once(run: Run) -> None:
    assert await run.many("insert", []) == []
    assert await run.many("insert", [{"n": 0, "data": None}]) == []
    rows = [{"n": n, "data": bytes([n]) if n % 3 else None} for n in range(1, 200)]
    assert await run.many("insert", rows) == []
    assert await run("read", least=1) == [(row["n"], row["data"]) for row in rows]
    assert await run.many("change", [{"n": 1, "by": -11}, {"n": 2, "by": -12}]) == []
    assert (await run("read", least=-11))[:2] == [(-10, b"\x01"), (-10, b"\x02")]


async def test_the_rows_are_those_of_the_last_statement_that_has_any(run: Run) -> None:
    await run.many("insert", [{"n": n, "data": b""} for n in (1, 2)])
    assert await run("rows_in_the_middle", n=1) == [(101,)]
    assert await run("no_rows_at_the_end", n=2) == []
    assert await run("read", least=0) == [(2, b"")]


async def test_lists_of_numbers(run: Run) -> None:
    await run.many("insert", [{"n": n, "data": b""} for n in range(5)])
    assert await run("read_listed", ns=[1, 3, 9], ns_list=[1, 3, 9]) == [(1,), (3,)]
    assert await run("read_listed", ns=[], ns_list=[]) == []


async def test_percent_signs(run: Run) -> None:
    await run("insert", n=1, data=b"")
    assert await run("percent", word="100 % %s", n=1) == [("100 % %s",)]


async def test_failpoints_stand_around_every_statement(run: Run) -> None:
    passed: list[str] = []
    for point in ("sql.insert.before", "sql.insert.after", "sql.read.before", "sql.read.after"):
        failpoints.arm(point, lambda point=point: passed.append(point))
    try:
        await run("insert", n=1, data=b"")
        await run("read", least=0)
    finally:
        failpoints.clear()
    assert passed == ["sql.insert.before", "sql.insert.after", "sql.read.before", "sql.read.after"]


def test_kinds_are_found_by_name_and_through_subclasses() -> None:
    class Mine(Session): ...

    assert kind_of(Mine()).name == "sqlalchemy.Session"
    assert find_kind(object()) is None
    assert len({kind.name for kind in KINDS}) == len(KINDS)
    engine = create_engine("sqlite://")
    with pytest.raises(UnknownConnection, match=r"sqlalchemy\.engine\.base\.Engine"):
        link_of(engine)


def test_a_database_that_is_not_ours_is_named() -> None:
    from sqlalchemy.dialects import mssql

    with pytest.raises(UnknownConnection, match="MariaDB, MySQL and SQLite, not mssql"):
        manner_of(mssql.dialect())


def test_a_dialect_that_cannot_tell_is_judged_by_what_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def cannot_tell(*_: Any) -> bool:
        raise NotImplementedError

    engine = create_engine("sqlite://")
    monkeypatch.setattr(engine.dialect, "detect_autocommit_setting", cannot_tell)
    with engine.connect() as connection:
        assert not SQLAlchemyLink(connection).commits_alone()
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        assert SQLAlchemyLink(connection).commits_alone()
        assert not connection.in_transaction()


def test_links_import_no_driver_and_the_front_door_no_sqlalchemy() -> None:
    program = """
import sys
import postroom, postroom.outbox.publish, postroom.databases.kinds, postroom.outbox.wake
assert set(postroom.__all__) <= set(dir(postroom))
postroom.Outbox, postroom.Published, postroom.Draft, postroom.Message, postroom.message
postroom.RetryPolicy, postroom.PostroomError, postroom.errors, postroom.__version__
drivers = {"sqlalchemy", "asyncpg", "psycopg", "psycopg2", "aiosqlite", "pymysql", "asyncmy"}
print(sorted(drivers & {name.partition(".")[0] for name in sys.modules}))
import postroom.databases.asyncpg, postroom.databases.psycopg, postroom.databases.mysql
import postroom.databases.sqlite
print(sorted(drivers & {name.partition(".")[0] for name in sys.modules}))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n") == ["[]", "[]", ""]


@pytest.mark.parametrize(
    "heard_of",
    ["before_cursor_execute", "after_cursor_execute", "do_execute", "handle_error", "log", "echo"],
)
def test_a_lean_link_is_seen_by_whoever_watches(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, heard_of: str
) -> None:
    engine, heard = create_engine(f"sqlite:///{tmp_path}/app.db"), list[str]()
    with engine.connect() as connection:
        link = LeanLink(connection)
        assert link.execute(Statement("", "look", {}, text="SELECT 1, 'a'")) == [(1, "a")]
    if heard_of == "log":
        caplog.set_level(logging.INFO, "sqlalchemy.engine")
    elif heard_of == "echo":
        engine.echo = True
    else:
        event.listen(engine, heard_of, lambda *_, **__: heard.append("told"), named=True)
    with engine.connect() as connection:
        link = LeanLink(connection)
        assert link.execute(Statement("", "look", {}, text="SELECT 2")) == [(2,)]
        with pytest.raises(Exception, match="no such table"):
            link.execute(Statement("", "fail", {}, text="SELECT 3 FROM nowhere"))
    engine.dispose()
    assert heard or "SELECT 2" in caplog.text


def test_a_listener_without_a_name_is_heard_of() -> None:
    engine, heard = create_engine("sqlite://"), list[Any]()
    event.listen(engine, "handle_error", partial(heard.append))
    with engine.connect() as connection, pytest.raises(Exception, match="no such table"):
        LeanLink(connection).execute(Statement("", "fail", {}, text="SELECT 1 FROM nowhere"))
    engine.dispose()
    assert len(heard) == 1


def test_a_lean_link_stays_lean_where_we_ourselves_listen(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/app.db"
    asyncio.run(migrate.install(url))
    engine = create_engine(url)
    with Session(engine) as session, session.begin():
        Outbox().publish(session, {}, type="x.v1", topic="x")
    with engine.connect() as connection:
        assert connection.dialect.dispatch.handle_error, "publishing listens"
        assert not _is_watched(connection)
    engine.dispose()


def test_a_lean_link_lets_go_of_what_is_lost(postgres: PostgresServer) -> None:
    engine = create_engine(postgres.url.replace("://", "+psycopg://", 1))
    with engine.connect() as connection:
        link = LeanLink(connection)
        kill = "SELECT pg_terminate_backend(pg_backend_pid())"
        with pytest.raises(psycopg.OperationalError):
            link.execute(Statement("", "kill", {}, text=kill))
        assert connection.invalidated
    engine.dispose()
