"""A consumer applies each message once, with its own transaction, and in the order of its key."""

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec
import pydantic
import pytest
from consuming import APPLY, House, apply, note, notes
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

from helpers import eventually_async
from helpers_messages import make_message
from postroom import Consumer, Outbox, message
from postroom.errors import ConfigurationError
from postroom.inbox import Received
from postroom.retry import RetryPolicy

ONCE = RetryPolicy(attempts=1)


async def test_each_is_applied_once_in_order(house: House) -> None:
    batch = notes(keys=5, each=20)
    await house.send(*batch)
    consumer = house.applying()
    done = await consumer.drain_once()
    assert (done.handled, done.duplicates, done.failed, done.buried) == (100, 0, 0, 0)
    assert house.by_key() == {f"k{key}": list(range(20)) for key in range(5)}
    assert sorted(house.inbox()) == sorted(each.id for each in batch)
    assert house.broker.unacknowledged("billing") == 0


async def test_what_comes_again_is_skipped(house: House) -> None:
    batch = notes(keys=2, each=3)
    await house.send(*batch)
    await house.applying().drain_once()
    await house.send(*batch, note("k0", 3), batch[0])
    done = await house.applying().drain_once()
    assert (done.handled, done.duplicates) == (1, 7)
    assert house.by_key() == {"k0": [0, 1, 2, 3], "k1": [0, 1, 2]}
    assert sum(said["count"] for said in house.said("delivery.duplicate")) == 7


async def test_consumers_of_other_names_have_their_own(house: House) -> None:
    await house.send(*notes(keys=1, each=3))
    for name in ("billing", "shipping"):
        done = await house.applying(name).drain_once()
        assert done.handled == 3
    assert house.effects("billing") == house.effects("shipping")


@pytest.mark.parametrize("chunk_rows", [1, 3, 200])
async def test_many_share_a_transaction_or_none_do(house: House, chunk_rows: int) -> None:
    await house.send(*notes(keys=3, each=5))
    done = await house.applying(chunk_rows=chunk_rows).drain_once()
    assert done.handled == 15
    assert house.by_key() == {f"k{key}": list(range(5)) for key in range(3)}


async def test_workers_share_the_keys_but_on_sqlite_which_has_one_writer(house: House) -> None:
    consumer, transactions = house.consumer(concurrency=4), list[Any]()

    @consumer.on("note")
    async def handle(event: Any, tx: Any) -> None:
        if tx not in transactions:
            transactions.append(tx)

    await house.send(*notes(keys=40, each=1))
    assert (await consumer.drain_once()).handled == 40
    assert (len(transactions) == 1) == (house.stage.database == "sqlite")


async def test_two_copies_at_once_run_the_handler_once(house: House) -> None:
    """Two processes that were given the same message, as after a rebalance nobody noticed."""
    runs = 0
    same = note(None, 1, topic="first"), note(None, 1, topic="second")
    same = same[0], same[1]._replace(id=same[0].id)
    await house.send(*same)
    entered = asyncio.Event()

    def make(topic: str) -> Consumer:
        consumer = house.consumer(topics=[topic])

        @consumer.on("note")
        async def handle(event: Any, tx: Any) -> None:
            nonlocal runs
            runs += 1
            await apply(tx, event)
            entered.set()
            await asyncio.sleep(0.2)

        return consumer

    done = await asyncio.gather(make("first").drain_once(), make("second").drain_once())
    assert runs == 1
    assert sorted((each.handled, each.duplicates) for each in done) == [(0, 1), (1, 0)]
    assert house.effects() == [(None, 1)]


async def test_nothing_is_acknowledged_before_its_commit(house: House) -> None:
    consumer, left = house.consumer(concurrency=1), []

    @consumer.on("note")
    async def handle(event: Any, tx: Any) -> None:
        await asyncio.sleep(0.02)  # whoever acknowledges may do so
        left.append(house.broker.unacknowledged("billing"))

    await house.send(*notes(keys=2, each=5))
    await consumer.drain_once()
    assert left == [10] * 10
    assert house.broker.unacknowledged("billing") == 0


async def test_a_failure_takes_the_inboxs_row_along(house: House) -> None:
    """A consumer that is torn out of a handler leaves neither effect nor memory of it."""
    consumer, entered = house.consumer(chunk_rows=1), asyncio.Event()

    @consumer.on("note")
    async def handle(event: Any, tx: Any) -> None:
        await apply(tx, event)
        entered.set()
        await asyncio.sleep(60)

    await house.send(note("k", 0))
    work = asyncio.create_task(consumer.drain_once())
    await entered.wait()
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    assert house.effects() == []
    assert house.inbox() == []
    assert (await house.applying().drain_once()).handled == 1


async def test_a_handler_that_was_cancelled_inside_has_failed(house: House) -> None:
    """It awaited something that was cancelled; that is no reason for the consumer to end."""
    consumer = house.consumer(retry=ONCE)

    @consumer.on("note")
    async def handle(event: Any, tx: Any) -> None:
        raise asyncio.CancelledError

    await house.send(note("k", 0))
    assert (await consumer.drain_once()).buried == 1
    assert house.letters()[0]["error_code"] == "CancelledError"


async def test_new_messages_commit_with_the_effect(house: House) -> None:
    outbox = Outbox()
    consumer = house.consumer(retry=ONCE)

    @consumer.on("note")
    async def handle(event: Any, tx: AsyncSession) -> None:
        await apply(tx, event)
        outbox.publish(tx, {"billed": event["n"]}, type="billed", topic="bills")
        if event["n"] == 2:
            raise RuntimeError("after publishing")

    await house.send(*(note(None, n) for n in range(4)))
    done = await consumer.drain_once()
    assert (done.handled, done.buried) == (3, 1)
    assert sorted(house.stage.payloads()) == [b'{"billed":%d}' % n for n in (0, 1, 3)]
    assert sorted(n for _, n in house.effects()) == [0, 1, 3]


# ── what a handler is given ────────────────────────────────────────────────────────────────────


async def test_a_core_connection(house: House) -> None:
    consumer, given = house.consumer(gives="connection"), []

    @consumer.on("note")
    async def handle(event: Any, tx: AsyncConnection) -> None:
        given.append(isinstance(tx, AsyncConnection))
        await apply(tx, event)
        await Outbox().publish_async(tx, {"n": event["n"]}, type="billed")

    await house.send(*notes(keys=2, each=2))
    assert (await consumer.drain_once()).handled == 4
    assert given == [True] * 4
    assert len(house.effects()) == len(house.stage.payloads()) == 4


async def test_the_drivers_own_connection(house: House) -> None:
    consumer = house.consumer(gives="driver")

    @consumer.on("note")
    async def handle(event: Any, tx: Any) -> None:
        await Outbox().publish_async(tx, {"n": event["n"]}, type="billed")

    await house.send(*notes(keys=2, each=2))
    assert (await consumer.drain_once()).handled == 4
    assert len(house.stage.payloads()) == 4


@pytest.mark.parametrize("gives", ["session", "connection", "driver"])
async def test_a_sync_handler_runs_in_a_thread(house: House, gives: Any) -> None:
    import threading

    consumer, threads = house.consumer(gives=gives), set()
    outbox = Outbox()

    @consumer.on("note")
    def handle(event: Any, tx: Any) -> None:
        threads.add(threading.current_thread() is threading.main_thread())
        if gives != "driver":
            assert gives == "connection" or isinstance(tx, Session)
            tx.execute(APPLY, {"who": "billing", "k": event["key"], "n": event["n"]})
        outbox.publish(tx, {"n": event["n"]}, type="billed")

    await house.send(*notes(keys=2, each=3))
    assert (await consumer.drain_once()).handled == 6
    assert threads == {False}
    assert len(house.stage.payloads()) == 6
    if gives != "driver":
        assert house.by_key() == {"k0": [0, 1, 2], "k1": [0, 1, 2]}


async def test_sync_and_async_handlers_in_one_consumer(house: House) -> None:
    consumer = house.consumer()

    @consumer.on("note")
    async def awaited(event: Any, tx: Any) -> None:
        await apply(tx, event)

    @consumer.on("memo")
    def plain(event: Any, tx: Any) -> None:
        tx.execute(APPLY, {"who": "billing", "k": event["key"], "n": event["n"]})

    batch = [note("k", n, type="note" if n % 2 else "memo") for n in range(10)]
    await house.send(*batch)
    assert (await consumer.drain_once()).handled == 10
    assert house.by_key() == {"k": list(range(10))}


@pytest.mark.parametrize("gives", ["session", "connection"])
async def test_a_handler_does_not_commit(house: House, gives: Any) -> None:
    """Else the rows of others in the same transaction would be remembered as handled."""
    consumer = house.consumer(gives=gives, retry=ONCE)

    @consumer.on("note")
    async def handle(event: Any, tx: Any) -> None:
        await apply(tx, event)
        if event["n"] == 1:
            await tx.commit()
        if event["n"] == 2:
            raise RuntimeError("after the commit of another")

    await house.send(*(note("k", n) for n in range(2)), note("other", 2))
    await consumer.drain_once()
    kept = [0, 1] if gives == "session" else [0]
    assert house.by_key() == {"k": kept}
    assert ("WrongCall" in {each["error_code"] for each in house.letters()}) == (
        gives == "connection"
    )


@pytest.mark.parametrize("gives", ["session", "connection"])
async def test_a_handler_that_rolls_back_has_failed(house: House, gives: Any) -> None:
    consumer = house.consumer(gives=gives, retry=ONCE)

    @consumer.on("note")
    async def handle(event: Any, tx: Any) -> None:
        await apply(tx, event)
        if event["n"] == 1:
            await tx.rollback()

    await house.send(*(note(None, n) for n in range(3)))
    done = await consumer.drain_once()
    assert (done.handled, done.buried) == (2, 1)
    assert sorted(n for _, n in house.effects()) == [0, 2]
    assert house.letters()[0]["error_code"] == "WrongCall"


async def test_a_savepoint_is_the_handlers_own(house: House) -> None:
    consumer = house.consumer()

    @consumer.on("note")
    async def handle(event: Any, tx: AsyncSession) -> None:
        await apply(tx, event)
        with contextlib.suppress(RuntimeError):
            async with tx.begin_nested():
                await apply(tx, event | {"n": 99})
                raise RuntimeError

    await house.send(*notes(keys=1, each=3))
    assert (await consumer.drain_once()).handled == 3
    assert house.by_key() == {"k0": [0, 1, 2]}


async def test_what_is_known_besides_the_content(house: House) -> None:
    consumer, seen = house.consumer(), list[Received]()

    @consumer.on("note")
    async def handle(event: Any, tx: Any, received: Received) -> None:
        seen.append(received)

    sent = note("k", 1, headers={"traceparent": "00-1"})
    await house.send(sent)
    await consumer.drain_once()
    (received,) = seen
    assert (received.id, received.topic, received.key, received.attempt) == (
        sent.id,
        "orders",
        "k",
        1,
    )
    assert received.headers["traceparent"] == "00-1"


# ── typed content ──────────────────────────────────────────────────────────────────────────────


@message("typed.dataclass", topic="orders", key_field="key")
@dataclasses.dataclass
class Plain:
    key: str
    n: int


@message("typed.pydantic", topic="orders", key_field="key")
class Model(pydantic.BaseModel):
    key: str
    n: int


@message("typed.msgspec", topic="orders", key_field="key")
class Struct(msgspec.Struct):
    key: str
    n: int


async def test_declared_types_are_decoded_and_name_their_topics(house: House) -> None:
    consumer, seen = house.consumer(topics=None), []
    for cls in (Plain, Model, Struct):

        @consumer.on(cls)
        async def handle(event: Any, tx: Any) -> None:
            seen.append(event)

    assert consumer.topics == ("orders",)
    await house.send(
        *(note("k", n, type=f"typed.{kind}") for n, kind in enumerate(
            ("dataclass", "pydantic", "msgspec")
        ))
    )  # fmt: skip
    await consumer.drain_once()
    assert seen == [Plain("k", 0), Model(key="k", n=1), Struct("k", 2)]


async def test_content_that_is_no_json_is_bytes(house: House) -> None:
    consumer, seen = house.consumer(), []

    @consumer.on("picture")
    async def handle(event: Any, tx: Any) -> None:
        seen.append(event)

    await house.send(make_message(b"\x89PNG", type="picture", content_type="image/png"))
    await consumer.drain_once()
    assert seen == [b"\x89PNG"]


async def test_content_that_does_not_fit_is_buried_at_once(house: House) -> None:
    consumer = house.consumer(topics=None)

    @consumer.on(Plain)
    async def handle(event: Any, tx: Any) -> None:
        raise AssertionError("it must not come here")

    secret = b'{"key": "k", "n": "canary"}'
    await house.send(
        make_message(secret, type="typed.dataclass"),
        make_message(b'{"key": ', type="typed.dataclass"),
    )
    assert (await consumer.drain_once()).buried == 2
    for letter in house.letters():
        assert letter["error_code"] == "unreadable"
        assert "canary" not in letter["error"]


# ── running ────────────────────────────────────────────────────────────────────────────────────


async def test_it_runs_inside_an_application(house: House) -> None:
    consumer = house.applying()
    async with consumer:
        await house.send(*notes(keys=2, each=2))
        await eventually_async(lambda: len(house.effects()) == 4)
        health = consumer.health()
        assert health.ready, health
        rows = house.stage.query("SELECT kind, report FROM {p}worker")
        assert rows[0][0] == "consumer"
        assert '"consumer": "billing"' in rows[0][1]
    assert not consumer.health().healthy
    assert house.broker.unacknowledged("billing") == 0
    assert house.stage.query("SELECT 1 FROM {p}worker") == []


async def test_a_clean_stop_finishes_what_is_under_way_and_gives_back_the_rest(
    house: House,
) -> None:
    consumer, entered = house.consumer(concurrency=1, chunk_rows=1), asyncio.Event()
    go_on = asyncio.Event()

    @consumer.on("note")
    async def handle(event: Any, tx: Any) -> None:
        await apply(tx, event)
        entered.set()
        await go_on.wait()

    await house.send(*notes(keys=1, each=10))
    async with consumer:
        await entered.wait()
        consumer.stop()
        asyncio.get_running_loop().call_later(0.1, go_on.set)
    assert house.by_key() == {"k0": [0]}
    assert house.broker.unacknowledged("billing") == 9
    assert (await house.applying().drain_once()).duplicates == 0
    assert house.by_key() == {"k0": list(range(10))}


async def test_what_is_in_hand_is_bounded(house: House) -> None:
    consumer, most = house.consumer(concurrency=1, chunk_rows=2, in_hand_rows=5), 0

    @consumer.on("note")
    async def handle(event: Any, tx: Any) -> None:
        nonlocal most
        most = max(most, consumer.report()["in_hand"])

    await house.send(*notes(keys=3, each=20))
    assert (await consumer.drain_once()).handled == 60
    assert 0 < most <= 5


def test_what_cannot_work_is_said_at_once(house: House) -> None:
    url = house.stage.url
    with pytest.raises(ConfigurationError, match="not received from"):
        Consumer("billing", url, "stdout://")
    with pytest.raises(ConfigurationError, match="name"):
        Consumer("", url, "memory://")
    with pytest.raises(ConfigurationError, match="gives"):
        Consumer("billing", url, "memory://", gives="cursor")  # type: ignore[arg-type]
    consumer = Consumer("billing", url, "memory://", topics=["orders"])
    consumer.on("note")(lambda event, tx: None)
    with pytest.raises(ConfigurationError, match="handler already"):
        consumer.on("note")(lambda event, tx: None)
    with pytest.raises(ConfigurationError, match="must take"):
        consumer.on("other")(lambda event: None)
    with pytest.raises(ConfigurationError, match="no message type"):
        consumer.on(int)


async def test_without_topics_or_handlers_it_does_not_start(house: House) -> None:
    consumer = Consumer("billing", house.stage.url, "memory://", gives="session")
    with pytest.raises(ConfigurationError, match="no handlers"):
        await consumer.run()
    consumer.on("note")(lambda event, tx: None)
    with pytest.raises(ConfigurationError, match="no topics"):
        await consumer.run()


_ = (Callable, text)


async def test_tables_may_change_under_a_running_consumer(house: House) -> None:
    consumer = house.consumer(concurrency=1)

    @consumer.on("note")
    async def handle(event: Any, tx: Any) -> None:
        (await tx.execute(text("SELECT * FROM effect"))).all()
        await apply(tx, event)

    async with consumer:
        await house.send(note("a", 0))
        await eventually_async(lambda: consumer.tally.handled == 1)
        house.stage.query("ALTER TABLE effect ADD COLUMN more INTEGER")
        await house.send(note("a", 1))
        await eventually_async(lambda: consumer.tally.handled == 2)
    assert (consumer.tally.failed, house.effects()) == (0, [("a", 0), ("a", 1)])


@pytest.mark.parametrize("house", ["postgresql"], indirect=True)
async def test_postgres_prepares_a_statement_once_for_many_messages(house: House) -> None:
    consumer, uses = house.consumer(concurrency=1), 0

    @consumer.on("note")
    async def handle(event: Any, tx: Any) -> None:
        nonlocal uses
        await apply(tx, event)
        rows = await tx.execute(
            text(
                "SELECT max(generic_plans + custom_plans) FROM pg_prepared_statements"
                " WHERE statement LIKE 'INSERT INTO effect%'"
            )
        )
        uses = rows.scalar_one()

    await house.send(*notes(keys=2, each=5))
    await consumer.drain_once()
    assert (consumer.tally.handled, uses) == (10, 10)
