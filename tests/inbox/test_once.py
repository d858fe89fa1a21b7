"""`once`: on every kind of connection, a message is handled the first time and then skipped."""

import asyncio
import threading
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from doors import DOORS, Door, Open, sqlalchemy_url
from postroom import inbox
from postroom.errors import (
    ContentChanged,
    InvalidMessage,
    SeveralBinds,
    UnknownConnection,
    WouldCommitAlone,
    WrongCall,
)
from stages import Stage, Stages

each_door = pytest.mark.parametrize("door", DOORS, ids=str)
each_database = pytest.mark.parametrize("database", ["postgresql", "mariadb", "sqlite"])
ONE_A_DATABASE = {"postgresql": "psycopg.Connection", "mariadb": "pymysql.Connection"}
one_door_a_database = pytest.mark.parametrize(
    "door",
    [
        next(d for d in DOORS if d.kind == ONE_A_DATABASE.get(name, "sqlite3.Connection"))
        for name in ("postgresql", "mariadb", "sqlite")
    ],
    ids=str,
)
ID = uuid.UUID(int=7)


@pytest.fixture
def stage(door: Door, stages: Stages) -> Stage:
    return stages[door.database]


@pytest.fixture
async def opened(door: Door, stage: Stage) -> AsyncIterator[Open]:
    async with door.open(stage.url) as opened:
        yield opened


async def once(opened: Open, *wishes: Any, **more: Any) -> bool:
    if opened.is_async:
        return await inbox.once_async(opened.tx, *wishes, **more)
    return await opened.call(inbox.once, opened.tx, *wishes, **more)


def remembered(stage: Stage) -> list[tuple[str, str]]:
    rows = stage.query("SELECT consumer, message_id FROM {p}inbox ORDER BY consumer, message_id")
    return [(row[0], row[1]) for row in rows]


@each_door
async def test_the_first_time_only(opened: Open, stage: Stage) -> None:
    assert await once(opened, "billing", ID)
    await opened.execute("INSERT INTO thing VALUES ('bill')")
    assert not await once(opened, "billing", str(ID)), "within the same transaction too"
    assert remembered(stage) == [], "nothing is committed but by the caller"
    await opened.commit()
    assert not await once(opened, "billing", ID)
    assert await once(opened, "shipping", ID), "another consumer handles it by itself"
    await opened.commit()
    assert remembered(stage) == [("billing", str(ID)), ("shipping", str(ID))]
    assert stage.things() == ["bill"]


@each_door
async def test_a_rollback_forgets(opened: Open, stage: Stage) -> None:
    assert await once(opened, "billing", ID)
    await opened.rollback()
    savepoint = await opened.savepoint()
    assert await once(opened, "billing", ID)
    await savepoint.rollback()
    assert await once(opened, "billing", ID)
    await opened.commit()
    assert remembered(stage) == [("billing", str(ID))]


@each_door
async def test_a_connection_that_commits_by_itself_is_refused(door: Door, stage: Stage) -> None:
    async with door.open(stage.url, alone=True) as opened:
        with pytest.raises(WouldCommitAlone, match="record of this message"):
            await once(opened, "billing", ID)
    assert remembered(stage) == []


@each_door
async def test_once_on_an_asynchronous_connection_names_the_other_call(opened: Open) -> None:
    if opened.is_async:
        with pytest.raises(WrongCall, match=r"await inbox\.once_async"):
            inbox.once(opened.tx, "billing", ID)
    else:
        assert await once(opened, "billing", ID)


@one_door_a_database
async def test_other_content_under_the_same_id_is_an_error(opened: Open) -> None:
    assert await once(opened, "billing", ID, content=b"5 apples")
    assert not await once(opened, "billing", ID, content=b"5 apples")
    assert not await once(opened, "billing", ID), "who gives no content is not checked"
    with pytest.raises(ContentChanged, match="again with other content"):
        await once(opened, "billing", ID, content=b"6 apples")
    assert await once(opened, "shipping", ID)
    assert not await once(opened, "shipping", ID, content=b"whatever")


@one_door_a_database
@pytest.mark.parametrize(
    ("consumer", "message_id"),
    [("", "m"), ("c", ""), ("c" * 256, "m"), ("c", "m" * 256), ("c\x00", "m"), (None, "m")],
)
async def test_names_that_do_not_fit_are_refused(
    opened: Open, stage: Stage, consumer: Any, message_id: str
) -> None:
    with pytest.raises(InvalidMessage, match=r"(consumer|message_id) must"):
        await once(opened, consumer, message_id)
    await opened.commit()
    assert remembered(stage) == []


@one_door_a_database
async def test_names_are_told_apart_to_the_letter(opened: Open, stage: Stage) -> None:
    for name in ("m", "M", "m ", "\uff4d", "é", "e\u0301", "'; --", "%s", "?", "🚀" * 255):
        assert await once(opened, "billing", name), name
    await opened.commit()
    assert len(remembered(stage)) == 10


def test_something_that_is_no_connection_is_named() -> None:
    with pytest.raises(UnknownConnection, match=r"builtins\.str"):
        inbox.once("postgresql://", "billing", ID)


@each_database
def test_a_session_with_several_databases_must_say_which(stages: Stages, database: str) -> None:
    driver = {"postgresql": "psycopg", "mariadb": "pymysql", "sqlite": "pysqlite"}[database]
    stage = stages[database]
    engine = create_engine(sqlalchemy_url(stage.url, driver))
    with Session(binds={Stage: engine}) as session:
        with pytest.raises(SeveralBinds, match="bind=engine"):
            inbox.once(session, "billing", ID)
        assert inbox.once(session, "billing", ID, bind=engine)
        session.commit()
    engine.dispose()
    assert remembered(stage) == [("billing", str(ID))]


@one_door_a_database
@pytest.mark.parametrize("first", ["commits", "rolls back"])
async def test_two_copies_at_once_run_one_handler(door: Door, stage: Stage, first: str) -> None:
    """The second waits at the key for the first, and handles the message only if it must."""
    began, answers = threading.Event(), []

    def second() -> None:
        async def work() -> None:
            async with door.open(stage.url) as other:
                began.set()
                answers.append(await once(other, "billing", ID))
                await other.commit()

        asyncio.run(work())

    async with door.open(stage.url) as opened:
        assert await once(opened, "billing", ID)
        thread = threading.Thread(target=second)
        thread.start()
        assert await asyncio.to_thread(began.wait, 10)
        await asyncio.sleep(0.3)
        assert answers == [], "it waits for the first to end"
        await (opened.commit() if first == "commits" else opened.rollback())
        await asyncio.to_thread(thread.join, 30)
    assert answers == [first == "rolls back"]
    assert remembered(stage) == [("billing", str(ID))]
