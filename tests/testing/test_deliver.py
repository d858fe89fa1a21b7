"""Handlers are called on the test's own transaction, and leave nothing when they fail."""

from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from postroom import Consumer, Outbox, message
from postroom.errors import InvalidMessage, WrongCall
from postroom.testing import Mailroom, deliver
from stages import Stages

BILLS = "SELECT count(*) FROM bill"


@message("order.counted.v1", topic="counted", key_field="number")
@dataclass
class OrderCounted:
    """The message of these tests."""

    number: int


def billing() -> tuple[Consumer, list[Any]]:
    consumer, fails = Consumer("billing", "sqlite:///nowhere.db", "memory://", gives="session"), []

    @consumer.on(OrderCounted)
    def bill(order: OrderCounted, tx: Any, received: Any) -> None:
        assert (received.key, received.topic) == (str(order.number), "counted")
        run = tx.execute if hasattr(tx, "execute") else tx.cursor().execute
        insert = f"INSERT INTO bill VALUES ({order.number})"
        run(text(insert) if type(tx).__module__.startswith("sqlalchemy") else insert)
        if fails and fails.pop(0):
            raise OSError("not yet")

    return consumer, fails


@pytest.fixture(params=["postgresql", "mariadb", "sqlite"])
def url(request: pytest.FixtureRequest, stages: Stages) -> str:
    stage = stages[request.param]
    stage.query("DROP TABLE IF EXISTS bill")
    stage.query("CREATE TABLE bill (n INT)")
    driver = {"postgresql": "+psycopg", "mariadb": "+pymysql", "sqlite": ""}[request.param]
    scheme, rest = stage.url.split("://", 1)
    return f"{scheme}{driver}://{rest}"


def test_a_handler_that_fails_twice_leaves_one_row(url: str) -> None:
    consumer, fails = billing()
    mailroom = Mailroom(lambda: url)
    fails += [True, True]
    id = "018f0000-0000-7000-8000-000000000001"
    engine = create_engine(url)
    with Session(engine) as session, session.begin():
        for _ in range(2):
            with pytest.raises(OSError, match="not yet"):
                mailroom.deliver(consumer, OrderCounted(1), session, id=id)
        assert mailroom.deliver(consumer, OrderCounted(1), session, id=id)
        assert not mailroom.deliver(consumer, OrderCounted(1), session, id=id)
        assert session.execute(text(BILLS)).scalar_one() == 1
        session.rollback()
    with engine.connect() as connection:
        assert connection.execute(text(BILLS)).scalar_one() == 0
        raw = connection.connection.driver_connection
        if connection.dialect.name != "sqlite":  # its driver begins implicitly, and late
            fails += [True]
            with pytest.raises(OSError, match="not yet"):
                deliver(consumer, OrderCounted(2), raw)
            assert deliver(consumer, OrderCounted(2), raw)
            assert connection.execute(text(BILLS)).scalar_one() == 1
    engine.dispose()


def test_what_was_published_is_delivered_to_a_handler(url: str) -> None:
    consumer, _ = billing()
    mailroom = Mailroom(lambda: url)
    engine = create_engine(url)
    with Session(engine) as session:
        Outbox().publish(session, OrderCounted(5))
        session.flush()
        (posted,) = mailroom.drain(session)
        assert mailroom.deliver(consumer, posted, session)
        assert not mailroom.deliver(consumer, posted, session)
        assert session.execute(text(BILLS)).scalar_one() == 1
    engine.dispose()


async def test_an_async_handler(stages: Stages) -> None:
    stage = stages["postgresql"]
    stage.query("DROP TABLE IF EXISTS bill")
    stage.query("CREATE TABLE bill (n INT)")
    consumer = Consumer("billing", "sqlite:///nowhere.db", "memory://", gives="session")
    fails = [True]

    @consumer.on("noted")
    async def bill(event: Any, tx: Any) -> None:
        await tx.execute(text("INSERT INTO bill VALUES (1)"))
        if fails.pop():
            raise OSError("not yet")

    mailroom = Mailroom(lambda: stage.url)
    engine = create_async_engine(stage.url.replace("postgresql:", "postgresql+asyncpg:"))
    async with AsyncSession(engine) as session:
        with pytest.raises(OSError, match="not yet"):
            await mailroom.deliver_async(consumer, {"n": 1}, session, type="noted")
        fails.append(False)
        assert await mailroom.deliver_async(consumer, {"n": 1}, session, type="noted")
        assert (await session.execute(text(BILLS))).scalar_one() == 1
        with pytest.raises(WrongCall, match="deliver_async"):
            mailroom.deliver(consumer, {"n": 1}, session, type="noted")
    await engine.dispose()


def test_what_cannot_be_delivered_is_said(stages: Stages) -> None:
    consumer, _ = billing()
    connection = stages["postgresql"].connection  # autocommit
    with pytest.raises(InvalidMessage, match="billing has no handler for strange"):
        deliver(consumer, {}, connection, type="strange")
    with pytest.raises(WrongCall, match="session or connection of the test"):
        deliver(consumer, OrderCounted(1))
