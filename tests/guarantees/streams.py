"""Streams of JetStream: what relays delivered there, read by a plain client."""

import json

import nats
from history import Delivery
from nats.js.api import StreamConfig

from servers import NatsServer


async def make_stream(server: NatsServer, name: str, subjects: str) -> None:
    """It forgets ids as soon as it may, so that what came twice is seen."""
    config = StreamConfig(name=name, subjects=[subjects], duplicate_window=0.1)
    async with await nats.connect(server.url) as client:
        await client.jetstream().add_stream(config)


async def read_stream(server: NatsServer, stream: str, subject: str) -> list[Delivery]:
    """Everything the stream holds of a subject, in its order."""
    found = []
    async with await nats.connect(server.url) as client:
        jetstream = client.jetstream()
        info = await jetstream.stream_info(stream, subjects_filter=subject)
        count = (info.state.subjects or {}).get(subject, 0)
        subscription = await jetstream.subscribe(subject, ordered_consumer=True)
        for _ in range(count):
            message = await subscription.next_msg(timeout=10)
            headers = message.headers or {}
            pid = int(headers["ce-source"].strip("/"))
            n = json.loads(message.data)["n"]
            found.append(Delivery(headers["event_id"], None, n, 0, pid))
    return found
