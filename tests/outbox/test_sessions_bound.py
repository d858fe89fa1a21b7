"""Sessions on outer connections, with several engines, and in two phases."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from session_tools import DRIVERS, Thing, make_engine, outbox, put, put_now
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from doors import sqlalchemy_url
from postroom import Outbox
from postroom.errors import NotWritten, SeveralBinds
from stages import Stage, Stages

JOIN_MODES = ("conditional_savepoint", "rollback_only", "create_savepoint", "control_fully")


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


# Bound to an outer connection.


@pytest.mark.parametrize("mode", JOIN_MODES)
async def test_a_session_inside_an_outer_transaction(
    engine: AsyncEngine, stage: Stage, mode: Any
) -> None:
    for end in ("commit", "rollback"):
        before = stage.payloads()
        async with engine.connect() as outer:
            transaction = await outer.begin()
            async with AsyncSession(outer, join_transaction_mode=mode) as session:
                session.add(Thing(name=end))
                put(session, end.encode())
                await session.commit()
                if mode != "control_fully":
                    assert stage.payloads() == before
            if mode != "control_fully":
                await getattr(transaction, end)()
    wanted = ["commit", "rollback"] if mode == "control_fully" else ["commit"]
    assert stage.things() == wanted
    assert stage.payloads() == [name.encode() for name in wanted]


@pytest.mark.parametrize("mode", JOIN_MODES)
async def test_a_session_inside_an_outer_savepoint(
    engine: AsyncEngine, stage: Stage, mode: Any
) -> None:
    async with engine.connect() as outer, outer.begin():
        for end in ("commit", "rollback"):
            savepoint = await outer.begin_nested()
            async with AsyncSession(outer, join_transaction_mode=mode) as session:
                session.add(Thing(name=end))
                put(session, end.encode())
                await session.commit()
            if mode != "control_fully":
                await getattr(savepoint, end)()
    wanted = ["commit", "rollback"] if mode == "control_fully" else ["commit"]
    assert stage.things() == wanted
    assert stage.payloads() == [name.encode() for name in wanted]


@pytest.mark.parametrize("joined", [False, True])
async def test_an_outer_commit_without_the_sessions_is_refused(
    engine: AsyncEngine, stage: Stage, joined: bool
) -> None:
    async with engine.connect() as outer:
        await outer.execute(text("INSERT INTO thing VALUES ('outer')"))
        session = AsyncSession(outer)
        if joined:
            session.add(Thing(name="inner"))
            await session.flush()
        put(session, b"1")
        with pytest.raises(NotWritten, match="1 queued message"):
            await outer.commit()
        # Whoever goes on regardless must not commit half of it.
        await outer.rollback()
        await session.close()
        await outer.execute(text("INSERT INTO thing VALUES ('later')"))
        await outer.commit()
    assert stage.things() == ["later"]
    assert stage.payloads() == []


@pytest.mark.filterwarnings("ignore:transaction already deassociated")
async def test_what_was_published_in_an_ended_outer_transaction_is_refused(
    engine: AsyncEngine, stage: Stage
) -> None:
    async with engine.connect() as outer:
        session = AsyncSession(outer)
        savepoint = await outer.begin_nested()
        put(session, b"1")
        await savepoint.rollback()
        with pytest.raises(NotWritten, match="end the session inside it"):
            await session.commit()
        await session.rollback()
        session.add(Thing(name="a"))
        await session.flush()
        put(session, b"2")
        await outer.rollback()
        with pytest.raises(NotWritten, match="behind its back"):
            await session.commit()
        await session.close()
        await outer.rollback()
    assert stage.things() == []
    assert stage.payloads() == []


@pytest.mark.parametrize("mode", ["rollback_only", "create_savepoint"])
async def test_a_savepoint_left_open_on_the_outer_connection(
    engine: AsyncEngine, stage: Stage, mode: Any
) -> None:
    """Its rollback after the session's commit would take the message and leave the change."""
    async with engine.connect() as outer:
        async with AsyncSession(outer, join_transaction_mode=mode) as session:
            session.add(Thing(name="a"))
            await session.flush()
            put(session, b"1")
            savepoint = await outer.begin_nested()
            with pytest.raises(NotWritten, match="end it first"):
                await session.commit()
            await savepoint.rollback()
            await session.commit()
        await outer.commit()
    assert stage.things() == ["a"]
    assert stage.payloads() == [b"1"]


async def test_several_sessions_on_one_connection(engine: AsyncEngine, stage: Stage) -> None:
    async with engine.connect() as outer, outer.begin():
        first, second = AsyncSession(outer), AsyncSession(outer)
        put(first, b"1", key="k")
        put(second, b"2", key="k")
        await put_now(outer, b"3", key="k")
        await first.commit()
        await second.commit()
        await first.close()
        await second.close()
    assert sorted(stage.payloads()[:2]) == [b"1", b"2"]
    assert stage.payloads()[2] == b"3"


# Several engines.


class Routed(Session):
    """Routes as applications do: an engine by the class that is mapped."""

    engines: tuple[Any, Any]

    def get_bind(self, mapper: Any = None, *, bind: Any = None, **rest: Any) -> Any:
        return bind or self.engines[1 if mapper is not None else 0]


@pytest.fixture
async def second(driver: str, stages: Stages) -> AsyncIterator[AsyncEngine]:
    engine = make_engine(stages[DRIVERS[driver]], driver)
    yield engine
    await engine.dispose()


async def test_several_binds_need_a_choice(
    engine: AsyncEngine, second: AsyncEngine, stage: Stage
) -> None:
    async with AsyncSession(engine, binds={Thing: second}) as session:
        with pytest.raises(SeveralBinds, match=r"Outbox\(bind=engine\)"):
            put(session, b"1")
        with pytest.raises(SeveralBinds):
            await put_now(session, b"1")
        chosen = Outbox(bind=second)
        session.add(Thing(name="a"))
        chosen.publish(session, b"2", type="t")
        await session.commit()
    async with AsyncSession(binds={Thing: engine}) as session:
        put(session, b"3")
        await session.commit()
    async with AsyncSession() as session:
        with pytest.raises(SeveralBinds, match="does not say which database"):
            put(session, b"4")
    assert stage.things() == ["a"]
    assert stage.payloads() == [b"2", b"3"]


async def test_a_second_engine_in_play_is_noticed(
    engine: AsyncEngine, second: AsyncEngine, stage: Stage
) -> None:
    class Both(Routed):
        engines = (engine.sync_engine, second.sync_engine)

    async with AsyncSession(sync_session_class=Both) as session:
        await session.get(Thing, "none")  # on the second engine
        with pytest.raises(SeveralBinds):
            put(session, b"1")
    async with AsyncSession(sync_session_class=Both) as session:
        put(session, b"2")
        with pytest.raises(SeveralBinds):
            await session.get(Thing, "none")
        await session.rollback()
        Outbox(bind=second).publish(session, b"3", type="t")
        session.add(Thing(name="a"))
        await session.commit()
    assert stage.things() == ["a"]
    assert stage.payloads() == [b"3"]


async def test_the_chosen_bind_is_found_under_its_other_names(
    engine: AsyncEngine, stage: Stage
) -> None:
    chosen = Outbox(bind=engine)
    with_options = engine.execution_options(logging_token="mine")
    async with engine.connect() as outer, outer.begin():
        for bind in (outer, with_options):
            async with AsyncSession(bind) as session:
                session.add(Thing(name="a"))
                chosen.publish(session, b"1", type="t")
                await chosen.publish_async(session, b"1", type="t")
                root = session.sync_session.get_transaction()
                assert len({entry[0] for entry in root._connections.values()}) == 1
                await session.rollback()
    assert stage.payloads() == []


# Two phases.


@pytest.fixture(params=["psycopg2", "psycopg", "pymysql"])
def sync_engine(request: pytest.FixtureRequest, stages: Stages) -> Any:
    stage = stages["mariadb" if request.param == "pymysql" else "postgresql"]
    engine = create_engine(sqlalchemy_url(stage.url, request.param), poolclass=NullPool)
    yield engine, stage
    engine.dispose()


def test_two_phases_on_a_session(sync_engine: Any) -> None:
    engine, stage = sync_engine
    with Session(engine, twophase=True) as session:
        for end in ("commit", "rollback"):
            session.add(Thing(name=end))
            outbox.publish(session, end.encode(), type="t")
            session.prepare()
            with pytest.raises(NotWritten, match="prepared"):
                outbox.publish(session, b"late", type="t")
            getattr(session, end)()
    assert stage.things() == ["commit"]
    assert stage.payloads() == [b"commit"]


@pytest.mark.parametrize("driver", ["psycopg", "asyncmy"], indirect=True)
async def test_two_phases_on_an_async_session(engine: AsyncEngine, stage: Stage) -> None:
    def prepare_and(end: str, sync: Session) -> None:
        sync.prepare()
        getattr(sync, end)()

    async with AsyncSession(engine, twophase=True) as session:
        for end in ("commit", "rollback"):
            session.add(Thing(name=end))
            put(session, end.encode())
            await session.run_sync(lambda sync, end=end: prepare_and(end, sync))
        put(session, b"without a word of prepare")
        await session.commit()
    assert stage.things() == ["commit"]
    assert stage.payloads() == [b"commit", b"without a word of prepare"]


@pytest.mark.parametrize("driver", ["psycopg", "asyncmy"], indirect=True)
@pytest.mark.parametrize("prepare", [False, True])
async def test_an_outer_commit_in_two_phases_is_refused(
    engine: AsyncEngine, stage: Stage, prepare: bool
) -> None:
    def end(transaction: Any) -> None:
        if prepare:
            transaction.prepare()
        transaction.commit()

    def outer(connection: Any, session: AsyncSession) -> None:
        transaction = connection.begin_twophase()
        connection.execute(text("INSERT INTO thing VALUES ('outer')"))
        put(session, b"1")
        with pytest.raises(NotWritten, match="1 queued message"):
            end(transaction)
        transaction.rollback()

    async with engine.connect() as connection, AsyncSession(connection) as session:
        await connection.run_sync(outer, session)
    assert stage.things() == []
    assert stage.payloads() == []
