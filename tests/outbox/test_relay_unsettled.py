"""Messages that were sent and could not be settled: their receipts are kept, and little is sent
until a settle succeeds."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from typing import Any

from relaying import Post, by_key, forbidden, note, on_postgres

from helpers import eventually_async
from helpers_messages import make_message
from postroom.brokers.base import BrokerOptions, Permanent
from postroom.brokers.call import CallBroker
from postroom.messages import Message, lane_of
from postroom.outbox.relay import Relay
from postroom.outbox.rules import SETTLED, Bury
from postroom.outbox.settling import Settling

pytest_plugins = ("relay_fixtures",)


def keys(count: int) -> list[str]:
    return [f"key {n}" for n in range(count)]


def copies(messages: Sequence[Message]) -> int:
    """How many deliveries were not the first of their message."""
    return sum(Counter(message.id for message in messages).values()) - len(
        {message.id for message in messages}
    )


def called(post: Post, call: Any, **how: Any) -> Relay:
    """A relay to a function."""
    broker = CallBroker(call, BrokerOptions(send_timeout_seconds=1.0, concurrency=1000))
    return post.relay("memory://call", brokers={"memory://call": broker}, **how)


async def test_what_cannot_be_settled_is_sent_once(post: Post) -> None:
    """And lanes that have sent nothing yet send little."""
    first = lane_of("orders", "key 0", "")
    early = [key for key in keys(30) if lane_of("orders", key, "") == first]
    late = [key for key in keys(30) if key not in early]
    async with post.relay():
        async with forbidden(post, "archive"):
            await post.put(*(note(key, n) for n in range(20) for key in early))
            await eventually_async(lambda: len(post.of("database.lost")) >= 3)
            await post.put(*(note(key, n) for n in range(20) for key in late))
            before = len(post.broker.messages)
            await eventually_async(lambda: len(post.of("database.lost")) >= 5)
            assert len(post.broker.messages) - before <= 2, "more was read than one probe at a time"
        await eventually_async(post.empty)
    assert copies(post.broker.messages) == 0
    assert by_key(post.broker.messages) == {key: list(range(20)) for key in keys(30)}
    assert post.count("archive") == 600
    pauses = [fields["retry_in_seconds"] for fields in post.of("database.lost")]
    assert pauses[4] > 4 * pauses[0], "the pauses did not grow"


async def test_a_refusal_that_cannot_be_written_down_is_kept(post: Post) -> None:
    """The other lanes continue to deliver."""
    seen: list[str | None] = []

    def bad(message: Message) -> bool:
        seen.append(message.key)
        return message.key == "bad"

    post.broker.fail(bad, Permanent("no", "never"), times=None)
    async with post.relay():
        async with forbidden(post, "dead_letter"):
            await post.put(note("bad", 1), note("bad", 2), *(note(key, 1) for key in keys(30)))
            await eventually_async(lambda: len(post.of("database.lost")) >= 3)
            lane = lane_of("orders", "bad", "")
            others = [key for key in keys(30) if lane_of("orders", key, "") != lane]
            await eventually_async(lambda: post.count("archive") >= len(others))
        await eventually_async(lambda: post.numbers("held") == [1, 2])
    assert seen.count("bad") == 1
    assert copies(post.broker.messages) == 0
    ((attempts,),) = post.sql("SELECT attempts FROM {p}dead_letter")
    assert attempts == 1


async def test_sends_under_way_are_awaited_before_the_connections_are_replaced(post: Post) -> None:
    """The settle of one lane fails while the others still send."""
    sent: list[Message] = []

    async def slow(message: Message) -> None:
        sent.append(message)
        await asyncio.sleep(0.0 if message.payload == b"0" else 0.7)

    async with called(post, slow):
        async with forbidden(post, "archive"):
            await post.put(*(note(key, int(key[4:])) for key in keys(40)))
            await eventually_async(lambda: len(post.of("database.lost")) >= 3)
        await eventually_async(post.empty)
    assert copies(sent) == 0
    assert len(sent) == 40


@on_postgres
async def test_an_archive_that_is_locked_for_longer_than_a_statement_may_take(post: Post) -> None:
    """As by VACUUM FULL, for a role that has a statement_timeout."""
    ((name,),) = post.sql("SELECT current_database()")
    post.sql(f"ALTER DATABASE {name} SET statement_timeout = '300ms'")
    with closing(post.connect()) as locking:
        locking.execute("LOCK TABLE postroom.archive IN ACCESS EXCLUSIVE MODE")
        async with post.relay():
            await post.put(*(note(key, n) for n in range(5) for key in keys(30)))
            await eventually_async(lambda: len(post.of("database.lost")) >= 3)
            locking.rollback()
            await eventually_async(post.empty)
    assert copies(post.broker.messages) == 0
    assert by_key(post.broker.messages) == {key: list(range(5)) for key in keys(30)}


async def test_a_verdict_is_of_one_attempt() -> None:
    settling = Settling()
    message = make_message()
    settling.keep([(message, SETTLED)], 7)
    others = [message._replace(redrives=1), message._replace(attempts=2)]
    assert settling.known(others, 8) == {}
    assert settling.known([message], 8) == {message.position: SETTLED}
    settling.forget([message])
    assert settling.known([message], 8) == {}


async def test_a_refusal_counts_until_another_relay_owned_the_lane() -> None:
    """A receipt stays true; a refused message may have been delivered by the other relay."""
    settling = Settling()
    refused, delivered = make_message(position=1), make_message(position=2)
    refusal = Bury("no", "never")
    settling.keep([(refused, refusal), (delivered, SETTLED)], 7)
    assert settling.known([refused, delivered], 8) == {1: refusal, 2: SETTLED}
    assert settling.known([refused, delivered], 9) == {2: SETTLED}
