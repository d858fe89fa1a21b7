"""No answer comes from JetStream, again and again: it is lost though the message is stored, or the
message never came there. Nothing is lost, and nothing is there twice.

A hundred answers every day, 10,000 with `POSTROOM_GUARANTEES=big`.
"""

import asyncio
import os
from collections.abc import Sequence

import nats
from nats.js.api import StreamConfig

from helpers_messages import make_messages
from postroom.brokers import BrokerOptions, Delivered, Outcome, Unknown
from postroom.brokers.nats import NatsBroker
from postroom.messages import Message, new_id
from proxy import ChaosProxy
from servers import NatsServer

ANSWERS = 10_000 if os.environ.get("POSTROOM_GUARANTEES") == "big" else 100
BATCH = 10


async def lose_answers(
    proxy: ChaosProxy, broker: NatsBroker, batch: Sequence[Message]
) -> Sequence[Outcome]:
    """The server stores them and says so, which nobody hears."""
    loss = proxy.lose_reply(to=batch[0].id.encode())
    outcomes = await broker.send(batch)
    assert loss.happened
    return outcomes


async def lose_messages(
    proxy: ChaosProxy, broker: NatsBroker, batch: Sequence[Message]
) -> Sequence[Outcome]:
    """They are on their way when the connection breaks."""
    await broker.ping()
    proxy.freeze("to_server")
    sending = asyncio.create_task(broker.send(batch))
    await asyncio.sleep(0.01)
    proxy.cut()
    proxy.thaw()
    return await sending


async def test_answers_lost_over_and_over_lose_no_message(nats_server: NatsServer) -> None:
    """What was not answered is sent again under its id, and the stream has all of it once."""
    topic, sent, lost = f"t{new_id()}", list[str](), 0
    async with await nats.connect(nats_server.url) as client:
        await client.jetstream().add_stream(StreamConfig(name=topic, subjects=[topic]))
        with ChaosProxy(nats_server.url) as proxy:
            broker = NatsBroker(proxy.url, BrokerOptions(send_timeout_seconds=20.0))
            for number in range(ANSWERS // BATCH):
                lose = lose_messages if number % 2 else lose_answers
                left = make_messages(BATCH, topic=topic, keys=5)
                sent += [message.id for message in left]
                outcomes = await lose(proxy, broker, left)
                lost += sum(isinstance(outcome, Unknown) for outcome in outcomes)
                while left := [m for m, o in zip(left, outcomes, strict=True) if o != Delivered()]:
                    outcomes = await broker.send(left)
            await broker.close()
        print(f"{lost} answers did not come, to {len(sent)} messages")
        reader = await client.jetstream().subscribe(topic, ordered_consumer=True)
        stored = (await client.jetstream().stream_info(topic)).state.messages
        found = [(await reader.next_msg(timeout=10)).header["Nats-Msg-Id"] for _ in range(stored)]
    assert sorted(found) == sorted(sent)
    assert lost == ANSWERS
