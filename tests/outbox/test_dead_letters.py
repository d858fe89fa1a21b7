"""What an operator decides about dead letters, and what becomes of their keys."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from relaying import Post, by_key, note, several_writers, told

from postroom import failpoints
from postroom.brokers.base import Permanent
from postroom.errors import Refused
from postroom.ops import actions

pytest_plugins = ("relay_fixtures",)

BAD = Permanent("bad", "never")
SAME = "00000000-0000-4000-8000-000000000001"


async def _two_letters_of_one_id(post: Post) -> None:
    post.broker.fail(lambda m: m.id == SAME, BAD, times=2)
    post.publish(note("a", 1), note("b", 1))
    post.sql("UPDATE {p}outbox SET id = %s", SAME)  # as a publisher before version 6 could do
    post.publish(note("a", 2), note("b", 2))
    await post.relay().drain_once()
    assert post.count("dead_letter") == 2
    assert post.broker.messages == []


async def test_two_messages_of_one_id_are_two_letters_and_both_are_retried(post: Post) -> None:
    await _two_letters_of_one_id(post)
    await actions.retry(post.url, SAME, why="mended")
    await post.relay().drain_once()
    assert by_key(post.broker.messages) == {"a": [1, 2], "b": [1, 2]}
    assert post.count("held") == 0
    states = post.sql("SELECT state FROM {p}dead_letter")
    assert [row[0] for row in states] == ["resolved", "resolved"]


async def test_two_messages_of_one_id_are_both_discarded(post: Post) -> None:
    await _two_letters_of_one_id(post)
    await actions.discard(post.url, SAME, why="never wanted")
    await post.relay().drain_once()
    assert by_key(post.broker.messages) == {"a": [2], "b": [2]}
    with pytest.raises(Refused, match="discarded already"):
        await actions.discard(post.url, SAME, why="again")


async def test_letters_of_a_key_that_went_on_come_back_in_their_own_order(post: Post) -> None:
    post.broker.fail(lambda m: m.payload in (b"1", b"2"), BAD, times=2)
    ids = post.publish(note("k", 1), note("k", 2), note("k", 3))
    await post.relay(on_dead="continue").drain_once()
    assert told(post.broker.messages) == [("k", 3)]
    for id in reversed(ids[:2]):
        decided = await actions.retry(post.url, id)
        assert not decided.in_order
    heads = post.sql("SELECT position FROM {p}held WHERE next_attempt_at IS NOT NULL")
    assert len(heads) == 1, "only the first of a key has a next attempt"
    await post.relay(on_dead="continue").drain_once()
    assert told(post.broker.messages) == [("k", 3), ("k", 1), ("k", 2)]


async def test_a_letter_whose_place_is_gone_is_still_sent(post: Post) -> None:
    post.broker.fail(lambda m: m.payload == b"1", BAD)
    (id,) = post.publish(note("k", 1))
    await post.relay().drain_once()
    post.sql("DELETE FROM {p}held")
    decided = await actions.retry(post.url, id)
    assert not decided.in_order
    await post.relay().drain_once()
    assert told(post.broker.messages) == [("k", 1)]


@pytest.fixture
def _disarmed() -> Iterator[None]:
    yield
    failpoints.clear()


@several_writers
@pytest.mark.usefixtures("_disarmed")
async def test_what_was_finished_meanwhile_stays_finished(post: Post) -> None:
    """Between an operator's read and write another retries the letter, and it is delivered."""
    post.broker.fail(lambda m: m.payload == b"1", BAD)
    (id, _) = post.publish(note("k", 1), note("k", 2))
    await post.relay().drain_once()

    async def finish() -> None:
        await actions.retry(post.url, id)
        await post.relay().drain_once()

    failpoints.arm("sql.lock_lane.before", lambda: elsewhere(finish), at=1)
    with pytest.raises(Refused, match="resolved already"):
        await actions.discard(post.url, id, why="too late")
    assert told(post.broker.messages) == [("k", 1), ("k", 2)]
    assert post.sql("SELECT state FROM {p}dead_letter") == [("resolved",)]
    with pytest.raises(Refused, match="resolved already"):
        await actions.retry(post.url, id)


def elsewhere(work: Callable[[], Awaitable[None]]) -> None:
    """Do it to its end in a loop of another thread, while this one stands still."""

    async def run() -> None:
        await work()

    with ThreadPoolExecutor(1) as thread:
        thread.submit(lambda: asyncio.run(run())).result()
