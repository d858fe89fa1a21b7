"""What only RabbitMQ does with what is sent to it: returns, confirms, alarms, silence."""

import asyncio
import gc
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiormq
import pytest

from helpers import eventually_async
from helpers_amqp import PATIENT, Shelf, opened
from helpers_messages import make_message, make_messages
from postroom.brokers import BrokerOptions, Delivered, Transient, Unknown
from postroom.brokers.amqp import AmqpBroker
from postroom.errors import ConfigurationError, MissingDriver, Unreachable
from proxy import ChaosProxy
from servers import RabbitMQServer

QUICK = BrokerOptions(send_timeout_seconds=4.0)  # for tests of silence: they wait it out


@pytest.fixture
async def shelf(rabbitmq_server: RabbitMQServer) -> AsyncIterator[Shelf]:
    async with opened(rabbitmq_server) as made:
        yield made


async def test_what_no_queue_takes_comes_back(shelf: Shelf) -> None:
    await shelf.queue()
    batch = [make_message(topic=topic) for topic in (shelf.topic, "nowhere", shelf.topic)]
    first, lost, last = await shelf.broker.send(batch)
    assert first == last == Delivered()
    assert isinstance(lost, Transient)
    assert (lost.code, lost.down) == ("no_queue", "topic")
    assert f"no queue is bound to exchange {shelf.exchange} for routing key nowhere" in lost.text
    assert await shelf.kept() == 2


async def test_the_same_message_twice_at_once_comes_back_twice(shelf: Shelf) -> None:
    message = make_message(topic=shelf.topic)
    for outcome in await shelf.broker.send([message] * 300):
        assert isinstance(outcome, Transient)
        assert outcome.code == "no_queue"


async def test_a_binding_that_goes_away_under_load_loses_nothing(shelf: Shelf) -> None:
    await shelf.queue()
    async with aiormq.connect(shelf.server.url) as connection:
        channel = await connection.channel()
        delivered: set[str] = set()
        ended = False

        async def sending() -> None:
            while not ended:
                batch = make_messages(200, topic=shelf.topic)
                for message, outcome in zip(batch, await shelf.broker.send(batch), strict=True):
                    if outcome == Delivered():
                        delivered.add(message.id)

        task = asyncio.create_task(sending())
        await eventually_async(lambda: len(delivered) > 1_000, interval=0.001)
        await channel.queue_unbind(shelf.topic, shelf.exchange, shelf.topic)
        unbound = len(delivered)
        ended = True
        await task
        assert unbound > 1_000
        assert await shelf.kept() == len(delivered)


async def test_without_an_exchange_a_topic_is_a_queue(rabbitmq_server: RabbitMQServer) -> None:
    broker = AmqpBroker(rabbitmq_server.url, PATIENT)
    shelf = Shelf(rabbitmq_server)
    (lost,) = await broker.send([make_message(topic=shelf.topic)])
    assert isinstance(lost, Transient)
    assert "?exchange=NAME" in lost.text
    await shelf.queue(bind=False)
    assert await broker.send(make_messages(3, topic=shelf.topic)) == [Delivered()] * 3
    assert await shelf.kept() == 3
    with pytest.raises(ConfigurationError, match=r"\?exchange=NAME"):
        await broker.receive([shelf.topic], consumer="billing")
    await broker.close()
    await shelf.broker.close()
    await shelf.clear()


async def test_a_queue_that_rejects_is_the_topics_fault(shelf: Shelf) -> None:
    await shelf.queue(x_max_length=5, x_overflow="reject-publish")
    outcomes = await shelf.broker.send(make_messages(200, topic=shelf.topic, keys=200))
    refused = [outcome for outcome in outcomes if outcome != Delivered()]
    assert refused
    assert {(type(o), getattr(o, "code", ""), getattr(o, "down", "")) for o in refused} == {
        (Transient, "nacked", "topic")
    }
    assert await shelf.kept() == 200 - len(refused)


async def test_a_deleted_exchange_is_made_again(shelf: Shelf) -> None:
    await shelf.queue()
    assert await shelf.broker.send([make_message(topic=shelf.topic)]) == [Delivered()]
    async with aiormq.connect(shelf.server.url) as connection:
        channel = await connection.channel()
        await channel.exchange_delete(shelf.exchange)
    for outcome in await shelf.broker.send(make_messages(5, topic=shelf.topic)):
        assert isinstance(outcome, Unknown)
        assert (outcome.code, outcome.down) == ("channel_closed", "broker")
        assert "NOT_FOUND" in outcome.text
    for outcome in await shelf.broker.send(make_messages(5, topic=shelf.topic)):
        assert isinstance(outcome, Transient)
        assert (outcome.code, outcome.down) == ("no_queue", "topic")


async def test_blocked_publishers_wait_and_nothing_is_lost(shelf: Shelf) -> None:
    shelf.broker = AmqpBroker(shelf.url, QUICK)
    await shelf.queue()
    assert await shelf.broker.send([make_message(topic=shelf.topic)]) == [Delivered()]
    batch = make_messages(20, topic=shelf.topic)
    await asyncio.to_thread(shelf.server.control, "set_vm_memory_high_watermark", "0")
    try:
        # The first to come finds out: what it sent may be stored once the alarm is over.
        for outcome in await shelf.broker.send(batch):
            assert isinstance(outcome, Unknown)
            assert (outcome.code, outcome.down) == ("blocked", "broker")
        link = shelf.broker._link
        for outcome in await shelf.broker.send(batch):
            assert isinstance(outcome, Transient)
            assert (outcome.code, outcome.down) == ("blocked", "broker")
            assert "list_alarms" in outcome.text
        with pytest.raises(Unreachable, match="short of memory"):
            await shelf.broker.ping()
    finally:
        await asyncio.to_thread(
            shelf.server.control, "set_vm_memory_high_watermark", "absolute", "1GB"
        )

    async def sent() -> bool:
        return await shelf.broker.send(batch) == [Delivered()] * 20

    await eventually_async(sent)
    assert shelf.broker._link is link
    assert await shelf.kept() == 41


async def test_a_silent_server_leaves_the_outcome_unknown(shelf: Shelf) -> None:
    shelf.broker = AmqpBroker(shelf.url, QUICK)
    await shelf.queue()
    assert await shelf.broker.send([make_message(topic=shelf.topic)]) == [Delivered()]
    shelf.server.require_private()
    batch = make_messages(50, topic=shelf.topic)
    with shelf.server.paused():
        for outcome in await shelf.broker.send(batch):
            assert isinstance(outcome, Unknown)
            assert (outcome.code, outcome.down) == ("timeout", "broker")
        for outcome in await shelf.broker.send(batch):
            assert isinstance(outcome, Transient)
            assert (outcome.code, outcome.down) == ("unreachable", "broker")
        with pytest.raises(Unreachable, match="cannot connect to RabbitMQ at amqp://127"):
            await shelf.broker.ping()

    async def sent() -> bool:
        return await shelf.broker.send(batch) == [Delivered()] * 50

    await eventually_async(sent, 30)


async def test_a_lost_answer_is_unknown(shelf: Shelf) -> None:
    await shelf.queue()
    with ChaosProxy(shelf.server.url) as proxy:
        broker = AmqpBroker(proxy.through(shelf.url), PATIENT)
        await broker.ping()
        batch = make_messages(20, topic=shelf.topic)
        loss = proxy.lose_reply(to=batch[0].id.encode())
        outcomes = await broker.send(batch)
        assert loss.happened
        assert {(o.code, o.down) for o in outcomes if isinstance(o, Unknown)} == {
            ("connection_lost", "broker")
        }
        assert await broker.send(batch) == [Delivered()] * 20
        await broker.close()
    assert await shelf.kept() == 40


async def test_nobody_there(
    unused_tcp_port: int, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    broker = AmqpBroker(f"amqp://127.0.0.1:{unused_tcp_port}?exchange=e", PATIENT)
    for outcome in await broker.send(make_messages(2)):
        assert isinstance(outcome, Transient)
        assert (outcome.code, outcome.down) == ("unreachable", "broker")
    with pytest.raises(Unreachable):
        await broker.ping()
    with pytest.raises(Unreachable):
        await broker.receive(["orders"], consumer="billing")
    with pytest.raises(Unreachable):
        await broker.examine(["orders"])
    await broker.close()
    assert await broker.send([make_message()]) != [Delivered()]
    assert (caplog.text, capfd.readouterr().err) == ("", "")


async def test_a_killed_server_prints_nothing(
    shelf: Shelf, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    await shelf.queue()
    shelf.server.require_private()
    billing = await shelf.broker.receive([shelf.topic], consumer="billing")
    caplog.clear()
    assert await shelf.broker.send(make_messages(2, topic=shelf.topic)) == [Delivered()] * 2
    sending = asyncio.create_task(shelf.broker.send(make_messages(3_000, topic=shelf.topic)))
    await asyncio.sleep(0.02)
    await asyncio.to_thread(shelf.server.kill)
    outcomes = await sending
    assert {o.down for o in outcomes if isinstance(o, Unknown | Transient)} <= {"broker"}
    await billing.close()
    del sending, billing
    await asyncio.sleep(0.1)
    gc.collect()
    assert (caplog.text, capfd.readouterr().err) == ("", "")
    await asyncio.to_thread(shelf.server.start)


async def test_the_window_is_bounded(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    from postroom.brokers.amqp_link import AmqpLink

    await shelf.queue()
    seen: list[int] = []
    expect = AmqpLink.expect

    def watched(link: AmqpLink, *arguments: Any) -> None:
        expect(link, *arguments)
        seen.append(len(link.waiting))

    monkeypatch.setattr(AmqpLink, "expect", watched)
    broker = AmqpBroker(f"{shelf.url}&max_outstanding=16", BrokerOptions(send_timeout_seconds=30))
    batches = [make_messages(300, topic=shelf.topic) for _ in range(3)]
    for outcomes in await asyncio.gather(*(broker.send(batch) for batch in batches)):
        assert outcomes == [Delivered()] * 300
    assert 1 < max(seen) <= 16
    await broker.close()


async def test_a_cancelled_send_gives_its_place_back(shelf: Shelf) -> None:
    await shelf.queue()
    shelf.server.require_private()
    with shelf.server.paused():
        sending = asyncio.create_task(shelf.broker.send(make_messages(100, topic=shelf.topic)))
        await asyncio.sleep(0.1)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
    link = shelf.broker._link
    assert link is not None
    assert (len(link.waiting), link.bytes) == (0, 0)
    # Answers to those that nobody awaits any more are not taken for answers to others.
    batch = [make_message(topic=topic) for topic in (shelf.topic, "nowhere", shelf.topic)]
    outcomes = await shelf.broker.send(batch)
    assert outcomes[0] == outcomes[2] == Delivered()
    assert isinstance(outcomes[1], Transient)


# ── Processes ──────────────────────────────────────────────────────────────────────────────────


def test_one_broker_on_two_loops_and_in_a_forked_child(rabbitmq_server: RabbitMQServer) -> None:
    script = """
        import asyncio, os, sys
        sys.path.insert(0, sys.argv[2])
        from helpers_messages import make_messages
        from postroom.brokers import BrokerOptions, Delivered
        from postroom.brokers.amqp import open_broker

        broker = open_broker(sys.argv[1] + "?exchange=forked", BrokerOptions())

        async def first():
            await (await broker.receive(["forked"], consumer="billing")).close()
            await send()

        async def send():
            assert await broker.send(make_messages(50, topic="forked")) == [Delivered()] * 50

        asyncio.run(first())
        asyncio.run(send())
        child = os.fork()
        asyncio.run(send())
        if child == 0:
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        asyncio.run(send())
        print("ok")
    """
    tests = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), rabbitmq_server.url, tests],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "ok\n", done.stderr


def test_a_missing_library_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiormq", None)
    with pytest.raises(MissingDriver, match=r"pip install 'postroom\[amqp\]'"):
        AmqpBroker("amqp://localhost")


def test_importing_the_broker_imports_no_client() -> None:
    check = "import sys, postroom.brokers.amqp; print('aiormq' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
