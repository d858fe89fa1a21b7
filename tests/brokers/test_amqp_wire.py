"""RabbitMQ's frames: what they say, what is refused before, what a closed channel means."""

from typing import Any

import pamqp.frame
import pytest

from helpers_messages import make_message
from postroom.brokers import Permanent, Transient, Unknown
from postroom.brokers.amqp_wire import closed, publish
from postroom.messages import Message, wire_headers


def frames(data: bytes) -> list[Any]:
    found = []
    while data:
        size, channel, frame = pamqp.frame.unmarshal(data)
        assert channel == 7
        found.append(frame)
        data = data[size:]
    return found


def published(message: Message, frame_max: int = 131_072) -> Any:
    return publish(
        message, channel=7, exchange="events", source="shop", epoch=3, frame_max=frame_max
    )


@pytest.mark.parametrize("size", [0, 1, 4087, 4088, 4089, 8176, 100_000])
@pytest.mark.parametrize("redrives", [0, 2])
def test_our_frames_say_what_the_librarys_would(size: int, redrives: int) -> None:
    message = make_message(
        b"x" * size, key="ключ", aggregate_id="№ 7", headers={"a": "grüße 🌍"}, redrives=redrives
    )
    method, header, *bodies = frames(published(message, frame_max=4096))
    assert (method.name, method.exchange, method.routing_key) == (
        "Basic.Publish",
        "events",
        "orders",
    )
    assert (method.mandatory, method.immediate) == (True, False)
    properties = header.properties
    assert header.body_size == size
    said = wire_headers(message, source="shop", epoch=3, prefix="cloudEvents_")
    assert properties.headers == said
    assert (properties.delivery_mode, properties.content_type) == (2, "application/json")
    assert properties.message_id == message.broker_id
    assert properties.timestamp.timestamp() == message.created_us // 1_000_000
    assert b"".join(body.value for body in bodies) == message.payload
    assert all(0 < len(body.value) <= 4088 for body in bodies)


@pytest.mark.parametrize(
    "bad",
    [
        {"headers_json": "[1]"},
        {"headers_json": "{"},
        {"headers_json": '{"a": "\\ud800"}'},
        {"headers_json": '{"a": 1}'},
        {"headers": {"a": "x" * 200_000}},
        {"headers": {"a" * 256: "x"}},
        {"content_type": "ü" * 200},
        {"topic": "a b"},
        {"topic": "orders.#"},
        {"topic": ""},
    ],
)
def test_what_cannot_be_sent_is_refused_before(bad: dict[str, Any]) -> None:
    refused = published(make_message(**bad))
    assert isinstance(refused, Permanent)
    assert refused.code in ("bad_header", "bad_topic")


def test_what_a_closed_channel_means() -> None:
    message, other = make_message(b"x" * 300), make_message(b"y", topic="other")
    said = "PRECONDITION_FAILED - message size 300 is larger than configured max size 100"
    assert isinstance(closed(said, message), Permanent)
    assert isinstance(closed(said, other), Unknown)
    said = "ACCESS_REFUSED - access to topic 'orders' in exchange 'e' in vhost '/' refused"
    refused = closed(said, message)
    assert isinstance(refused, Transient)
    assert (refused.code, refused.down) == ("not_permitted", "topic")
    assert isinstance(closed(said, other), Unknown)
