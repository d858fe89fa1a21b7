"""The session suite: whatever happens around a session, each case ends with the right rows or with
an error that names the remedy."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from session_tools import DRIVERS, Thing, make_engine, outbox, put, put_now
from sqlalchemy import create_engine, event, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from doors import sqlalchemy_url
from postroom import Draft, failpoints
from postroom.errors import NotWritten, WouldCommitAlone, WrongCall
from postroom.outbox import wake
from stages import Stage, Stages


@pytest.fixture(params=DRIVERS)
def driver(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def stage(driver: str, stages: Stages) -> Stage:
    return stages[DRIVERS[driver]]


@pytest.fixture
async def engine(driver: str, stage: Stage) -> AsyncIterator[AsyncEngine]:
    engine = make_engine(stage, driver)
    yield engine
    await engine.dispose()


@pytest.fixture
async def session(engine: AsyncEngine) -> AsyncIterator[AsyncSession]:
    async with AsyncSession(engine) as session:
        yield session


@pytest.fixture
def hints() -> Iterator[list[int]]:
    heard: list[int] = []
    unlisten = wake.listen(lambda: heard.append(1))
    yield heard
    unlisten()


@pytest.fixture(autouse=True)
def disarm() -> Iterator[None]:
    yield
    failpoints.clear()


# The queue.


async def test_a_plain_publish_begins_but_touches_no_database(
    session: AsyncSession, engine: AsyncEngine, stage: Stage
) -> None:
    connected: list[Any] = []
    event.listen(engine.sync_engine, "connect", lambda *connection: connected.append(connection))
    put(session, b"1")
    assert session.in_transaction()
    assert connected == []
    assert list(session.new) == []
    await session.commit()
    assert len(connected) == 1
    assert stage.payloads() == [b"1"]


async def test_the_queue_is_written_by_one_statement_at_the_root_commit(
    session: AsyncSession, engine: AsyncEngine, stage: Stage
) -> None:
    statements: list[str] = []

    @event.listens_for(engine.sync_engine, "before_cursor_execute")
    def heard(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        statements.append(statement)

    for n in range(5):
        put(session, b"%d" % n)
    async with session.begin_nested():
        session.add(Thing(name="a"))
        put(session, b"5")
    assert not any("outbox" in statement for statement in statements)
    await session.commit()
    assert sum("outbox" in statement for statement in statements) == 1
    assert stage.payloads() == [b"0", b"1", b"2", b"3", b"4", b"5"]
    assert stage.things() == ["a"]


async def test_a_session_may_go_on_after_its_commit(session: AsyncSession, stage: Stage) -> None:
    for n in range(3):
        put(session, b"%d" % n)
        await session.commit()
        put(session, b"lost")
        await session.rollback()
    assert stage.payloads() == [b"0", b"1", b"2"]


async def test_expunge_all_does_not_matter(session: AsyncSession, stage: Stage) -> None:
    put(session, b"1")
    session.expunge_all()
    await session.commit()
    assert stage.payloads() == [b"1"]


async def test_close_is_a_rollback(engine: AsyncEngine, stage: Stage) -> None:
    async with AsyncSession(engine) as session:
        put(session, b"dropped")
        await session.begin_nested()
        put(session, b"dropped too")
    await session.commit()
    put(session, b"kept")
    await session.commit()
    await session.close()
    assert stage.payloads() == [b"kept"]


async def test_an_immediate_publish_writes_the_queue_first(
    session: AsyncSession, stage: Stage
) -> None:
    put(session, b"1", key="k")
    await put_now(session, b"2", key="k")
    put(session, b"3", key="k")
    await session.run_sync(lambda sync: outbox.publish(sync, b"4", type="t", key="k"))
    put(session, b"5", key="k")
    await outbox.publish_many_async(session, [Draft(payload=b"6", type="t", key="k")])
    await session.commit()
    assert stage.payloads() == [b"1", b"2", b"3", b"4", b"5", b"6"]


async def test_session_and_core_mixed_on_one_key(session: AsyncSession, stage: Stage) -> None:
    put(session, b"1", key="k")
    connection = await session.connection()
    await put_now(connection, b"2", key="k")
    put(session, b"3", key="k")
    await put_now(connection, b"4", key="k")
    put(session, b"5", key="k")
    await session.commit()
    assert stage.payloads() == [b"1", b"2", b"3", b"4", b"5"]


async def test_duplicates_are_known_when_written(session: AsyncSession, stage: Stage) -> None:
    first = put(session, b"1", dedup_key="d")
    with pytest.raises(WrongCall, match=r"publish_async\(session, ...\)` to know it now"):
        _ = first.duplicate
    again = put(session, b"2", dedup_key="d")
    assert not put(session, b"3").duplicate
    await session.commit()
    assert (first.duplicate, again.duplicate, again.id) == (False, True, first.id)
    assert stage.payloads() == [b"1", b"3"]


# Savepoints.


async def test_the_fate_of_savepoints(session: AsyncSession, stage: Stage) -> None:
    session.add(Thing(name="root"))
    put(session, b"root")
    outer = await session.begin_nested()
    put(session, b"outer")
    inner = await session.begin_nested()
    session.add(Thing(name="inner"))
    put(session, b"inner")
    await inner.rollback()
    put(session, b"outer 2")
    inner = await session.begin_nested()
    session.add(Thing(name="inner 2"))
    put(session, b"inner 2")
    await inner.commit()
    await outer.commit()
    lost = await session.begin_nested()
    inner = await session.begin_nested()
    put(session, b"released, then rolled back")
    await inner.commit()
    await lost.rollback()
    await session.commit()
    assert stage.payloads() == [b"root", b"outer", b"outer 2", b"inner 2"]
    assert stage.things() == ["inner 2", "root"]


async def test_what_a_savepoint_rolled_back_is_written_again(
    session: AsyncSession, stage: Stage
) -> None:
    first = put(session, b"1", dedup_key="d")
    put(session, b"2")
    savepoint = await session.begin_nested()
    put(session, b"lost")
    await put_now(session, b"lost too")
    assert not first.duplicate
    await savepoint.rollback()
    with pytest.raises(WrongCall):
        _ = first.duplicate
    put(session, b"3")
    await session.commit()
    assert stage.payloads() == [b"1", b"2", b"3"]
    assert not first.duplicate


async def test_what_a_released_savepoint_wrote_is_not_written_again(
    session: AsyncSession, stage: Stage
) -> None:
    put(session, b"1")
    outer = await session.begin_nested()
    inner = await session.begin_nested()
    await put_now(session, b"2")
    await inner.commit()
    put(session, b"3")
    await outer.commit()
    await session.commit()
    assert stage.payloads() == [b"1", b"2", b"3"]


async def test_commit_ends_open_savepoints_too(session: AsyncSession, stage: Stage) -> None:
    put(session, b"1")
    await session.begin_nested()
    put(session, b"2")
    await session.commit()
    assert stage.payloads() == [b"1", b"2"]


async def test_a_block_that_ends_with_a_savepoint_open_loses_nothing(
    engine: AsyncEngine, stage: Stage
) -> None:
    async def forgetful(session: AsyncSession, *things: Thing) -> None:
        async with session.begin():
            session.add_all(things)
            put(session, b"1")
            await session.begin_nested()

    async with AsyncSession(engine) as session:
        with pytest.raises(NotWritten, match="end its savepoints first"):
            await forgetful(session, Thing(name="a"))
        with pytest.raises(NotWritten, match="end its savepoints first"):
            await forgetful(session)
    assert stage.payloads() == []
    assert stage.things() == []


async def test_a_core_savepoint_that_the_session_does_not_know(
    session: AsyncSession, stage: Stage
) -> None:
    connection = await session.connection()
    savepoint = await connection.begin_nested()
    with pytest.raises(NotWritten, match=r"await outbox\.publish_async.*session\.begin_nested"):
        put(session, b"refused")
    await put_now(session, b"rolled back with it")
    await savepoint.rollback()
    savepoint = await connection.begin_nested()
    inner = await session.begin_nested()
    await session.execute(text("SELECT 1"))
    with pytest.raises(NotWritten, match=r"await outbox\.publish_async"):
        put(session, b"refused")
    await inner.rollback()
    await put_now(session, b"1")
    await savepoint.commit()
    put(session, b"2")
    savepoint = await connection.begin_nested()
    with pytest.raises(NotWritten, match=r"end it first, use session\.begin_nested"):
        await put_now(session, b"refused")
    with pytest.raises(NotWritten, match=r"end it first, use session\.begin_nested"):
        await put_now(connection, b"refused")
    await savepoint.rollback()
    await session.commit()
    assert stage.payloads() == [b"1", b"2"]


# Listeners of the user's.


async def test_listeners_that_publish_while_the_commit_goes_on(
    session: AsyncSession, stage: Stage
) -> None:
    sync = session.sync_session

    @event.listens_for(sync, "before_commit")
    def before_commit(_: Session) -> None:
        put(session, b"before_commit")
        sync.add(Thing(name="late"))

    @event.listens_for(sync, "before_flush")
    def before_flush(*_: Any) -> None:
        put(session, b"before_flush")

    @event.listens_for(sync, "after_flush")
    def after_flush(*_: Any) -> None:
        put(session, b"after_flush")

    put(session, b"first")
    await session.commit()
    assert stage.payloads() == [b"first", b"before_commit", b"before_flush", b"after_flush"]
    assert stage.things() == ["late"]


async def test_a_listener_that_touches_every_new_object(
    session: AsyncSession, stage: Stage
) -> None:
    touched: list[Any] = []

    @event.listens_for(session.sync_session, "before_flush")
    def before_flush(sync: Session, *_: Any) -> None:
        for new in sync.new:
            new.name = new.name.upper()
            touched.append(new)

    session.add(Thing(name="a"))
    put(session, b"1")
    await session.flush()
    put(session, b"2")
    await session.commit()
    assert [type(each) for each in touched] == [Thing]
    assert stage.things() == ["A"]
    assert stage.payloads() == [b"1", b"2"]


async def test_after_the_commit_it_is_too_late(session: AsyncSession, stage: Stage) -> None:
    refused: list[Exception] = []

    @event.listens_for(session.sync_session, "after_commit")
    def after_commit(_: Session) -> None:
        try:
            put(session, b"late")
        except NotWritten as error:
            refused.append(error)

    put(session, b"1")
    await session.commit()
    assert "publish before the commit" in str(refused[0])
    assert stage.payloads() == [b"1"]


async def test_hints_come_after_commits_and_never_after_rollbacks(
    session: AsyncSession, engine: AsyncEngine, hints: list[int]
) -> None:
    put(session, b"1")
    await session.rollback()
    await session.execute(text("SELECT 1"))
    await session.commit()
    assert hints == []
    async with session.begin_nested():
        put(session, b"1")
    assert hints == []
    await session.commit()
    assert hints == [1]
    await session.commit()
    async with engine.connect() as connection:
        await put_now(connection, b"2")
        await connection.rollback()
        await connection.commit()
        assert hints == [1]
        await put_now(connection, b"2")
        await connection.commit()
        await connection.execute(text("SELECT 1"))
        await connection.commit()
    assert hints == [1, 1]


def test_a_hint_comes_after_the_commit_of_a_synchronous_session(
    stages: Stages, hints: list[int]
) -> None:
    engine = create_engine(sqlalchemy_url(stages["sqlite"].url, "pysqlite"))
    with Session(engine) as session:
        outbox.publish(session, b"1", type="t")
        session.rollback()
        outbox.publish(session, b"2", type="t")
        assert hints == []
        session.commit()
    engine.dispose()
    assert hints == [1]


# Refusals.


async def test_a_commit_behind_the_sessions_back_is_refused(
    session: AsyncSession, stage: Stage
) -> None:
    session.add(Thing(name="a"))
    await session.flush()
    put(session, b"1")
    connection = await session.connection()
    with pytest.raises(NotWritten, match="1 queued message"):
        await connection.commit()
    await session.rollback()
    assert stage.things() == []
    assert stage.payloads() == []


@pytest.mark.filterwarnings("ignore:transaction already deassociated")
async def test_a_rollback_behind_the_sessions_back_is_noticed(
    session: AsyncSession, stage: Stage
) -> None:
    session.add(Thing(name="a"))
    await session.flush()
    put(session, b"1")
    await (await session.connection()).rollback()
    with pytest.raises(NotWritten, match="behind its back"):
        await session.commit()
    await session.rollback()
    assert stage.things() == []
    assert stage.payloads() == []


@pytest.mark.parametrize("at", ["before", "after"])
async def test_a_failed_write_refuses_every_commit_until_the_rollback(
    session: AsyncSession, stage: Stage, at: str
) -> None:
    def fail() -> None:
        raise OSError("disk on fire")

    session.add(Thing(name="a"))
    put(session, b"1", dedup_key="d")
    failpoints.arm(f"sql.insert_outbox.{at}", fail)
    with pytest.raises(OSError, match="disk on fire"):
        await session.commit()
    failpoints.clear()
    with pytest.raises(NotWritten, match="roll back and try again"):
        await session.commit()
    await session.rollback()
    assert stage.things() == []
    put(session, b"2", dedup_key="d")
    savepoint = await session.begin_nested()
    failpoints.arm(f"sql.insert_outbox.{at}", fail)
    with pytest.raises(OSError, match="disk on fire"):
        await put_now(session, b"3")
    failpoints.clear()
    with pytest.raises(NotWritten, match="roll back and try again"):
        await savepoint.commit()
    await savepoint.rollback()
    await session.commit()
    assert stage.payloads() == [b"2"]


async def test_an_autocommit_engine_is_refused(stage: Stage, driver: str) -> None:
    engine = make_engine(stage, driver, isolation_level="AUTOCOMMIT")
    async with AsyncSession(engine) as session:
        with pytest.raises(WouldCommitAlone, match="isolation_level='AUTOCOMMIT'"):
            put(session, b"1")
        with pytest.raises(WouldCommitAlone, match="isolation_level='AUTOCOMMIT'"):
            await put_now(session, b"1")
    await engine.dispose()
    engine = make_engine(stage, driver, isolation_level="SERIALIZABLE")
    async with AsyncSession(engine) as session:
        await session.connection(execution_options={"isolation_level": "AUTOCOMMIT"})
        with pytest.raises(WouldCommitAlone, match="isolation_level='AUTOCOMMIT'"):
            put(session, b"1")
    async with AsyncSession(engine.execution_options(isolation_level="AUTOCOMMIT")) as session:
        with pytest.raises(WouldCommitAlone, match="isolation_level='AUTOCOMMIT'"):
            put(session, b"1")
    await engine.dispose()
    assert stage.payloads() == []


async def test_a_session_that_must_be_begun_by_hand(engine: AsyncEngine, stage: Stage) -> None:
    async with AsyncSession(engine, autobegin=False) as session:
        with pytest.raises(WouldCommitAlone, match=r"call session\.begin\(\) first"):
            put(session, b"1")
        with pytest.raises(WouldCommitAlone, match=r"call session\.begin\(\) first"):
            await put_now(session, b"1")
        async with session.begin():
            put(session, b"2")
    assert stage.payloads() == [b"2"]
