"""Handlers that fail: rolled back, kept in the order of their key, tried again, and buried."""

import asyncio
import hashlib
from collections import Counter
from typing import Any

import pytest
from consuming import QUICK_RETRY, House, apply, note, notes

from helpers import eventually_async
from postroom import Consumer, Rejected
from postroom.brokers.receiving import delivery
from postroom.inbox.rules import DROPPED, LOST_TRIES, letter_of
from postroom.retry import RetryPolicy

SLOW_RETRY = RetryPolicy((60.0,), attempts=3)


def failing(
    house: House, bad: dict[tuple[str | None, int], int], name: str = "billing", **how: Any
) -> Consumer:
    """A consumer whose handler fails so many times for these messages."""
    consumer, left = house.consumer(name, **how), Counter(bad)

    @consumer.on("note")
    async def handle(event: Any, tx: Any) -> None:
        await apply(tx, event, name)
        which = (event["key"], event["n"])
        if left[which] > 0:
            left[which] -= 1
            raise RuntimeError(f"not now: {which}")

    return consumer


async def test_only_the_one_that_fails_fails(house: House) -> None:
    await house.send(*notes(keys=4, each=5))
    consumer = failing(house, {("k1", 2): 99}, retry=SLOW_RETRY)
    done = await consumer.drain_once()
    assert (done.handled, done.failed, done.buried) == (17, 1, 0)
    assert house.by_key() == {f"k{key}": list(range(5)) for key in (0, 2, 3)} | {"k1": [0, 1]}
    assert house.broker.unacknowledged("billing") == 0
    head, *behind = house.held()
    assert (head["attempts"], head["error_code"], head["armed"]) == (1, "RuntimeError", True)
    assert [(each["attempts"], each["armed"]) for each in behind] == [(0, False), (0, False)]
    (said,) = house.said("delivery.failed")
    assert (said["key"], said["attempts"], said["delay_seconds"]) == ("k1", 1, 60)


async def test_it_is_tried_again_and_the_rest_of_its_key_follows(house: House) -> None:
    await house.send(*notes(keys=3, each=6))
    consumer = failing(house, {("k0", 1): 2, ("k0", 3): 1, ("k2", 0): 1}, chunk_rows=1)
    async with consumer:
        await eventually_async(lambda: len(house.effects()) == 18)
        await house.send(note("k0", 6))
        await eventually_async(lambda: len(house.effects()) == 19)
        await eventually_async(lambda: not house.held())
    assert house.by_key() == {
        "k0": list(range(7)),
        "k1": list(range(6)),
        "k2": list(range(6)),
    }
    assert consumer.tally.failed >= 3  # behind a head that went through it is not counted at once
    assert len(house.inbox()) == 19


async def test_what_comes_later_waits_behind_it_across_restarts_and_processes(
    house: House,
) -> None:
    await house.send(*notes(keys=2, each=2))
    await failing(house, {("k0", 0): 9}, retry=SLOW_RETRY).drain_once()
    await house.send(note("k0", 2), note("k1", 2))
    await failing(house, {}, retry=SLOW_RETRY).drain_once()
    assert house.by_key() == {"k1": [0, 1, 2]}
    assert [each["armed"] for each in house.held()] == [True, False, False]
    house.stage.query("UPDATE {p}inbox_held SET next_attempt_at = held_at WHERE attempts > 0")
    done = await failing(house, {}).drain_once()
    assert done.handled == 3
    assert house.by_key()["k0"] == [0, 1, 2]
    assert house.held() == []


async def test_attempts_are_spent_and_it_is_buried_with_its_history(house: House) -> None:
    sent = note("k", 0)
    await house.send(sent, note("k", 1), note("other", 0))
    consumer = failing(house, {("k", 0): 99})
    async with consumer:
        await eventually_async(lambda: house.letters())
    (letter,) = house.letters()
    assert (letter["id"], letter["source"], letter["state"]) == (
        sent.id,
        "consumer:billing",
        "dead",
    )
    assert letter["attempts"] == QUICK_RETRY.attempts == len(letter["history"])
    assert [entry["attempt"] for entry in letter["history"]] == [1, 2, 3]
    assert letter["error"] == "not now: ('k', 0)"
    # The key is held: nothing of it passes the dead letter.
    assert house.by_key() == {"other": [0]}
    assert [(each["blocked"], each["armed"]) for each in house.held()] == [(1, False), (0, False)]
    (said,) = house.said("delivery.buried")
    assert (said["id"], said["attempts"], said["last_error_code"]) == (sent.id, 3, "RuntimeError")


async def test_or_the_key_goes_on(house: House) -> None:
    await house.send(*notes(keys=1, each=4))
    consumer = failing(house, {("k0", 1): 99}, on_dead="continue")
    async with consumer:
        await eventually_async(lambda: len(house.effects()) == 3)
        await house.send(note("k0", 4))
        await eventually_async(lambda: len(house.effects()) == 4)
    assert house.by_key() == {"k0": [0, 2, 3, 4]}
    (letter,) = house.letters()
    assert not letter["holds_key"]
    assert [(each["blocked"], each["aside"]) for each in house.held()] == [(1, 1)]


async def test_a_rejected_message_is_not_tried_again(house: House) -> None:
    consumer, runs = house.consumer(), 0

    @consumer.on("note")
    async def handle(event: Any, tx: Any) -> None:
        nonlocal runs
        runs += 1
        raise Rejected("no such customer", code="no_customer")

    await house.send(note(None, 0))
    assert (await consumer.drain_once()).buried == 1
    assert runs == 1
    (letter,) = house.letters()
    assert (letter["error_code"], letter["error"]) == ("no_customer", "no such customer")


async def test_a_handler_may_have_its_own_policy(house: House) -> None:
    consumer = house.consumer(retry=SLOW_RETRY)

    @consumer.on("note", retry=RetryPolicy((0.01,), attempts=2))
    async def handle(event: Any, tx: Any) -> None:
        raise RuntimeError

    await house.send(note(None, 0))
    async with consumer:
        await eventually_async(lambda: house.letters())
    assert house.letters()[0]["attempts"] == 2


@pytest.mark.parametrize("unknown", ["refuse", "skip"])
async def test_types_nobody_handles(house: House, unknown: Any) -> None:
    await house.send(note("k", 0, type="strange"), note("k", 1), note(None, 2, type="strange"))
    done = await house.applying(unknown=unknown).drain_once()
    if unknown == "skip":
        assert (done.handled, done.skipped, done.buried) == (1, 2, 0)
        assert house.effects() == [("k", 1)]
        assert sum(said["count"] for said in house.said("delivery.skipped")) == 2
        return
    assert (done.handled, done.skipped, done.buried) == (0, 0, 2)
    assert [each["error_code"] for each in house.letters()] == ["unknown_type"] * 2
    assert house.effects() == []  # it waits behind the one that was refused


async def test_the_same_id_with_other_content_is_buried_and_not_skipped(house: House) -> None:
    first = note("k", 1)
    await house.send(first)
    await house.applying().drain_once()
    other = first._replace(payload=b'{"key":"k","n":2}')
    await house.send(other, note("k", 3))
    done = await house.applying().drain_once()
    assert (done.handled, done.duplicates) == (1, 0)
    assert house.by_key() == {"k": [1, 3]}
    assert [letter["error_code"] for letter in house.letters()] == ["content_changed"]
    assert first.id in house.letters()[0]["error"]
    # It may come as often as it likes: it is one letter.
    await house.send(other)
    await house.applying().drain_once()
    assert len(house.letters()) == 1
    assert house.broker.unacknowledged("billing") == 0


async def test_the_same_id_of_another_type_is_another_message(house: House) -> None:
    """A type says what the content means. A relay may be called otherwise by the next time."""
    consumer, seen = house.consumer(concurrency=1), list[str]()
    for name in ("note", "note.withdrawn"):

        @consumer.on(name)
        async def handle(event: Any, tx: Any, received: Any) -> None:
            seen.append(f"{received.type} from {received.headers['ce-source']}")

    first = note("k", 1)
    steps = [(first, "postroom"), (first._replace(type="note.withdrawn"), "postroom")]
    for message, source in [*steps, (first, "elsewhere"), (first, "postroom")]:
        house.broker.source = source
        await house.send(message)
        await consumer.drain_once()
    assert seen == ["note from postroom"]
    assert [letter["error_code"] for letter in house.letters()] == ["content_changed"]
    assert consumer.tally.duplicates == 2
    assert house.broker.unacknowledged("billing") == 0


def test_an_id_of_others_is_unique_within_its_source_only() -> None:
    def digest(source: str, **more: str) -> str:
        headers = {"ce-id": "42", "ce-type": "t", "ce-source": source, **more}
        how = {"topic": "t", "source": "s", "claim": 1, "receipt": 1, "unnamed": "u"}
        return letter_of(delivery(headers, b"{}", **how)).digest  # type: ignore[arg-type]

    assert digest("here") == digest("here") != digest("there")
    relayed = {"postroom-position": "1:7"}
    assert digest("here", **relayed) == digest("there", **relayed)


async def test_what_was_handled_under_once_is_a_duplicate(house: House) -> None:
    """Who goes over from `inbox.once` to a consumer of the same name has lost nothing."""
    first = note("k", 1)
    digest = hashlib.sha256(first.payload).hexdigest()
    house.stage.query(
        "INSERT INTO {p}inbox (consumer, message_id, digest) VALUES ('billing', %s, %s)",
        first.id,
        digest,
    )
    await house.send(first, first._replace(payload=b"{}"))
    assert (await house.applying().drain_once()).duplicates == 1
    assert [letter["error_code"] for letter in house.letters()] == ["content_changed"]


async def test_the_same_id_twice_in_one_batch(house: House) -> None:
    first = note("k", 1)
    await house.send(first, first, first._replace(payload=b'{"key":"k","n":2}'))
    done = await house.applying().drain_once()
    assert (done.handled, done.duplicates) == (1, 1)
    assert [each["error_code"] for each in house.letters()] == ["content_changed"]


async def test_a_copy_of_what_waits_is_a_duplicate(house: House) -> None:
    first = note("k", 1)
    await house.send(first)
    consumer = failing(house, {("k", 1): 1}, retry=SLOW_RETRY)
    await consumer.drain_once()
    await house.send(first)
    done = await consumer.drain_once()
    assert (done.handled, done.duplicates) == (0, 1)
    assert len(house.held()) == 1


async def test_a_handler_that_takes_too_long_has_failed(house: House) -> None:
    consumer = house.consumer(handler_seconds=0.1, retry=SLOW_RETRY)

    @consumer.on("note")
    async def handle(event: Any, tx: Any) -> None:
        await apply(tx, event)
        await asyncio.sleep(30)

    await house.send(note("k", 0))
    done = await consumer.drain_once()
    assert (done.handled, done.failed) == (0, 1)
    assert house.held()[0]["error_code"] == "TimeoutError"
    assert house.effects() == []


async def test_an_error_without_words_or_with_odd_ones(house: House) -> None:
    consumer = house.consumer(retry=SLOW_RETRY)

    @consumer.on("note")
    async def handle(event: Any, tx: Any) -> None:
        raise ValueError(["", "nul \x00 and \ud800", "x" * 100_000, "pw://u:canary@h"][event["n"]])

    await house.send(*(note(None, n) for n in range(4)))
    assert (await consumer.drain_once()).failed == 4
    assert len(house.held()) == 4


async def test_names_no_database_would_take(house: House) -> None:
    """A message of somebody else's, with a key longer than any column."""
    consumer, keys = house.consumer(), []

    @consumer.on("note")
    async def handle(event: Any, tx: Any, received: Any) -> None:
        keys.append(received.key)
        if len(keys) <= 2:
            raise RuntimeError

    long = "k" * 3000
    await house.send(note(long, 1), note(long + "x", 2))
    async with consumer:
        await eventually_async(lambda: len(keys) >= 4 and not house.held())
    assert set(keys) == {long, long + "x"}


@pytest.mark.parametrize("odd", ["nul \x00", "\ud800", "x" * 3000], ids=["nul", "half", "long"])
async def test_headers_no_database_would_take(house: House, odd: str) -> None:
    """A dead letter names its aggregate, which is the publisher's own text, and so is the id."""
    named = {"aggregate_type": odd, "aggregate_id": odd, "type": "strange"}
    first = note(None, 2)._replace(id=odd)
    await house.send(note(None, 0, **named), note(None, 1), first)
    await house.send(first._replace(payload=b'{"key":null,"n":3}'))
    done = await house.applying(concurrency=1).drain_once()
    assert (done.handled, done.buried) == (2, 2)
    assert sorted(house.effects()) == [(None, 1), (None, 2)]
    codes = sorted(letter["error_code"] for letter in house.letters())
    assert codes == ["content_changed", "unknown_type"]
    assert house.said("database.lost") == []
    for said in house.said("delivery.buried"):
        assert len(said["id"].encode()) < 300, "logs take it too"


async def test_headers_larger_than_any_column(house: House) -> None:
    """The largest are left out whole and named, and the message is tried again as any other."""
    consumer, seen = house.consumer(), list[dict[str, str]]()

    @consumer.on("note")
    async def handle(event: Any, tx: Any, received: Any) -> None:
        seen.append(received.headers)
        if len(seen) == 1:
            raise RuntimeError

    sent = note("k", 1, headers={"x-large": "y" * (17 * 1024 * 1024), "x-small": "z"})
    await house.send(sent)
    async with consumer:
        await eventually_async(lambda: len(seen) == 2 and not house.held())
    first, again = seen
    assert len(first["x-large"]) > len(again.get("x-large", ""))
    assert again[DROPPED] == "x-large"
    assert (again["x-small"], again["ce-id"]) == ("z", sent.id)


@pytest.mark.parametrize("kept", ['{"x-cut": "y', "[1]", '{"x": 1}', "["])
async def test_headers_that_cannot_be_read_are_none(house: House, kept: str) -> None:
    """Whoever spoiled them: the message is handled, and nobody goes in circles."""
    await house.send(note("k", 1))
    await failing(house, {("k", 1): 1}, retry=SLOW_RETRY).drain_once()
    house.stage.query("UPDATE {p}inbox_held SET headers = %s, next_attempt_at = held_at", kept)
    assert (await failing(house, {}).drain_once()).handled == 1
    assert house.held() == []


async def test_two_processes_try_a_message_once(house: House) -> None:
    """Both look for what is due; each attempt is made by one of them."""
    runs = Counter[int]()

    def make() -> Consumer:
        consumer = house.consumer()

        @consumer.on("note")
        async def handle(event: Any, tx: Any) -> None:
            runs[event["n"]] += 1
            await apply(tx, event)
            await asyncio.sleep(0.01)
            if runs[event["n"]] == 1:
                raise RuntimeError

        return consumer

    await house.send(*(note(f"k{n}", n) for n in range(10)))
    async with make(), make():
        await eventually_async(lambda: len(house.effects()) == 10 and not house.held(), 20)
    assert set(runs.values()) == {2}


async def test_a_message_that_ends_processes_is_buried(house: House) -> None:
    """The attempt is counted before it begins, so deaths are attempts too, with a few to spare."""
    await house.send(note("k", 1))
    await failing(house, {("k", 1): 1}, retry=SLOW_RETRY).drain_once()
    spent = SLOW_RETRY.attempts + LOST_TRIES
    due = f"UPDATE {{p}}inbox_held SET attempts = {spent}, next_attempt_at = held_at"
    house.stage.query(due)
    consumer = failing(house, {})
    done = await consumer.drain_once()
    assert (done.handled, done.buried) == (0, 1)
    assert house.letters()[0]["error_code"] == "worker_died"
