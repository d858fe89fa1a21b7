"""Hardships that stopped a relay once: each of these must pass by itself."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest
from relaying import Post, by_key, note, on_postgres

from helpers import eventually_async
from helpers_messages import make_message
from postroom.brokers.base import (
    CROWDED,
    DELIVERED,
    BrokerOptions,
    Capabilities,
    Outcome,
    Permanent,
    Transient,
)
from postroom.config import Routes
from postroom.databases import sql
from postroom.messages import Message
from postroom.outbox.rules import CODE_CHARACTERS, Down, Settled, Unsent, storable
from postroom.outbox.sending import Sender
from postroom.outbox.store import Burial, Change, Failure, Fence
from postroom.retry import RetryPolicy
from postroom.signals import redact

pytest_plugins = ("relay_fixtures",)


class Scripted:
    """A broker that answers as `answer` says and keeps what it was sent."""

    def __init__(self, *, ordered: bool = False) -> None:
        self.capabilities = Capabilities(ordered_pipeline=ordered)
        self.sent: list[str] = []
        self.answers: dict[str, list[Outcome]] = {}

    async def send(self, batch: Sequence[Message], *, epoch: int = 0) -> list[Outcome]:
        self.sent += [message.topic for message in batch]
        return [self._answer(message.topic) for message in batch]

    def _answer(self, topic: str) -> Outcome:
        script = self.answers.get(topic, [])
        return script.pop(0) if script else DELIVERED

    async def ping(self) -> None: ...

    async def close(self) -> None: ...


class Clock:
    """Time that stands still until it is moved."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def sender_to(broker: Scripted, clock: Clock) -> Sender:
    return Sender(
        Routes((), "it://"),
        {"it://": broker},
        retry=RetryPolicy(),
        options=BrokerOptions(),
        clock=clock,
        randomness=lambda: 0.0,
    )


async def always() -> bool:
    return True


DOWN = Transient("gone", "it is gone", down="broker")


async def test_a_broker_that_answers_about_a_topic_is_up() -> None:
    broker, clock = Scripted(), Clock()
    sender = sender_to(broker, clock)
    broker.answers["good"] = [DOWN]
    await sender.send([make_message(topic="good")], epoch=1, may_send=always)
    assert sender.destinations.all_down()
    clock.now += 60
    broker.answers["bad"] = [Transient("no_stream", "no stream", down="topic")]
    wave = [make_message(topic="bad"), make_message(topic="good"), make_message(topic="good")]
    verdicts = await sender.send(wave, epoch=1, may_send=always)
    assert isinstance(verdicts[0], Down)
    assert [type(one) for one in verdicts[1:]] == [Settled, Settled]
    assert not sender.destinations.all_down()


async def test_a_topic_that_is_closed_does_not_use_up_the_probe() -> None:
    broker, clock = Scripted(), Clock()
    sender = sender_to(broker, clock)
    broker.answers["bad"] = [Transient("no_stream", "no stream", down="topic")] * 9
    await sender.send([make_message(topic="bad")], epoch=1, may_send=always)
    broker.answers["good"] = [DOWN]
    await sender.send([make_message(topic="good")], epoch=1, may_send=always)
    clock.now += 0.19  # the broker may be tried again, the topic not yet
    sender.destinations.breakers["topic bad"].retry_at = clock.now + 30
    broker.sent.clear()
    wave = [make_message(topic="bad"), make_message(topic="good")]
    verdicts = await sender.send(wave, epoch=1, may_send=always)
    assert broker.sent == ["good"]
    assert isinstance(verdicts[1], Settled)


async def test_a_topic_whose_probe_met_a_broken_broker_is_tried_when_the_broker_is_back() -> None:
    broker, clock = Scripted(), Clock()
    sender = sender_to(broker, clock)
    down = Transient("slow", "no answer", down="topic")
    broker.answers["t"] = [down, DOWN, DELIVERED]
    for _ in range(2):
        await sender.send([make_message(topic="t")], epoch=1, may_send=always)
        clock.now += 1  # far less than a probe may take
    verdicts = await sender.send([make_message(topic="t")], epoch=1, may_send=always)
    assert [type(one) for one in verdicts] == [Settled]


@pytest.mark.parametrize("down", [DOWN, Transient("slow", "no answer", down="topic")])
async def test_a_probe_that_found_no_room_has_learnt_nothing(down: Transient) -> None:
    broker, clock = Scripted(), Clock()
    sender = sender_to(broker, clock)
    broker.answers["t"] = [down, CROWDED, DELIVERED]
    await sender.send([make_message(topic="t")], epoch=1, may_send=always)
    clock.now += 1
    verdicts = await sender.send([make_message(topic="t")], epoch=1, may_send=always)
    assert verdicts == [Unsent(crowded=True)]
    assert sender.destinations.down()  # as down as before, and the next probe need not wait
    verdicts = await sender.send([make_message(topic="t")], epoch=1, may_send=always)
    assert [type(one) for one in verdicts] == [Settled]


async def test_nothing_of_a_key_passes_a_failure_while_the_broker_ramps_up() -> None:
    broker, clock = Scripted(ordered=True), Clock()
    sender = sender_to(broker, clock)
    broker.answers["t"] = [DOWN]
    await sender.send([make_message(topic="t", key="k")], epoch=1, may_send=always)
    clock.now += 60
    broker.answers["t"] = [DELIVERED, Transient("busy", "not now")]
    wave = [make_message(topic="t", key="k") for _ in range(6)]
    broker.sent.clear()
    verdicts = await sender.send(wave, epoch=1, may_send=always)
    # One, then two at once: of those the first fails, and nothing goes after them.
    assert len(broker.sent) == 3
    assert [type(one) for one in verdicts[3:]] == [Unsent] * 3


@pytest.mark.parametrize(
    "text", ["nul \x00 in it", "half a \ud800 pair", "x" * 100_000], ids=["nul", "half", "long"]
)
async def test_no_error_text_stops_the_relay(post: Post, text: str) -> None:
    good = post.publish(*(note(f"g{n}", n) for n in range(20)))
    (bad,) = post.publish(note("bad", 99))
    post.broker.fail(bad, Permanent(text, text))
    drained = await post.relay().drain_once()
    assert (drained.delivered, drained.dead) == (len(good), 1)
    ((code, error),) = post.sql("SELECT error_code, error FROM {p}dead_letter")
    assert len(code) <= CODE_CHARACTERS
    assert storable(text) == error


async def test_a_long_held_run_lets_other_keys_of_the_lane_pass(post: Post) -> None:
    others = next(f"o{n}" for n in range(999) if _lane(f"o{n}") == _lane("k"))
    post.publish(*(note("k", n) for n in range(300)))
    post.broker.fail(lambda message: message.payload == b"0", Transient("busy", "no"))

    def slow(message: Message) -> None:
        time.sleep(0.004)

    relay = post.relay(retry=RetryPolicy((0.3,), attempts=5))
    async with relay:
        await eventually_async(lambda: post.count("held") == 300)
        post.broker.subscribe(slow)
        await eventually_async(lambda: len(post.broker.messages) > 20, timeout=20)
        await post.put(note(others, 1))
        await eventually_async(lambda: others in by_key(post.broker.messages), timeout=20)
        passed = len(by_key(post.broker.messages)["k"])
        await eventually_async(post.empty, timeout=30)
    assert passed < 300
    assert by_key(post.broker.messages)["k"] == list(range(300))


def _lane(key: str) -> int:
    from postroom.messages import lane_of

    return lane_of("orders", key, "")


@on_postgres
@pytest.mark.parametrize("name", ["held_due", "delayed_lanes", "delayed_due", "prune_dedup"])
async def test_what_is_due_is_found_by_index(post: Post, name: str) -> None:
    post.sql(
        "INSERT INTO {p}held (lane, position, id, topic, key, type, content_type, payload, size, "
        "created_at, next_attempt_at) SELECT 3, n, gen_random_uuid(), 't', n::text, 'x', 'y', "
        "'', 0, now(), now() + interval '1 day' FROM generate_series(1, 20000) n"
    )
    post.sql(
        "INSERT INTO {p}delayed (lane, deliver_at, id, topic, type, content_type, payload, size) "
        "SELECT 3, now() + interval '1 day', gen_random_uuid(), 't', 'x', 'y', '', 0 "
        "FROM generate_series(1, 20000)"
    )
    post.sql(
        "INSERT INTO {p}dedup (dedup_key, message_id) "
        "SELECT n::text, gen_random_uuid() FROM generate_series(1, 20000) n"
    )
    post.sql("ANALYZE")
    values: dict[str, Any] = {"lane": 3, "rows": 100, "bytes": 1_000_000, "keep_seconds": 999}
    values["lane_list"] = [3]
    (statement,) = sql.prepare("postroom.outbox", "postgresql", name, "format")
    text, bound = statement.bind("postgresql", values)
    plan = "\n".join(row[0] for row in post.sql(f"EXPLAIN {text}", *bound))
    assert "Index" in plan
    assert "Seq Scan" not in plan


def test_a_large_change_is_written_in_parts() -> None:
    messages = [make_message(key=f"k{n}") for n in range(10)]
    change = Change(Fence(0, 1), batches=[7], delivered=messages[:2], waiting=messages[2:4])
    change.failures = [Failure(m, 1, "[]", "c", "t", 1.0) for m in messages[4:8]]
    change.burials = [Burial(m, 1, "[]", "c", "t", True) for m in messages[8:]]
    parts = list(change.pieces(3))
    assert [len(part.failures) + len(part.burials) for part in parts] == [3, 3, 0]
    # What waits is written after what it waits for, and the journal is cleared at the end.
    assert [part.waiting for part in parts] == [[], [], messages[2:4]]
    assert [part.batches for part in parts] == [[], [], [7]]
    assert list(change.pieces(6)) == [change]


@pytest.mark.parametrize(
    "text",
    [
        '{"password": "canary"}',
        "{'password': 'canary'}",
        "postgresql://u:ca/nary-canary@h/db",
        "amqp://u:p#canary@h",
        "Authorization: Bearer canary",
        "api-key=canary",
        "aws_secret_access_key=canary",
        "nats://canary@host:4222",
        "nats://a:b@canary@host:4222",
    ],
)
def test_no_secret_stays(text: str) -> None:
    assert "canary" not in redact(text)


async def test_a_log_line_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    from postroom import signals

    with caplog.at_level("ERROR", logger="postroom"):
        signals.emit("relay.failed", incarnation="i", error="one\ntwo\r\x1b[31m")
    await asyncio.sleep(0)
    assert all(ord(character) >= 32 for character in caplog.messages[-1])
