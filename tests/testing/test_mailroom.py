"""What `postroom.testing` tells of the outbox, on every kind of connection and every database."""

import asyncio
import datetime as dt
import uuid
from collections.abc import AsyncIterator
from functools import partial

import pytest

from doors import DOORS, Door, Open
from postroom import Outbox, Relay
from postroom.brokers.base import Permanent, Transient
from postroom.brokers.memory import MemoryBroker
from postroom.databases import migrate
from postroom.errors import ConfigurationError, Refused, WrongCall
from postroom.testing import (
    Clock,
    Mailroom,
    Posted,
    drain,
    drain_async,
    published,
    published_async,
)
from stages import Stage, Stages

outbox = Outbox()
one_door_a_kind = pytest.mark.parametrize(
    "door", {(d.kind, d.database): d for d in DOORS}.values(), ids=str
)


@pytest.fixture
def stage(door: Door, stages: Stages) -> Stage:
    return stages[door.database]


@pytest.fixture
async def opened(door: Door, stage: Stage) -> AsyncIterator[Open]:
    async with door.open(stage.url) as opened:
        yield opened


async def seen(opened: Open, type: str | None = None) -> list[Posted]:
    if opened.is_async:
        return await published_async(opened.tx, type)
    return await opened.call(published, opened.tx, type)


def soon(**how: float) -> dt.datetime:
    return dt.datetime.now(dt.UTC) + dt.timedelta(**how)


# ── On a transaction that is still open ────────────────────────────────────────────────────────


@one_door_a_kind
async def test_what_is_published_is_seen_before_the_commit(opened: Open, stage: Stage) -> None:
    later = soon(hours=1)
    first = await opened.publish(
        outbox,
        {"n": 1, "text": "größe"},
        type="a.v1",
        topic="t",
        key="k",
        headers={"trace": "x"},
        aggregate_type="thing",
        aggregate_id="7",
    )
    await opened.publish(outbox, b"\x00\xff", type="b.v1", content_type="image/x-raw")
    await opened.publish(outbox, 3, type="a.v1", deliver_at=later, expires_at=later)
    found = await seen(opened)
    assert [each.type for each in found] == ["a.v1", "b.v1", "a.v1"]
    assert found[0] == Posted(
        type="a.v1",
        topic="t",
        key="k",
        payload={"n": 1, "text": "größe"},
        headers={"trace": "x"},
        id=first.id,
        content_type="application/json",
        aggregate_type="thing",
        aggregate_id="7",
    )
    assert found[1].payload == b"\x00\xff"
    assert found[1].key is None
    assert found[2].deliver_at == found[2].expires_at == later
    assert [each.payload for each in await seen(opened, "b.v1")] == [b"\x00\xff"]
    assert stage.messages() == []
    await opened.rollback()
    assert await seen(opened) == []


@one_door_a_kind
async def test_what_a_savepoint_took_back_is_not_seen(opened: Open) -> None:
    await opened.publish(outbox, 1, type="a")
    savepoint = await opened.savepoint()
    await opened.publish(outbox, 2, type="a")
    assert [each.payload for each in await seen(opened)] == [1, 2]
    await savepoint.rollback()
    assert [each.payload for each in await seen(opened)] == [1]
    await opened.rollback()


@one_door_a_kind
async def test_an_open_transaction_is_drained_on_itself(opened: Open, stage: Stage) -> None:
    for n in range(3):
        await opened.publish(outbox, n, type="a", key="k")
    await opened.publish(outbox, 10, type="late", deliver_at=soon(hours=1))
    await opened.publish(outbox, 11, type="due", deliver_at=soon(hours=-1))
    await opened.publish(outbox, 12, type="expired", expires_at=soon(hours=-1))
    take = partial(opened.call, drain_async if opened.is_async else drain, opened.tx)
    assert [each.payload for each in await take()] == [0, 1, 2, 11]
    assert await take() == []
    clock = Clock(opened.tx)
    if opened.is_async:
        await clock.advance_async(3601)
    else:
        await opened.call(clock.advance, 3601)
    assert [each.payload for each in await take()] == [10]
    assert await seen(opened) == []
    await opened.rollback()
    assert stage.messages() == stage.messages("delayed") == []


@pytest.mark.parametrize(
    "door", [d for d in DOORS if "plain" in str(d) and "scoped" not in str(d)], ids=str
)
async def test_what_an_async_session_has_queued_is_seen(opened: Open, stage: Stage) -> None:
    outbox.publish(opened.tx, 1, type="a", key="k")
    await outbox.publish_async(opened.tx, 2, type="a", key="k")  # writes the queue first
    outbox.publish(opened.tx, 3, type="b", key="k", headers={"h": "v"}, deliver_at=soon(hours=1))
    found = await published_async(opened.tx)
    assert [each.payload for each in found] == [1, 2, 3]
    assert found[2].headers == {"h": "v"}
    assert found[2].deliver_at is not None
    assert [each.payload for each in await published_async(opened.tx, "b")] == [3]
    outbox.publish(opened.tx, 4, type="a", key="k")
    assert [each.payload for each in await drain_async(opened.tx)] == [1, 2, 4]
    await opened.rollback()
    assert await published_async(opened.tx) == []
    assert stage.messages() == []


@pytest.mark.parametrize(
    "door", [d for d in {x.kind: x for x in DOORS}.values() if "sync" in d.kind.lower()], ids=str
)
async def test_the_wrong_call_is_named(opened: Open) -> None:
    if not opened.is_async:
        pytest.fail("not an asynchronous kind")
    for call, right in ((published, "published_async"), (drain, "drain_async")):
        with pytest.raises(WrongCall, match=f"await {right}"):
            call(opened.tx)
    with pytest.raises(WrongCall, match=r"await clock\.advance_async"):
        Clock(opened.tx).advance(1)


# ── On the database ────────────────────────────────────────────────────────────────────────────


@pytest.fixture
async def url(database_url: str) -> str:
    await migrate.install(database_url)
    return database_url


async def put(url: str, *numbers: int, **wishes: object) -> None:
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

    from postroom.databases.urls import resolve

    target = resolve(url)
    engine = create_async_engine(target.url, connect_args=target.connect_args)
    async with AsyncSession(engine) as session:
        for n in numbers:
            outbox.publish(session, n, **{"type": "note", "topic": "t", "key": "k"} | wishes)  # type: ignore[arg-type]
        await session.commit()
    await engine.dispose()


def numbers(found: list[Posted]) -> list[int]:
    return [each.payload for each in found]


async def test_drain_really_delivers(url: str) -> None:
    await put(url, 1, 2, 3)
    assert numbers(await drain_async(url)) == [1, 2, 3]
    assert await drain_async(url) == []
    await put(url, 4)
    assert numbers(await asyncio.to_thread(drain, url)) == [4]
    assert numbers(drain(url)) == []  # inside a running loop too


async def test_a_back_off_passes_without_waiting(url: str) -> None:
    mailroom = Mailroom(lambda: url)
    mailroom.broker.fail(lambda m: m.payload == b"1", Transient("busy", "no"), times=3)
    await put(url, 1, 2)
    assert await mailroom.drain_async() == []
    for seconds in (5, 10):
        assert await mailroom.drain_async() == []
        await mailroom.clock.advance_async(seconds + 0.1)
        assert await mailroom.drain_async() == []
    await mailroom.clock.advance_async(10)  # of the 20 it waits now
    assert await mailroom.drain_async() == []
    await asyncio.to_thread(mailroom.clock.advance, 10.1)
    assert numbers(await mailroom.drain_async()) == [1, 2]


async def test_a_delayed_message_comes_when_its_time_has_come(url: str) -> None:
    clock = Clock(url)
    await put(url, 1, deliver_at=soon(hours=1))
    await put(url, 2, deliver_at=soon(hours=2), expires_at=soon(hours=3))
    assert await drain_async(url) == []
    await clock.advance_async(3601)
    assert numbers(await drain_async(url)) == [1]
    await clock.advance_async(7200)  # past its expiry
    assert await drain_async(url) == []
    with pytest.raises(ConfigurationError, match="only goes forward"):
        await clock.advance_async(-1)


async def test_the_lease_of_a_dead_relay_passes(url: str) -> None:
    await put(url, 1)
    dead = Relay(url, "memory://dead", listen=False, rebind=True)
    office = await dead._open()
    await office._store.take_lanes(office._control, range(16), 30)
    await office.close()  # as if killed: its lanes are not given back
    with pytest.raises(Refused, match=r"clock\.advance"):
        await drain_async(url)
    await Clock(url).advance_async(31)
    assert numbers(await drain_async(url)) == [1]


async def test_the_routes_of_the_applications_own_relay_stay_on_record(url: str) -> None:
    first = Relay(url, "memory://of-the-application", listen=False)
    await first.drain_once()
    await first.close()
    await put(url, 1)
    await drain_async(url)
    again = Relay(url, "memory://of-the-application", listen=False)
    await again.drain_once()  # else it would refuse to start
    await again.close()


async def test_a_refusal_is_a_dead_letter_and_what_arrived_is_told(url: str) -> None:
    broker = MemoryBroker(f"b{uuid.uuid4().hex[:8]}")
    broker.fail(lambda m: m.payload == b"2", Permanent("bad", "no such address"))
    await put(url, 1, 2, 3)
    assert numbers(await drain_async(url, broker, on_dead="continue")) == [1, 3]


def test_an_open_transaction_has_no_broker() -> None:
    with pytest.raises(Refused, match="without a relay"):
        drain(object(), MemoryBroker())
