"""What a broker of your own must do for the relay, checked from outside.

    await check_broker(MyBroker(...), arrived)

`arrived()` tells what the far end has received so far, as pairs of id and payload in the order of
arrival; it may be a coroutine function. An `AssertionError` says in a sentence what is wrong.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from postroom.brokers.base import Broker, Capabilities, Delivered, Permanent, Transient, Unknown
from postroom.messages import Message, lane_of, new_id

__all__ = ["check_broker"]

Arrived: TypeAlias = "Callable[[], Any]"
Pairs: TypeAlias = "list[tuple[str, bytes]]"
PATIENCE_SECONDS = 10.0
_OUTCOMES = (Delivered, Transient, Permanent, Unknown)


async def check_broker(broker: Broker, arrived: Arrived, *, topic: str = "postroom.check") -> None:
    """Send to a broker that works and see that it answers as the relay needs it; closes it."""
    assert isinstance(broker, Broker), "a broker has capabilities, send, ping and close"
    assert isinstance(broker.capabilities, Capabilities), "capabilities must be a Capabilities"
    await broker.ping()
    assert await broker.send([]) == [], "send([]) must answer with an empty list"
    await _check_payloads(broker, arrived, topic)
    await _check_order(broker, arrived, topic)
    await _check_sends_at_once(broker, arrived, topic)
    await broker.close()
    await broker.close()  # a relay that fails while it stops may close twice


async def _check_payloads(broker: Broker, arrived: Arrived, topic: str) -> None:
    payloads = [b"", b"{}", bytes(range(256)), "größe 📮".encode(), b"x" * 100_000]
    messages = [_message(topic, f"payload-{n}", body) for n, body in enumerate(payloads)]
    await _deliver(broker, messages)
    found = dict(await _all_of(arrived, messages))
    for message in messages:
        same = found[message.id] == message.payload
        assert same, f"a payload of {len(message.payload)} bytes did not arrive as it was sent"


async def _check_order(broker: Broker, arrived: Arrived, topic: str) -> None:
    """One of each key in a `send`, or all of them where the broker says that it keeps order."""
    whole = broker.capabilities.ordered_pipeline
    rounds = [[_message(topic, f"key-{k}", b"%d" % n) for k in range(4)] for n in range(5)]
    sent = [message for batch in rounds for message in batch]
    for batch in [sent] if whole else rounds:
        await _deliver(broker, batch)
    place: dict[str, int] = {}
    for n, (id, _) in enumerate(await _all_of(arrived, sent)):
        place.setdefault(id, n)
    for key in {message.key for message in sent}:
        places = [place[message.id] for message in sent if message.key == key]
        assert places == sorted(places), f"messages of the key {key} arrived out of order"


async def _check_sends_at_once(broker: Broker, arrived: Arrived, topic: str) -> None:
    batches = [[_message(topic, f"lane-{n}-{m}", b"1") for m in range(8)] for n in range(4)]
    await asyncio.gather(*(_deliver(broker, batch) for batch in batches))
    await _all_of(arrived, [message for batch in batches for message in batch])


async def _deliver(broker: Broker, messages: Sequence[Message]) -> None:
    most = broker.capabilities.max_batch or len(messages)
    for start in range(0, len(messages), most):
        batch = messages[start : start + most]
        try:
            outcomes = await broker.send(batch, epoch=1)
        except Exception as error:
            raise AssertionError(f"send must answer with outcomes, and raised {error!r}") from error
        answered = f"{len(outcomes)} outcomes for {len(batch)} messages"
        assert len(outcomes) == len(batch), f"send gave {answered}: it must be one for each"
        for outcome in outcomes:
            assert isinstance(outcome, _OUTCOMES), f"{outcome!r} is no outcome of postroom.brokers"
            assert isinstance(outcome, Delivered), f"a broker that works answered {outcome!r}"


async def _all_of(arrived: Arrived, messages: Iterable[Message]) -> Pairs:
    """What has arrived, once all of these messages have."""
    wanted = {message.id for message in messages}
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        answer = arrived()
        found: Pairs = list(await answer if inspect.isawaitable(answer) else answer)
        missing = wanted - {id for id, _ in found}
        if not missing:
            return [(id, bytes(payload)) for id, payload in found]
        late = time.monotonic() > deadline
        assert not late, f"{len(missing)} messages were answered for and did not arrive"
        await asyncio.sleep(0.02)


def _message(topic: str, key: str, payload: bytes) -> Message:
    id = new_id()
    return Message(
        lane=lane_of(topic, key, id),
        position=1,
        id=id,
        topic=topic,
        key=key,
        type="postroom.check.v1",
        aggregate_type=None,
        aggregate_id=None,
        content_type="application/octet-stream",
        headers_json='{"check": "1"}',
        payload=payload,
        size=len(payload),
        redrives=0,
        created_us=int(time.time() * 1e6),
        expired=0,
        held=0,
        attempts=0,
        history=None,
    )
