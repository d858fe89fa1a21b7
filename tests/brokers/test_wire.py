"""The wire format: CloudEvents as their SDK reads and writes them, and trace context."""

import datetime as dt
import json
import subprocess
import sys
import textwrap
from typing import Any

import nats
import pytest
from cloudevents.core.bindings import amqp, http, kafka
from cloudevents.core.formats.json import JSONFormat
from cloudevents.core.v1.event import CloudEvent
from opentelemetry import trace
from pamqp import frame

from helpers_messages import make_message
from postroom.brokers import BrokerOptions, Delivered
from postroom.brokers.amqp_wire import publish
from postroom.brokers.mould import mould, own_values, shape_of
from postroom.brokers.nats import NatsBroker
from postroom.brokers.nats_wire import publish_command
from postroom.brokers.receiving import Delivery, delivery
from postroom.brokers.redis_wire import entry, xadd
from postroom.messages import Draft, Message, Prefix, encode, new_id, wire_headers
from servers import NatsServer

ODD = make_message(
    b'{"total":42}',
    key='naïve "key" 100% 世界',
    type="order.placed.v1",
    aggregate_type="order",
    aggregate_id="№ 7",
    headers={"mine": "grüße"},
)
PLAIN = make_message(b'{"total":42}', key="order-17")
BARE = make_message(b"\x00\xff", content_type="application/octet-stream")
SOURCE = "urn:shop:größe"
WRITTEN = dt.datetime(2025, 10, 9, 8, 53, 20, 1, dt.UTC)


def received(headers: dict[str, Any], payload: bytes = b"", key: str | None = None) -> Delivery:
    return delivery(
        headers, payload, topic="t", source="s", claim=1, receipt=None, unnamed="unnamed", key=key
    )


def check(event: Any, message: Message) -> None:
    """What the SDK made of a message of ours."""
    assert event.get_id() == message.id
    assert event.get_type() == message.type
    assert event.get_source() == SOURCE
    assert event.get_specversion() == "1.0"
    assert event.get_time() == WRITTEN
    assert event.get_extension("partitionkey") == message.key
    assert event.get_datacontenttype() == message.content_type
    data = event.get_data()
    assert (
        json.dumps(data, separators=(",", ":")).encode() if isinstance(data, dict) else data
    ) == message.payload


@pytest.mark.parametrize("message", [ODD, PLAIN, BARE])
def test_http(message: Message) -> None:
    headers = wire_headers(message, source=SOURCE)
    sent = http.HTTPMessage(headers=headers, body=message.payload)
    check(http.from_binary(sent, JSONFormat()), message)


@pytest.mark.parametrize("message", [ODD, PLAIN, BARE])
def test_kafka(message: Message) -> None:
    headers = wire_headers(message, source=SOURCE, prefix="ce_")
    encoded = {name: value.encode() for name, value in headers.items()}
    sent = kafka.KafkaMessage(headers=encoded, key=None, value=message.payload)
    check(kafka.from_binary(sent, JSONFormat()), message)


@pytest.mark.parametrize("message", [ODD, PLAIN, BARE])
@pytest.mark.parametrize("prefix", ["cloudEvents_", "cloudEvents:"])
def test_amqp(message: Message, prefix: Prefix) -> None:
    headers = wire_headers(message, source=SOURCE, prefix=prefix)
    sent = amqp.AMQPMessage(
        properties={"content-type": message.content_type},
        application_properties=headers,
        application_data=message.payload,
    )
    check(amqp.from_binary(sent, JSONFormat()), message)


@pytest.mark.parametrize("message", [ODD, PLAIN, BARE, PLAIN._replace(headers_json='{"a":"b"}')])
def test_nats_has_the_content_type_as_an_attribute(message: Message) -> None:
    """Its binding is that of HTTP in all but this."""
    command = publish_command(message, b"x", source=SOURCE, epoch=3, max_payload=1_000_000)
    assert isinstance(command, bytes)
    head = command.partition(b"\r\n")[2].partition(b"\r\n\r\n")[0].decode()
    headers = dict(line.split(": ", 1) for line in head.split("\r\n")[1:])
    assert headers["ce-datacontenttype"] == message.content_type
    del headers["content-type"]
    attributes = {name: value for name, value in headers.items() if name.startswith("ce-")}
    assert all(value.isascii() for value in attributes.values())
    check(http.from_binary(http.HTTPMessage(headers, message.payload), JSONFormat()), message)


async def test_nats_over_the_wire(nats_server: NatsServer) -> None:
    topic = f"t{new_id()}"
    async with await nats.connect(nats_server.url) as client:
        await client.jetstream().add_stream(name=topic, subjects=[topic])
        broker = NatsBroker(nats_server.url, BrokerOptions(source=SOURCE))
        message = ODD._replace(topic=topic)
        assert await broker.send([message]) == [Delivered()]
        await broker.close()
        stored = await client.jetstream().get_msg(topic, 1)
        assert stored.headers is not None
        event = http.from_binary(http.HTTPMessage(stored.headers, stored.data or b""), JSONFormat())
        check(event, message)
        await client.jetstream().delete_stream(topic)


def _of_sdk() -> CloudEvent:
    attributes = {
        "id": "a-1",
        "source": "/elsewhere",
        "type": "größe.changed",
        "specversion": "1.0",
        "datacontenttype": "application/json",
        "partitionkey": 'a "b" 50%',
        "time": WRITTEN,
    }
    return CloudEvent(attributes=attributes, data={"a": 1})


def test_events_of_the_sdk_are_read_under_every_prefix() -> None:
    event, form = _of_sdk(), JSONFormat()
    over_http = http.to_binary(event, form)
    over_kafka = kafka.to_binary(event, form)
    over_amqp = amqp.to_binary(event, form)
    colons = {
        name.replace("cloudEvents_", "cloudEvents:"): value
        for name, value in over_amqp.application_properties.items()
    }
    came = [
        received(over_http.headers),
        received({name: value.decode() for name, value in over_kafka.headers.items()}),
        received({**over_amqp.application_properties, **over_amqp.properties}),
        received({**colons, **over_amqp.properties}),
    ]
    for each in came:
        assert (each.id, each.type) == ("a-1", "größe.changed")
        assert (each.key, each.content_type) == ('a "b" 50%', "application/json")


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ("plain", "plain"),
        ('"quoted \\"once\\" with \\\\"', 'quoted "once" with \\'),
        ("caf%C3%A9", "café"),
        ("caf%c3%a9", "café"),
        ("100%", "100%"),
        ("%C0%A0", "%C0%A0"),  # an overlong space: nobody may take it for one
        ("", ""),
    ],
)
def test_attributes_from_http_and_nats_are_decoded(value: str, key: str) -> None:
    assert received({"ce-partitionkey": value}).key == key


def test_a_message_without_attributes() -> None:
    came = received({"Event_ID": "7", "event_type": "t"}, key="k")
    assert (came.id, came.type, came.key) == ("7", "t", "k")
    assert came.content_type == "application/octet-stream"
    assert received({}).id == "unnamed"


def test_position_and_epoch_are_there_for_diagnosis() -> None:
    headers = wire_headers(PLAIN._replace(lane=3, position=17), source="s", epoch=9)
    assert headers["postroom-position"] == "3:17"
    assert headers["postroom-epoch"] == "9"


# ── Trace context ──────────────────────────────────────────────────────────────────────────────

TRACE, SPAN = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def in_span(**more: Any) -> dict[str, str]:
    """The headers of a message that is published inside a span."""
    state = trace.TraceState([("vendor", "1")])
    flags = trace.TraceFlags(trace.TraceFlags.SAMPLED)
    context = trace.SpanContext(TRACE, SPAN, is_remote=False, trace_flags=flags, trace_state=state)
    with trace.use_span(trace.NonRecordingSpan(context)):
        encoded = encode(Draft(payload={}, type="t", **more))
    return dict(json.loads(encoded.headers or "{}"))


def test_a_span_goes_with_what_is_published_in_it() -> None:
    assert in_span() == {"traceparent": PARENT, "tracestate": "vendor=1"}
    assert in_span(headers={"a": "b"}) == {
        "traceparent": PARENT,
        "tracestate": "vendor=1",
        "a": "b",
    }


@pytest.mark.parametrize("name", ["traceparent", "TraceParent", "tracestate"])
def test_headers_of_the_publishers_own_win(name: str) -> None:
    assert in_span(headers={name: "mine"}) == {name: "mine"}


def test_without_a_span_nothing_is_added() -> None:
    assert encode(Draft(payload={}, type="t")).headers is None


def test_publishing_imports_no_opentelemetry() -> None:
    code = """
        import sys
        from postroom.messages import Draft, encode
        assert encode(Draft(payload={}, type="t")).headers is None
        assert not [name for name in sys.modules if name.startswith("opentelemetry")]
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_the_trace_reaches_the_consumer_as_it_was() -> None:
    message = make_message(headers=in_span())
    for prefix in ("ce-", "ce_", "cloudEvents_"):
        came = received(wire_headers(message, source="s", prefix=prefix))  # type: ignore[arg-type]
        assert came.headers["traceparent"] == PARENT
        assert came.headers["tracestate"] == "vendor=1"


@pytest.mark.parametrize("prefix", ["ce-", "ce_", "cloudEvents_"])
@pytest.mark.parametrize(
    "wishes",
    [
        {},
        {"key": 'naïve "key" 100% 世界'},
        {"key": "", "aggregate_type": "order", "aggregate_id": "№ 7 %d"},
        {"aggregate_id": "7", "type": "100% größe", "content_type": "text/%s"},
    ],
)
def test_headers_out_of_a_mould_are_those_that_are_made_one_by_one(
    prefix: Prefix, wishes: dict[str, Any]
) -> None:
    message = make_message(b"1", **wishes)
    said = wire_headers(message, source=SOURCE, epoch=7, prefix=prefix)
    own = iter(own_values(message, prefix))
    filled = [
        (name, next(own) if value is None else value)
        for name, value in mould(shape_of(message), source=SOURCE, epoch=7, prefix=prefix)
    ]
    assert filled == [(name, value.encode()) for name, value in said.items()]
    assert next(own, None) is None


@pytest.mark.parametrize("message", [ODD, PLAIN, BARE, PLAIN._replace(type="100% %d größe")])
def test_redis_and_rabbitmq_are_sent_every_header(message: Message) -> None:
    said = wire_headers(message, source=SOURCE, epoch=7)
    command = xadd(message, "p%", source=SOURCE, epoch=7)
    assert isinstance(command, bytes)
    words = words_of(command)
    assert words[:3] == [b"XADD", b"p%" + message.topic.encode(), b"*"]
    assert entry(words[3:]) == (said, message.payload)
    frames = publish(message, channel=1, exchange="e", source=SOURCE, epoch=7, frame_max=131_072)
    assert isinstance(frames, bytes)
    used, _, _ = frame.unmarshal(frames)
    _, _, head = frame.unmarshal(frames[used:])
    said = wire_headers(message, source=SOURCE, epoch=7, prefix="cloudEvents_")
    assert head.properties.headers == said


def words_of(command: bytes) -> list[bytes]:
    """The words of a command as Redis reads them: by their lengths, and to the last byte."""
    count, _, rest = command[1:].partition(b"\r\n")
    words = []
    for _ in range(int(count)):
        assert rest[:1] == b"$"
        size, _, rest = rest[1:].partition(b"\r\n")
        words.append(rest[: int(size)])
        assert rest[int(size) : int(size) + 2] == b"\r\n"
        rest = rest[int(size) + 2 :]
    assert rest == b""
    return words
