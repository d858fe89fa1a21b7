"""A process that wakes up late applies nothing: its seat is another's by then."""

import asyncio
from typing import Any

import pytest
from consuming import House, apply, note, notes

from helpers import eventually_async
from postroom import Consumer
from postroom.brokers.receiving import Delivery
from postroom.inbox import seats
from postroom.inbox.rules import letter_of
from postroom.inbox.store import Seat
from postroom.retry import RetryPolicy


def slow(house: House, go_on: asyncio.Event, entered: asyncio.Event, **how: Any) -> Consumer:
    """A consumer that stands still before it applies its first message."""
    consumer = house.consumer(chunk_rows=1, concurrency=1, **how)

    @consumer.on("note")
    async def handle(event: Any, tx: Any) -> None:
        entered.set()
        await go_on.wait()
        await apply(tx, event)

    return consumer


@pytest.mark.parametrize("house", ["postgresql", "mariadb"], indirect=True)
async def test_what_a_sleeper_has_in_memory_is_void(house: House) -> None:
    """It has 0 to 9 in memory and is at 0; another is given all of them and handles them."""
    go_on, entered = asyncio.Event(), asyncio.Event()
    sleeper = slow(house, go_on, entered, in_hand_rows=10)  # it asks for no more
    await house.send(*(note("k", n) for n in range(10)))
    async with sleeper:
        await entered.wait()
        house.broker.rebalance("billing")
        waker = house.applying()
        async with waker:
            # It waits for the transaction under way, and then has the seat.
            await asyncio.sleep(0.3)
            assert house.effects() == []
            go_on.set()
            await eventually_async(lambda: len(house.effects()) == 10)
        await eventually_async(lambda: house.said("seat.lost"))
    assert house.by_key() == {"k": list(range(10))}
    assert waker.tally.handled == 9
    assert sleeper.tally.handled == 1
    assert house.broker.unacknowledged("billing") == 0


async def test_what_came_under_an_older_epoch_is_void(house: House) -> None:
    """Even if this very process has taken the seat anew since: the broker begins again then."""
    consumer = house.applying(chunk_rows=1)
    async with consumer:
        await house.send(note("k", 0))
        await eventually_async(lambda: len(house.effects()) == 1)
        made = consumer._tray
        assert made is not None
        (old,) = [Seat(source, sitting.epoch) for source, sitting in made._seats._sittings.items()]
        letter = letter_of(
            Delivery("x", "note", "orders", "k", "application/json", {}, b"", old.source, 1, 0, 0),
            old.epoch,
        )
        await made._control.transact(made.store.take_seat(old.source))
        opened = await made._control.transact(made.store.open([letter], [old]))
        assert opened.lost == {old}
        assert opened.fresh == []
    assert len(house.inbox()) == 1


@pytest.mark.parametrize("house", ["postgresql", "mariadb"], indirect=True)
async def test_a_frozen_transaction_does_not_keep_the_others_waiting_for_ever(
    house: House,
) -> None:
    """The server ends it; its handler's effect is gone, and the message is another's."""
    go_on, entered = asyncio.Event(), asyncio.Event()
    sleeper = slow(house, go_on, entered, stuck_seconds=1, in_hand_rows=3)
    await house.send(*(note("k", n) for n in range(3)))
    async with sleeper:
        await entered.wait()
        house.broker.rebalance("billing")
        async with house.applying():
            await eventually_async(lambda: len(house.effects()) == 3, 20)
            go_on.set()
    assert house.by_key() == {"k": [0, 1, 2]}


async def test_two_processes_take_over_from_each_other_again_and_again(house: House) -> None:
    """Every rebalance hands all of it to whoever asks first; effects come once and in order."""
    await house.send(*notes(keys=5, each=40))
    many = {"chunk_rows": 3, "in_hand_rows": 20}
    async with house.applying(**many), house.applying(**many):
        for _ in range(30):
            await asyncio.sleep(0.02)
            house.broker.rebalance("billing")
        await eventually_async(lambda: house.broker.unacknowledged("billing") == 0, 30)
        # What is acknowledged may still be held for a later try: it must come, and come once.
        await eventually_async(lambda: len(house.effects()) >= 200, 30)
    assert house.by_key() == {f"k{key}": list(range(40)) for key in range(5)}


async def test_a_seat_that_was_stolen_is_asked_for_anew(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody who took the seat late and died since: the broker thinks it is still ours."""
    monkeypatch.setattr(seats, "RECLAIM_SECONDS", 0.05)
    async with house.applying():
        await house.send(note("k", 0))
        await eventually_async(lambda: len(house.effects()) == 1)
        house.stage.query("UPDATE {p}seat SET owner = 'ghost', epoch = epoch + 1")
        await house.send(*(note("k", n) for n in range(1, 5)))
        await eventually_async(lambda: len(house.effects()) == 5)
    assert house.by_key() == {"k": list(range(5))}


@pytest.mark.parametrize("house", ["postgresql", "mariadb"], indirect=True)
async def test_a_failing_message_of_a_lost_seat_is_not_kept(house: House) -> None:
    go_on, entered = asyncio.Event(), asyncio.Event()
    sleeper = house.consumer(
        chunk_rows=1, concurrency=1, in_hand_rows=1, retry=RetryPolicy((60.0,))
    )

    @sleeper.on("note")
    async def handle(event: Any, tx: Any) -> None:
        entered.set()
        await go_on.wait()
        raise RuntimeError("too late")

    await house.send(note("k", 0))
    async with sleeper:
        await entered.wait()
        house.broker.rebalance("billing")
        async with house.applying() as waker:
            await asyncio.sleep(0.2)
            go_on.set()
            await eventually_async(lambda: house.effects() or house.held())
    # Whichever came first: it is applied once, or kept once.
    assert len(house.effects()) + len(house.held()) == 1
    assert waker.tally.handled + sleeper.tally.failed == 1
