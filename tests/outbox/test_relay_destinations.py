"""Destinations that are down: no attempt is spent, others flow, and all arrives in order after."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from relaying import Post, by_key, note, told

from helpers import eventually_async
from postroom.brokers import memory
from postroom.brokers.base import Permanent, Transient, Unknown
from postroom.brokers.memory import MemoryBroker
from postroom.outbox import destinations, rules
from postroom.outbox.relay import Relay
from postroom.retry import RetryPolicy

pytest_plugins = ("relay_fixtures",)


@pytest.fixture(autouse=True)
def quick_breakers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Back-off of a destination in hundredths of a second."""

    def quick() -> rules.Breaker:
        return rules.Breaker(first_seconds=0.02, cap_seconds=0.2, probe_seconds=2)

    monkeypatch.setattr(destinations, "Breaker", quick)


@pytest.fixture
def mail(post: Post) -> Iterator[MemoryBroker]:
    """A second broker beside `post.broker`."""
    name = f"{post.broker.name}-mail"
    yield memory.broker(name, limit=100_000)
    memory._brokers.pop(name)


def two_brokers(post: Post, mail: MemoryBroker, **how: object) -> Relay:
    return post.relay({"mail.*": f"memory://{mail.name}", "*": post.broker_url}, **how)


@contextmanager
def never_held(post: Post) -> Iterator[None]:
    yield
    assert not post.of("message.held")
    assert not post.count("dead_letter")


async def test_an_outage_spends_no_attempts_and_reads_nothing_into_memory(post: Post) -> None:
    post.broker.down = True
    with never_held(post):
        async with post.relay() as relay:
            await post.put(*(note(f"k{n % 9}", n) for n in range(90)))
            await eventually_async(lambda: len(post.of("destination.retried")) >= 6)
            # Set aside is only what a breaker refused at the very moment it closed.
            assert post.count("held") + post.count("outbox") == 90
            assert relay._office is not None
            assert post.broker.messages == []
            post.broker.down = False
            await eventually_async(post.empty)
    assert by_key(post.broker.messages) == {f"k{k}": list(range(k, 90, 9)) for k in range(9)}
    assert post.sql("SELECT DISTINCT attempts FROM {p}archive") == [(1,)]
    assert post.of("destination.up")


async def test_an_outage_longer_than_all_attempts_buries_nothing(
    post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(destinations, "Breaker", lambda: rules.Breaker(first_seconds=60))
    post.broker.down = True
    post.publish(*(note(f"k{n % 3}", n) for n in range(9)))
    with never_held(post):
        for _ in range(4):
            await post.relay(retry=RetryPolicy((0.001,), attempts=2)).drain_once()
        assert post.numbers("outbox") == list(range(9))
        post.broker.down = False
        await post.relay().drain_once()
    assert by_key(post.broker.messages) == {f"k{k}": list(range(k, 9, 3)) for k in range(3)}


async def test_an_outage_with_lost_answers_delivers_all_in_order(post: Post) -> None:
    lost = Unknown("timeout", "no answer", down="broker")
    post.broker.fail(lambda m: int(m.payload) % 5 == 0, lost, times=8, arrives=True)
    async with post.relay():
        await post.put(*(note(f"k{n % 3}", n) for n in range(30)))
        await eventually_async(post.empty)
    received = by_key(post.broker.messages)
    for k in range(3):
        numbers = received[f"k{k}"]
        assert list(dict.fromkeys(numbers)) == list(range(k, 30, 3))
    assert not post.of("message.held")


async def test_other_brokers_flow_while_one_is_down(post: Post, mail: MemoryBroker) -> None:
    mail.down = True
    with never_held(post):
        async with two_brokers(post, mail):
            for n in range(10):
                await post.put(note("k", n), note("k", n, topic="mail.out"))
            await eventually_async(lambda: by_key(post.broker.messages) == {"k": list(range(10))})
            await eventually_async(lambda: post.numbers("held") == list(range(10)))
            assert mail.messages == []
            rows = post.sql("SELECT DISTINCT attempts, blocked FROM {p}held")
            assert [tuple(row) for row in rows] == [(0, 0)]
            mail.down = False
            await eventually_async(post.empty)
    assert by_key(mail.messages) == {"k": list(range(10))}


async def test_when_all_are_down_nothing_is_spent_and_all_arrives_after(
    post: Post, mail: MemoryBroker
) -> None:
    mail.down = post.broker.down = True
    with never_held(post):
        async with two_brokers(post, mail):
            await post.put(*(note(f"k{n % 4}", n, topic=t) for n in range(40) for t in TOPICS))
            await eventually_async(lambda: len(post.of("destination.retried")) >= 10)
            assert not post.broker.messages
            assert not mail.messages
            mail.down = post.broker.down = False
            await eventually_async(post.empty)
    expected = {f"k{k}": list(range(k, 40, 4)) for k in range(4)}
    assert by_key(post.broker.messages) == by_key(mail.messages) == expected


TOPICS = ("orders", "mail.out")


async def test_one_topic_down_leaves_the_rest_of_its_broker_alone(post: Post) -> None:
    no_stream = Transient("no_stream", "nobody takes it", down="topic")
    down = [True]
    post.broker.fail(lambda m: m.topic == "lost" and down[0], no_stream, times=None)
    with never_held(post):
        async with post.relay():
            await post.put(*(note(f"k{n % 30}", n, topic=t) for n in range(300) for t in LOST))
            await eventually_async(
                lambda: len([m for m in post.broker.messages if m.topic == "orders"]) == 300
            )
            await eventually_async(lambda: post.count("held") == 300)
            down[0] = False
            await eventually_async(post.empty)
    lost = by_key([m for m in post.broker.messages if m.topic == "lost"])
    assert lost == {f"k{k}": list(range(k, 300, 30)) for k in range(30)}


LOST = ("lost", "orders")


async def test_a_topic_that_is_back_ramps_up_to_full_speed(post: Post) -> None:
    post.broker.fail(lambda m: True, Transient("no_stream", "no", down="topic"), times=1)
    async with post.relay() as relay:
        await post.put(*(note(f"k{n}", n) for n in range(600)))
        await eventually_async(post.empty, 15)
        await post.put(*(note(f"k{n}", n) for n in range(2500)))
        await eventually_async(lambda: not relay.sender.destinations.down())
        await eventually_async(post.empty, 15)
    assert len(post.broker.messages) == 3100


async def test_a_topic_without_a_route_waits(post: Post) -> None:
    with never_held(post):
        relay = post.relay({"orders": post.broker_url})
        post.publish(note("k", 1, topic="nowhere"), note("k", 2, topic="nowhere"), note("k", 3))
        await relay.drain_once()
        assert told(post.broker.messages) == [("k", 3)]
        assert post.numbers("held") == [1, 2]
        (fields,) = post.of("destination.down")
        assert fields["error_code"] == "no_route"
        assert "nowhere" in fields["error"]
        # A route for it and a rebind, and they go in their order.
        async with post.relay(rebind=True):
            await eventually_async(post.empty)
    assert told(post.broker.messages) == [("k", 3), ("k", 1), ("k", 2)]


async def test_what_is_refused_during_an_outage_of_others_is_still_buried(
    post: Post, mail: MemoryBroker
) -> None:
    mail.down = True
    post.broker.fail(lambda m: m.payload == b"2", Permanent("bad", "no"))
    async with two_brokers(post, mail):
        await post.put(note("m", 1, topic="mail.out"), note("k", 2), note("o", 3))
        await eventually_async(lambda: post.count("dead_letter") == 1)
        await eventually_async(lambda: told(post.broker.messages) == [("o", 3)])
        await eventually_async(lambda: sorted(post.numbers("held")) == [1, 2])
