"""Old messages are lifted to what the code of today handles; all that waits can be tried first."""

import asyncio
import dataclasses
import json
import uuid
from typing import Any

import pytest
from consuming import House, note

from helpers_messages import make_message
from postroom import Outbox, message, upcast
from postroom.errors import ConfigurationError
from postroom.inbox import handlers
from postroom.messages import Draft
from postroom.ops.readable import read_all
from postroom.retry import RetryPolicy


@pytest.fixture(autouse=True)
def _own_upcasters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "_upcasters", {})


@message("parcel.sent.v3", topic="orders", key_field="key")
@dataclasses.dataclass
class Sent:
    key: str
    weight_grams: int
    carrier: str


def lift() -> None:
    @upcast("parcel.sent.v1", to="parcel.sent.v2")
    def grams(content: Any) -> Any:
        return {"key": content["key"], "weight_grams": content["weight_kg"] * 1000}

    @upcast("parcel.sent.v2", to="parcel.sent.v3")
    def carried(content: Any) -> Any:
        return content | {"carrier": "post"}


def parcel(version: int, **content: Any) -> Any:
    body = json.dumps({"key": "k"} | content).encode()
    return make_message(body, key="k", type=f"parcel.sent.v{version}")


async def test_old_versions_come_as_the_newest(house: House) -> None:
    lift()
    consumer, seen = house.consumer(topics=None, chunk_rows=1), []

    @consumer.on(Sent)
    async def handle(event: Sent, tx: Any) -> None:
        seen.append(event)

    await house.send(
        parcel(1, weight_kg=2),
        parcel(2, weight_grams=5),
        parcel(3, weight_grams=7, carrier="bike"),
        parcel(1, weight_kilos=2),
        note("k", 1, type="parcel.sent.v0"),
    )
    done = await consumer.drain_once()
    assert seen == [Sent("k", 2000, "post"), Sent("k", 5, "post"), Sent("k", 7, "bike")]
    assert done.buried == 1
    (letter,) = house.letters()
    assert letter["error_code"] == "unreadable"
    assert "parcel.sent.v1 to parcel.sent.v2" in letter["error"]
    assert len(house.held()) == 2  # the one of an unknown type waits behind it


def test_circles_and_two_ways_are_refused() -> None:
    lift()
    with pytest.raises(ConfigurationError, match="already"):
        upcast("parcel.sent.v1", to="parcel.sent.v9")(lambda content: content)
    with pytest.raises(ConfigurationError, match="circle"):
        upcast("parcel.sent.v3", to="parcel.sent.v1")(lambda content: content)
    with pytest.raises(ConfigurationError, match="circle"):
        upcast("a", to="a")(lambda content: content)


async def test_what_waits_is_read_before_a_deployment(house: House) -> None:
    """Pending, delayed, dead, and held by the consumer itself."""
    import datetime as dt

    failing = house.consumer(retry=RetryPolicy((60.0,)))

    @failing.on("parcel.sent.v1")
    async def fail(event: Any, tx: Any) -> None:
        raise RuntimeError("not now")

    await house.send(*(parcel(1, weight_kg=n) for n in range(2)))
    await failing.drain_once()
    await _publish(
        house,
        Draft(payload={"key": "k", "weight_kg": 1}, type="parcel.sent.v1", topic="orders"),
        Draft(payload={"key": "k"}, type="parcel.sent.v3", topic="orders"),
        Draft(payload={}, type="stranger", topic="elsewhere"),
        Draft(
            payload={"key": "k", "weight_grams": 1},
            type="parcel.sent.v2",
            topic="orders",
            deliver_at=dt.datetime.now(dt.UTC) + dt.timedelta(hours=1),
        ),
    )
    new = house.consumer(topics=None)

    @new.on(Sent)
    async def handle(event: Sent, tx: Any) -> None: ...

    reading = await read_all(house.stage.url, [new])
    assert reading.read["pending"] == 3
    assert reading.read["delayed"] == 1
    assert reading.read["held by billing"] == 2
    # Without upcasters nothing of the old versions is handled here.
    assert reading.unreadable == 5
    assert reading.foreign == {"stranger": 1}
    lift()
    reading = await read_all(house.stage.url, [new])
    assert reading.unreadable == 1
    assert "lacks weight_grams" in reading.examples[0]["error"]


@message("price.v1", topic="orders")
@dataclasses.dataclass
class Price:
    amount: float

    def __post_init__(self) -> None:
        if self.amount < 0:
            raise LookupError("no such price")


async def test_content_that_cannot_be_made_is_buried_and_stops_nobody(house: House) -> None:
    """Neither the consumer, which goes on with the next, nor a look at what waits."""
    amounts = (b"1" + b"0" * 400, b"-1", b"5")
    odd = [
        make_message(b'{"amount": %b}' % amount, type="price.v1", topic="orders")
        for amount in amounts
    ]
    waiting = house.consumer(retry=RetryPolicy((60.0,)))

    @waiting.on("price.v1")
    async def fail(event: Any, tx: Any) -> None:
        raise RuntimeError("not now")

    await house.send(*odd)
    assert (await waiting.drain_once()).failed == 3
    consumer, seen = house.consumer("pricing"), list[float]()

    @consumer.on(Price)
    async def handle(event: Price, tx: Any) -> None:
        seen.append(event.amount)

    done = await consumer.drain_once()
    assert (done.handled, done.buried, seen) == (1, 2, [5.0])
    assert {letter["error_code"] for letter in house.letters()} == {"unreadable"}
    assert all(len(letter["history"]) == 1 for letter in house.letters())
    assert house.said("database.lost") == []
    new = house.consumer()
    new.on(Price)(handle)
    reading = await read_all(house.stage.url, [new])
    assert (reading.read["held by billing"], reading.read["dead"]) == (3, 2)
    assert reading.unreadable == 4  # those two, as both have them


@message("heavy.v1", topic="orders")
@dataclasses.dataclass
class Heavy:
    n: int

    def __post_init__(self) -> None:
        raise MemoryError


async def test_content_that_finds_no_memory_is_tried_again(house: House) -> None:
    """That may pass, unlike what does not fit; and it is no fault of the database."""
    consumer = house.consumer(retry=RetryPolicy((60.0,)))

    @consumer.on(Heavy)
    async def handle(event: Heavy, tx: Any) -> None:
        raise AssertionError

    await house.send(make_message(b'{"n": 1}', type="heavy.v1", topic="orders"))
    async with asyncio.timeout(30):
        done = await consumer.drain_once()
    assert (done.failed, done.buried, len(house.held())) == (1, 0, 1)
    assert house.said("database.lost") == []


async def _publish(house: House, *drafts: Draft) -> None:
    consumer = house.consumer(f"helper-{uuid.uuid4().hex[:6]}", topics=["helper"])

    @consumer.on("go")
    async def handle(event: Any, tx: Any) -> None:
        await Outbox().publish_many_async(tx, drafts)

    await house.send(note(None, 0, type="go", topic="helper"))
    assert (await consumer.drain_once()).handled == 1
