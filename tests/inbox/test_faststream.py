"""FastStream's handlers behind the inbox: once, in a transaction they are given."""

import asyncio
import uuid
from types import SimpleNamespace
from typing import Annotated, Any

import pytest
from consuming import House, apply
from faststream import Context
from faststream.nats import NatsBroker
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from doors import sqlalchemy_url
from helpers import eventually_async
from postroom.inbox.faststream import Inbox, _id_of
from servers import NatsServer

DRIVERS = {"postgresql": "asyncpg", "mariadb": "asyncmy", "sqlite": "aiosqlite"}


def remembered_as(handler: Any) -> str:
    function = handler._original_call
    return f"billing:{function.__module__}.{function.__qualname__}"


async def test_a_copy_is_not_handed_on_and_a_failure_leaves_nothing(
    house: House, nats_server: NatsServer
) -> None:
    engine = create_async_engine(sqlalchemy_url(house.stage.url, DRIVERS[house.stage.database]))
    broker = NatsBroker(nats_server.url, middlewares=[Inbox("billing", engine)])
    subject, runs = f"orders-{uuid.uuid4().hex}", list[int]()

    @broker.subscriber(subject)
    async def bill(event: dict[str, Any], tx: Annotated[AsyncSession, Context()]) -> None:
        runs.append(event["n"])
        await apply(tx, event)
        if event["n"] == 1 and runs.count(1) == 1:
            raise RuntimeError("the first time")

    ids = [str(uuid.uuid4()) for _ in range(3)]
    async with broker:
        await broker.start()
        for n in (0, 1, 0, 1, 1, 2):
            headers = {"event_id": ids[n]}
            await broker.publish({"key": None, "n": n}, subject, headers=headers)
            await asyncio.sleep(0.05)
        await eventually_async(lambda: len(house.effects()) == 3)
    await engine.dispose()
    assert runs == [0, 1, 1, 2]
    assert sorted(house.inbox(remembered_as(bill))) == sorted(ids)
    assert sorted(n for _, n in house.effects()) == [0, 1, 2]


@pytest.mark.parametrize("headers", [{}, {"other": "1"}])
async def test_a_message_needs_an_id(
    house: House, nats_server: NatsServer, headers: dict[str, str]
) -> None:
    engine = create_async_engine(sqlalchemy_url(house.stage.url, DRIVERS[house.stage.database]))
    broker = NatsBroker(nats_server.url, middlewares=[Inbox("billing", engine)])
    subject, runs = f"orders-{uuid.uuid4().hex}", list[int]()

    @broker.subscriber(subject)
    async def bill(event: dict[str, Any]) -> None:
        runs.append(1)

    async with broker:
        await broker.start()
        await broker.publish({"n": 1}, subject, headers=headers)
        await asyncio.sleep(0.2)
    await engine.dispose()
    assert runs == []


@pytest.mark.parametrize("per_handler", [True, False])
async def test_two_subscribers_of_one_subject(
    house: House, nats_server: NatsServer, per_handler: bool
) -> None:
    """Each handles it, unless it was said that one of them is enough."""
    engine = create_async_engine(sqlalchemy_url(house.stage.url, DRIVERS[house.stage.database]))
    inbox = Inbox("billing", engine, per_handler=per_handler)
    broker = NatsBroker(nats_server.url, middlewares=[inbox])
    subject, runs = f"orders-{uuid.uuid4().hex}", list[str]()

    @broker.subscriber(subject)
    async def bill(event: dict[str, Any], tx: Annotated[AsyncSession, Context()]) -> None:
        runs.append("bill")

    @broker.subscriber(subject, queue="others")
    async def mail(event: dict[str, Any], tx: Annotated[AsyncSession, Context()]) -> None:
        runs.append("mail")

    @broker.subscriber(f"{subject}.end")
    async def end(event: dict[str, Any]) -> None:
        runs.append("end")

    async with broker:
        await broker.start()
        for _ in range(2):
            await broker.publish({"n": 1}, subject, headers={"event_id": "one"})
        remembered = [remembered_as(bill), remembered_as(mail)] if per_handler else ["billing"]
        for who in remembered:
            await eventually_async(lambda who=who: house.inbox(who) == ["one"])
        await broker.publish({"n": 1}, f"{subject}.end", headers={"event_id": "two"})
        await eventually_async(lambda: "end" in runs)
    await engine.dispose()
    both = ["bill", "end", "mail"]
    assert sorted(runs) == both if per_handler else len(runs) == 2


@pytest.mark.parametrize("name", ["ce-id", "ce_id", "cloudEvents_id", "cloudEvents:id", "CE-ID"])
def test_an_id_of_any_binding(name: str) -> None:
    assert _id_of(SimpleNamespace(headers={name: "one", "event_id": "other"})) == "one"
