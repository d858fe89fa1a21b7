"""JetStream knows duplicates for a while only: an outage that lasts longer brings them back."""

import asyncio
from typing import Any

import nats
from consuming import QUICK, House, apply, note
from nats.js.api import StreamConfig

from helpers import eventually_async
from postroom import Consumer
from postroom.brokers import BrokerOptions, Delivered, Unknown
from postroom.brokers.nats import NatsBroker
from postroom.messages import new_id
from proxy import ChaosProxy
from servers import NatsServer

WINDOW_SECONDS = 0.1


async def test_an_outage_longer_than_the_window_is_applied_once(
    house: House, nats_server: NatsServer
) -> None:
    """Copies are in the stream, and reach the consumer, whose inbox skips them."""
    topic = f"t{new_id()}"
    async with await nats.connect(nats_server.url) as client:
        config = StreamConfig(name=topic, subjects=[topic], duplicate_window=WINDOW_SECONDS)
        await client.jetstream().add_stream(config)
        batch = [note(f"k{number % 3}", number, topic=topic) for number in range(12)]
        with ChaosProxy(nats_server.url) as proxy:
            broker = NatsBroker(proxy.url, BrokerOptions(send_timeout_seconds=10.0))
            await broker.ping()
            proxy.lose_reply(to=batch[0].id.encode())
            outcomes = await broker.send(batch)
            assert any(isinstance(outcome, Unknown) for outcome in outcomes)
            again = [m for m, o in zip(batch, outcomes, strict=True) if o != Delivered()]
            proxy.refuse()
            await asyncio.sleep(3 * WINDOW_SECONDS)
            proxy.accept()
            assert await broker.send(again) == [Delivered()] * len(again)
            await broker.close()
        stored = (await client.jetstream().stream_info(topic)).state.messages
    assert stored > len(batch), "the window has let copies through"
    consumer = Consumer(
        "billing", house.stage.url, nats_server.url, topics=[topic], gives="session", **QUICK
    )

    @consumer.on("note")
    async def handle(event: Any, tx: Any) -> None:
        await apply(tx, event)

    async with consumer:
        await eventually_async(
            lambda: consumer.tally.handled + consumer.tally.duplicates == stored, 20
        )
    assert consumer.tally.duplicates == stored - len(batch)
    assert house.by_key() == {f"k{k}": list(range(k, 12, 3)) for k in range(3)}
