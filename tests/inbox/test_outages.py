"""Database or broker gone: what is in hand is given back, nothing is lost, and it goes on."""

import asyncio
import uuid
from typing import Any

import pytest
from consuming import House, apply, make_house, note, notes
from prometheus_client import CollectorRegistry
from sqlalchemy import text

from helpers import eventually_async
from postroom import failpoints, signals
from postroom.errors import Unreachable
from postroom.inbox import store
from postroom.inbox.rules import LOST_TRIES
from postroom.ops.metrics import Metrics
from postroom.retry import RetryPolicy
from servers import MariaDBServer, PostgresServer
from stages import Stages


@pytest.mark.parametrize("kind", ["postgresql", "mariadb"])
async def test_the_database_is_killed_and_comes_back(
    kind: str, request: pytest.FixtureRequest, stages: Stages
) -> None:
    fixture = {"postgresql": "postgres", "mariadb": "mariadb"}[kind]
    server: PostgresServer | MariaDBServer = request.getfixturevalue(fixture)
    made = make_house(stages[kind])
    house = next(made)
    consumer, handled = house.consumer(chunk_rows=5), 0

    @consumer.on("note")
    async def handle(event: Any, tx: Any) -> None:
        nonlocal handled
        handled += 1
        await apply(tx, event)
        await asyncio.sleep(0.005)

    batch = notes(keys=8, each=40)
    async with consumer:
        await house.send(*batch[:160])
        await eventually_async(lambda: handled > 30)
        await asyncio.to_thread(server.kill)
        await eventually_async(lambda: house.said("database.lost"), 30)
        assert not consumer.health().ready
        assert consumer.health().healthy
        await house.send(*batch[160:])
        await asyncio.to_thread(server.start)
        house.stage.__dict__.pop("connection", None)
        await eventually_async(lambda: house.broker.unacknowledged("billing") == 0, 60)
    assert house.by_key() == {f"k{key}": list(range(40)) for key in range(8)}
    # An outage is nobody's failed attempt.
    assert (consumer.tally.failed, consumer.tally.buried) == (0, 0)
    next(made, None)


async def end_its_connection(house: House, tx: Any) -> None:
    """The server ends the connection that a handler works on."""
    kind = house.stage.database
    ask = "SELECT pg_backend_pid()" if kind == "postgresql" else "SELECT connection_id()"
    end = "SELECT pg_terminate_backend({})" if kind == "postgresql" else "KILL {}"
    number = (await tx.execute(text(ask))).scalar_one()
    house.stage.query(end.format(number))
    await tx.execute(text("SELECT 1"))


@pytest.mark.parametrize("house", ["postgresql", "mariadb"], indirect=True)
async def test_a_backend_that_is_ended_in_a_handler_costs_no_attempt(house: House) -> None:
    consumer, ended = house.consumer(), []

    @consumer.on("note")
    async def handle(event: Any, tx: Any) -> None:
        await apply(tx, event)
        if not ended:
            ended.append(True)
            await end_its_connection(house, tx)

    async with consumer:
        await house.send(note("k", 0), note("k", 1))
        await eventually_async(lambda: len(house.effects()) == 2)
    assert house.by_key() == {"k": [0, 1]}
    assert consumer.tally.failed == 0


@pytest.mark.parametrize("house", ["postgresql", "mariadb"], indirect=True)
async def test_a_database_that_is_lost_in_the_last_attempt_buries_nothing(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "LEASE_SECONDS", 0.2)
    consumer, runs = house.consumer(retry=RetryPolicy((0.01,), attempts=2), chunk_rows=1), 0

    @consumer.on("note")
    async def handle(event: Any, tx: Any) -> None:
        nonlocal runs
        await apply(tx, event)
        if event["n"] == 0:
            runs += 1
            if runs == 1:
                raise RuntimeError
            if runs < 2 + LOST_TRIES:
                await end_its_connection(house, tx)

    async with consumer:
        await house.send(note("k", 0), note("k", 1))
        await eventually_async(lambda: len(house.effects()) == 2, 30)
    assert house.by_key() == {"k": [0, 1]}
    assert (consumer.tally.failed, consumer.tally.buried) == (1, 0)


@pytest.mark.parametrize("house", ["postgresql", "mariadb"], indirect=True)
async def test_a_handler_that_always_ends_its_connection_is_found_out(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a message takes all others down with it, so it is not tried for ever."""
    monkeypatch.setattr(store, "LEASE_SECONDS", 0.2)
    consumer = house.consumer(retry=RetryPolicy((0.01,), attempts=2), chunk_rows=1)

    @consumer.on("note")
    async def handle(event: Any, tx: Any) -> None:
        await apply(tx, event)
        if event["key"] == "bad":
            await end_its_connection(house, tx)

    async with consumer:
        await house.send(note("bad", 0), *(note("good", n) for n in range(3)))
        await eventually_async(lambda: len(house.effects()) == 3 and house.letters(), 60)
    assert house.by_key() == {"good": [0, 1, 2]}
    assert [each["error_code"] for each in house.letters()] == ["worker_died"]


async def test_the_broker_is_down_and_comes_back(house: House) -> None:
    consumer = house.applying()
    async with consumer:
        await house.send(*notes(keys=2, each=5))
        await eventually_async(lambda: len(house.effects()) == 10)
        house.broker.down = True
        await eventually_async(lambda: house.said("consumer.broker_lost"))
        await eventually_async(lambda: not consumer.health().ready)
        house.broker.down = False
        await house.send(note("k0", 5))
        await eventually_async(lambda: len(house.effects()) == 11, 20)
        assert house.said("consumer.broker_back")
    assert house.by_key() == {"k0": list(range(6)), "k1": list(range(5))}


async def test_a_broker_that_cannot_be_subscribed_to_is_not_a_lost_database(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Database and broker are lost together, and the database is back first."""
    consumer, receive = house.applying(), house.broker.receive

    async def refuse(*_: Any, **__: Any) -> Any:
        raise Unreachable("cannot connect to the broker")

    metrics = Metrics(CollectorRegistry())
    stop = signals.listen(metrics)
    async with consumer:
        await house.send(note("k", 0))
        await eventually_async(lambda: house.effects() == [("k", 0)])
        monkeypatch.setattr(house.broker, "receive", refuse)
        failpoints.arm("sql.beat.before", lose)
        await eventually_async(lambda: house.said("database.lost"))
        failpoints.clear()
        await eventually_async(lambda: len(house.said("consumer.broker_lost")) > 1)
        assert house.said("database.back")
        assert consumer.health().unready == ("broker: cannot connect to the broker",)
        monkeypatch.setattr(house.broker, "receive", receive)
        await house.send(note("k", 1))
        await eventually_async(lambda: house.effects() == [("k", 0), ("k", 1)])
        assert len(house.said("consumer.broker_back")) == 1
        assert consumer.health().ready
    stop()
    assert [
        each["error"] for each in house.said("database.lost") if "broker" in each["error"]
    ] == []
    lost = metrics.of_consumers["consumer.broker_lost"].labels("billing")
    assert lost._value.get() == len(house.said("consumer.broker_lost"))


def lose() -> None:
    raise ConnectionResetError("the connection was ended")


async def test_a_yes_that_does_not_arrive_makes_duplicates_and_nothing_else(house: House) -> None:
    consumer, told = house.consumer(), asyncio.Event()

    @consumer.on("note")
    async def handle(event: Any, tx: Any) -> None:
        await apply(tx, event)
        house.broker.down = True
        told.set()

    async with consumer:
        await house.send(note("k", 0))
        await eventually_async(lambda: house.said("consumer.unacknowledged"))
        house.broker.down = False
        house.broker.rebalance("billing")
        await eventually_async(lambda: consumer.tally.duplicates == 1)
        house.broker.down = False
    assert house.effects() == [("k", 0)]


async def test_positions_are_never_used_to_drop(house: House) -> None:
    """A late committer and a redriven message come with lower positions than what went before."""
    batch = [note("k", n, position=position) for n, position in enumerate((7, 3, 9, 1))]
    for each in batch:
        await house.send(each)
        assert (await house.applying().drain_once()).handled == 1
    again = batch[1]._replace(redrives=1, id=str(uuid.uuid4()))
    await house.send(again)
    assert (await house.applying().drain_once()).handled == 1
    assert house.by_key() == {"k": [0, 1, 2, 3, 1]}
