"""What only SQS and SNS do: names, groups, attributes, limits, batches, queues that are missing."""

import asyncio
import contextlib
import json
import logging
import re
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import eventually_async
from helpers_aws import client, make_queue, make_redriven_queue, make_sns_topic
from helpers_messages import make_message, make_messages
from postroom.brokers import (
    Broker,
    BrokerOptions,
    CanExamine,
    CanReceive,
    Delivered,
    Delivery,
    Permanent,
    Transient,
    Unknown,
)
from postroom.brokers.aws_address import AwsAddress
from postroom.brokers.aws_sending import MAX_BYTES
from postroom.brokers.aws_wire import entry_of, failure_of, group_of, refusal_of, taken_of
from postroom.brokers.receiving import Subscription
from postroom.brokers.sns import SnsBroker
from postroom.brokers.sqs import SqsBroker, open_broker
from postroom.errors import ConfigurationError, MissingDriver, Unreachable
from postroom.messages import new_id, wire_headers
from proxy import ChaosProxy
from servers import MotoServer

OPTIONS = BrokerOptions(send_timeout_seconds=30)
QUICK = BrokerOptions(send_timeout_seconds=2)


class Desk:
    """A queue of our own, a broker that sends to it, and a way to open others."""

    def __init__(self, server: MotoServer) -> None:
        self.server = server
        self.topic = f"t{new_id()}"
        self._opened: list[Any] = []

    def open(self, name: str = "{topic}", more: str = "", service: str = "sqs") -> Any:
        made = {"sqs": SqsBroker, "sns": SnsBroker}[service]
        self._opened.append(made(self.server.aws(service, name, more), OPTIONS))
        return self._opened[-1]

    async def close(self) -> None:
        for broker in self._opened:
            await broker.close()


@pytest.fixture
async def desk(moto_server: MotoServer) -> AsyncIterator[Desk]:
    made = Desk(moto_server)
    yield made
    await made.close()


async def take_all(inbox: Subscription, count: int) -> list[Delivery]:
    taken: list[Delivery] = []

    async def more() -> bool:
        taken.extend(await inbox.take(10))
        return len(taken) >= count

    await eventually_async(more, timeout=30)
    return taken


# ── Names and credentials ──────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("url", "topic", "name"),
    [
        ("sqs://", "orders", "orders"),
        ("sqs://eu-central-1", "orders.created", "orders-created"),
        ("sqs://eu-central-1/shop-{topic}.fifo", "orders.created", "shop-orders-created.fifo"),
        ("sqs://eu-central-1/all", "orders.created", "all"),
        ("sns://us-gov-west-1/{topic}", "a_b-c", "a_b-c"),
    ],
)
def test_a_topic_has_a_queue(url: str, topic: str, name: str) -> None:
    address = AwsAddress.of(url, {})
    assert address.name_of(topic) == name
    assert address.fifo is name.endswith(".fifo")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("sqs://eu-central-1:4566/x", "endpoint"),
        ("sqs://nowhere/x", "no region"),
        ("sqs://eu-central-1/a.b", "names no queue"),
        ("sqs://eu-central-1/{key}", "names no queue"),
        ("sqs://eu-central-1/x?endpint=y", "no option 'endpint'"),
        ("sqs://eu-central-1/x?concurrency=0", "concurrency"),
        ("sqs://eu-central-1/x?visibility_seconds=50000", "visibility_seconds"),
        ("sqs://eu-central-1/x?access_key=canary", "together"),
        ("sns://eu-central-1/{topic}-{consumer}", "only sends"),
    ],
)
def test_what_cannot_work_is_refused_at_once(url: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said) as caught:
        AwsAddress.of(url, {})
    assert "canary" not in str(caught.value)


def test_credentials_come_from_the_url_or_from_options_and_are_not_shown() -> None:
    written = AwsAddress.of("sqs://KEY:can%2Fary@eu-central-1/x?session_token=can/ary2", {})
    given_apart = AwsAddress.of(
        "sqs://eu-central-1/x",
        {"access_key": "KEY", "secret_key": "can/ary", "session_token": "can/ary2"},
    )
    assert written.settings() == given_apart.settings()
    assert written.settings()["aws_secret_access_key"] == "can/ary"
    assert "can/ary" not in repr(written) + str(written)
    assert "can/ary" not in written.without_secrets("bad signature of can/ary and can/ary2")


async def test_no_secret_gets_out(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "postroom")
    url = f"sqs://KEY:canary-1@us-east-1/{{topic}}?endpoint={desk.server.url}"
    told: list[Any] = []
    for more in ("", "1"):  # and to a port where nobody is
        broker = SqsBroker(url + more, QUICK)
        told += [broker, await broker.send([make_message(topic=desk.topic)])]
        with pytest.raises(Unreachable) if more else contextlib.nullcontext():
            await broker.ping()
        await broker.close()
    assert "canary-1" not in repr(told) + caplog.text


async def test_without_credentials_it_says_so(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    broker = SqsBroker(f"sqs://us-east-1/x?endpoint={desk.server.url}", QUICK)
    (outcome,) = await broker.send([make_message()])
    assert isinstance(outcome, Transient)
    assert (outcome.code, outcome.down) == ("no_credentials", "broker")
    await broker.close()


# ── On the wire ────────────────────────────────────────────────────────────────────────────────

PAYLOADS = st.one_of(st.binary(), st.text().map(str.encode), st.just(b""), st.just(b"\r\n\t"))


@given(payload=PAYLOADS, own=st.dictionaries(st.from_regex(r"[a-z]{1,9}", fullmatch=True), st.text(
    st.characters(exclude_categories=["Cs", "Cc"]))))  # fmt: skip
def test_every_payload_and_header_comes_back_as_it_was(payload: bytes, own: dict[str, str]) -> None:
    message = make_message(payload, topic="orders.created", key="ключ", headers=own)
    entry = entry_of(message, source="shop", epoch=1, max_bytes=MAX_BYTES)
    assert not isinstance(entry, Permanent)
    assert len(entry.attributes) <= 10
    fit = re.compile("[\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]+")
    for text in (entry.body, *(each["StringValue"] for each in entry.attributes.values())):
        assert fit.fullmatch(text)
    taken = taken_of(entry.body, entry.attributes)
    assert taken.payload == payload
    assert taken.topic == "orders.created"
    assert taken.headers == wire_headers(message, source="shop", epoch=1)


def test_what_filter_policies_read_stands_apart() -> None:
    message = make_message(aggregate_type="order", aggregate_id="17")
    entry = entry_of(message, source="shop", epoch=1, max_bytes=MAX_BYTES)
    assert not isinstance(entry, Permanent)
    said = {name: value["StringValue"] for name, value in entry.attributes.items()}
    assert said.pop("headers")
    assert said == {
        "event_id": message.id,
        "event_type": "order.placed.v1",
        "aggregate_type": "order",
        "aggregate_id": "17",
    }


@pytest.mark.parametrize(("over", "fits"), [(-1, True), (0, True), (1, False)])
def test_the_limit_counts_body_and_attributes(over: int, fits: bool) -> None:
    message = make_message(b"x")
    small = entry_of(message, source="shop", epoch=1, max_bytes=MAX_BYTES)
    assert not isinstance(small, Permanent)
    assert small.size == 1 + sum(
        len(name) + len(value["DataType"]) + len(value["StringValue"])
        for name, value in small.attributes.items()
    )
    large = message._replace(payload=b"x" * (MAX_BYTES - small.size + 1 + over))
    entry = entry_of(large, source="shop", epoch=1, max_bytes=MAX_BYTES)
    assert isinstance(entry, Permanent) is not fits
    if isinstance(entry, Permanent):
        assert entry.code == "too_large"


@pytest.mark.parametrize(
    "body", ["", "{", "[]", '{"Type": "Notification"}', '{"Type": 1}', "\ud800"]
)
@pytest.mark.parametrize("headers", [None, "[]", "{", "1", '{"a": 1}'])
def test_somebody_elses_message_is_its_body(body: str, headers: str | None) -> None:
    attributes: dict[str, Any] = {"number": {"DataType": "Binary", "BinaryValue": b"x"}}
    if headers is not None:
        attributes["headers"] = {"DataType": "String", "StringValue": headers}
    taken = taken_of(body, attributes)
    assert taken.payload == body.encode("utf-8", "surrogatepass")
    assert taken.topic is None


def test_a_group_is_the_key_or_tells_keys_apart() -> None:
    keys = [None, "a", "a b", "é", "x" * 128, "x" * 129, "x" * 255, "postroom:a", "💌"]
    groups = [group_of(make_message(key=key)) for key in keys]
    assert len(set(groups)) == len(keys)
    assert groups[1] == "a"
    assert groups[4] == "x" * 128
    assert all(re.fullmatch(r"[!-~]{1,128}", group) for group in groups)


@pytest.mark.parametrize(
    ("code", "status", "expected"),
    [
        ("AWS.SimpleQueueService.NonExistentQueue", 400, ("no_queue", "topic")),
        ("AccessDenied", 403, ("not_permitted", "topic")),
        ("InvalidClientTokenId", 403, ("not_permitted", "broker")),
        ("KmsDisabled", 400, ("not_permitted", "topic")),
        ("RequestThrottled", 403, ("throttled", "topic")),
        ("ServiceUnavailable", 503, ("ServiceUnavailable", "broker")),
        ("InternalFailure", 500, ("InternalFailure", "broker")),
        ("InvalidMessageContents", 400, None),
        ("BatchRequestTooLong", 400, None),
    ],
)
def test_what_an_error_means(code: str, status: int, expected: tuple[str, str] | None) -> None:
    outcome = refusal_of(code, "said", status, name="orders", service="sqs")
    if expected is None:
        assert outcome is None
    else:
        assert isinstance(outcome, Unknown if status == 500 else Transient)
        assert (outcome.code, outcome.down) == expected


def test_the_fault_of_one_entry() -> None:
    def judged(code: str, fault: bool) -> Any:
        failed = {"Id": "0", "Code": code, "Message": "said", "SenderFault": fault}
        return failure_of(failed, name="orders", service="sqs")

    assert isinstance(judged("InvalidMessageContents", True), Permanent)
    assert judged("InternalError", False) == Transient(
        "InternalError", "SQS refused it: said (InternalError)"
    )
    assert judged("KmsThrottled", True).down == "topic"


# ── Sending ────────────────────────────────────────────────────────────────────────────────────


async def test_it_is_a_broker_that_receives_and_examines(desk: Desk) -> None:
    broker = desk.open()
    assert isinstance(broker, Broker)
    assert isinstance(broker, CanReceive)
    assert isinstance(broker, CanExamine)
    assert isinstance(desk.open(service="sns"), CanExamine)
    assert broker.capabilities.max_bytes == 1_048_576
    assert broker.capabilities.max_batch == 160


async def test_a_missing_queue_says_how_to_make_one_and_is_found_when_made(desk: Desk) -> None:
    broker = desk.open("{topic}.fifo")
    (outcome,) = await broker.send([make_message(topic=desk.topic)])
    assert isinstance(outcome, Transient)
    assert (outcome.code, outcome.down) == ("no_queue", "topic")
    assert f"create-queue --queue-name {desk.topic}.fifo" in outcome.text
    await make_queue(desk.server, f"{desk.topic}.fifo")
    assert await broker.send([make_message(topic=desk.topic)]) == [Delivered()]


async def test_one_bad_topic_is_no_trouble_for_others(desk: Desk) -> None:
    await make_queue(desk.server, desk.topic)
    batch = [make_message(topic=topic) for topic in (desk.topic, "nowhere", "x" * 90, desk.topic)]
    outcomes = await desk.open().send(batch)
    assert outcomes[0] == outcomes[3] == Delivered()
    assert isinstance(outcomes[1], Transient)
    assert isinstance(outcomes[2], Permanent)
    assert outcomes[2].code == "bad_topic"


async def test_a_queue_that_takes_less_refuses_only_what_is_too_large(desk: Desk) -> None:
    """The whole request is refused for one of its messages; the others are sent again alone."""
    await make_queue(desk.server, desk.topic, MaximumMessageSize="2048")
    batch = make_messages(10, topic=desk.topic, keys=10)
    batch[4] = batch[4]._replace(payload=b"x" * 4000)
    outcomes = await desk.open().send(batch)
    refused = [index for index, outcome in enumerate(outcomes) if outcome != Delivered()]
    assert refused == [4]
    assert isinstance(outcomes[4], Permanent)


async def test_a_fifo_queue_drops_what_it_has_and_takes_a_redrive(desk: Desk) -> None:
    await make_queue(desk.server, f"{desk.topic}.fifo")
    broker = desk.open("{topic}.fifo")
    message = make_message(topic=desk.topic, key="k")
    for each in (message, message, message._replace(redrives=1)):
        assert await broker.send([each]) == [Delivered()]
    inbox = await broker.receive([desk.topic], consumer="c")
    first = await take_all(inbox, 1)
    await inbox.ack(first)
    while more := await inbox.take(10):
        first += more
        await inbox.ack(more)
    assert [each.id for each in first] == [message.id] * 2
    await inbox.close()


async def test_all_topics_may_share_a_queue(desk: Desk) -> None:
    await make_queue(desk.server, desk.topic)
    broker = desk.open(desk.topic)
    batch = [make_message(topic="orders.created"), make_message(topic="payments")]
    assert await broker.send(batch) == [Delivered()] * 2
    inbox = await broker.receive(["orders.created", "payments"], consumer="c")
    taken = await take_all(inbox, 2)
    assert {each.id: each.topic for each in taken} == {m.id: m.topic for m in batch}
    await inbox.close()


async def test_what_an_answer_does_not_mention_is_unknown(desk: Desk) -> None:
    broker = desk.open()
    message = make_message()
    entry = entry_of(message, source="s", epoch=0, max_bytes=MAX_BYTES)
    assert not isinstance(entry, Permanent)
    outcomes = broker._judge("orders", {0: entry, 1: entry}, {"Successful": [{"Id": "1"}]})
    assert isinstance(outcomes[0], Unknown)
    assert outcomes[1] == Delivered()


async def test_a_lost_answer_leaves_it_unknown_and_a_fifo_queue_takes_it_once(desk: Desk) -> None:
    await make_queue(desk.server, f"{desk.topic}.fifo")
    with ChaosProxy(desk.server.url) as proxy:
        url = f"sqs://test:secret@us-east-1/{{topic}}.fifo?endpoint={proxy.url}"
        broker = SqsBroker(url, OPTIONS)
        message = make_message(topic=desk.topic, key="k")
        lost = proxy.lose_reply(containing=b'"MD5OfMessageBody"')
        (outcome,) = await broker.send([message])
        assert lost.happened
        assert isinstance(outcome, Unknown)
        assert outcome.down == "broker"
        assert await broker.send([message]) == [Delivered()]
        inbox = await broker.receive([desk.topic], consumer="c")
        taken = await take_all(inbox, 1)
        await inbox.ack(taken)
        assert await inbox.take(10) == []
        assert [each.id for each in taken] == [message.id]
        await inbox.close()
        await broker.close()


async def test_a_connection_that_was_reset_is_not_one_that_could_not_be_made(desk: Desk) -> None:
    import aiohttp
    from botocore.exceptions import EndpointConnectionError

    def told(before: Exception) -> type:
        error = EndpointConnectionError(endpoint_url="http://aws")
        error.__context__ = before
        return type(desk.open().link._no_answer(error, sent=True))

    assert told(aiohttp.ClientOSError(104, "Connection reset by peer")) is Unknown
    refused = aiohttp.ClientConnectorError(None, OSError(111, "refused"))  # type: ignore[arg-type]
    assert told(refused) is Transient


async def test_silence_ends_at_the_deadline(desk: Desk) -> None:
    await make_queue(desk.server, desk.topic)
    with ChaosProxy(desk.server.url) as proxy:
        broker = SqsBroker(f"sqs://test:secret@us-east-1?endpoint={proxy.url}", QUICK)
        assert await broker.send([make_message(topic=desk.topic)]) == [Delivered()]
        proxy.freeze("to_client")
        outcomes = await broker.send(make_messages(30, topic=desk.topic))
        assert {type(outcome) for outcome in outcomes} <= {Unknown, Transient}
        assert {outcome.down for outcome in outcomes if isinstance(outcome, Unknown)} == {"broker"}
        proxy.thaw()
        assert await broker.send([make_message(topic=desk.topic)]) == [Delivered()]
        await broker.close()


async def test_it_works_after_the_server_was_killed(desk: Desk) -> None:
    desk.server.require_private()
    await make_queue(desk.server, desk.topic)
    broker = desk.open()
    message = make_message(topic=desk.topic)
    assert await broker.send([message]) == [Delivered()]
    inbox = await broker.receive([desk.topic], consumer="c")
    assert len(await take_all(inbox, 1)) == 1
    await asyncio.to_thread(desk.server.kill)
    (outcome,) = await broker.send([message])
    assert isinstance(outcome, Transient | Unknown)
    assert outcome.down == "broker"
    with pytest.raises(Unreachable):
        await broker.ping()
    with pytest.raises(Unreachable):
        await take_all(inbox, 1)
    await asyncio.to_thread(desk.server.start)
    await make_queue(desk.server, desk.topic)  # the server had it in memory only
    await broker.ping()
    assert await broker.send([message]) == [Delivered()]
    assert [each.id for each in await take_all(inbox, 1)] == [message.id]
    await inbox.close()


def test_it_works_on_one_loop_after_another(moto_server: MotoServer) -> None:
    topic = f"t{new_id()}"
    asyncio.run(make_queue(moto_server, topic))
    broker = open_broker(moto_server.aws("sqs"), OPTIONS)
    for _ in range(2):
        assert asyncio.run(broker.send([make_message(topic=topic)])) == [Delivered()]
    asyncio.run(broker.close())


async def test_close_ends_it(desk: Desk) -> None:
    broker = desk.open()
    await broker.ping()
    await broker.close()
    (outcome,) = await broker.send([make_message()])
    assert isinstance(outcome, Transient)
    assert outcome.code == "closed"
    with pytest.raises(Unreachable):
        await broker.ping()


def test_without_aiobotocore_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiobotocore.session", None)
    with pytest.raises(MissingDriver, match="postroom\\[sqs\\]"):
        SqsBroker("sqs://us-east-1")


# ── Receiving ──────────────────────────────────────────────────────────────────────────────────


async def test_what_is_acknowledged_does_not_come_again(desk: Desk) -> None:
    await make_queue(desk.server, desk.topic)
    broker = desk.open(more="&visibility_seconds=600")
    sent = make_messages(25, topic=desk.topic)
    assert await broker.send(sent) == [Delivered()] * 25
    inbox = await broker.receive([desk.topic], consumer="c")
    assert isinstance(inbox, Subscription)
    assert not inbox.exclusive
    assert inbox.extend_seconds == 200
    taken = await take_all(inbox, 25)
    assert {each.id for each in taken} == {message.id for message in sent}
    assert {each.seen for each in taken} == {0}
    assert {each.key for each in taken} == {message.key for message in sent}
    kept, dropped = taken[:5], taken[5:]
    await inbox.ack(dropped)
    await inbox.give_back(kept)
    again = await take_all(inbox, 5)
    assert {each.id for each in again} == {each.id for each in kept}
    assert {each.seen for each in again} == {1}
    await inbox.ack(again)
    assert await inbox.take(10) == []
    await inbox.close()


async def test_a_group_comes_again_in_its_order_from_what_was_given_back(desk: Desk) -> None:
    """The first was handled, the second given back, and the consumer acknowledges the third."""
    await make_queue(desk.server, f"{desk.topic}.fifo")
    broker = desk.open("{topic}.fifo", more="&visibility_seconds=600")
    sent = [make_message(b"%d" % n, topic=desk.topic, key="k", position=n + 1) for n in range(5)]
    for message in sent:
        assert await broker.send([message]) == [Delivered()]
    inbox = await broker.receive([desk.topic], consumer="c")
    taken = await take_all(inbox, 5)
    assert [each.payload for each in taken] == [b"0", b"1", b"2", b"3", b"4"]
    await inbox.ack([taken[0]])
    await inbox.give_back([taken[1]])
    await inbox.ack(taken[2:])
    again = await take_all(inbox, 4)
    assert [each.payload for each in again] == [b"1", b"2", b"3", b"4"]
    await inbox.ack(again)
    assert await inbox.take(10) == []
    await inbox.close()


async def test_close_gives_back_what_is_in_hand_and_what_was_not_handed_out(desk: Desk) -> None:
    url = await make_queue(desk.server, desk.topic)
    broker = desk.open(more="&visibility_seconds=600")
    assert await broker.send(make_messages(10, topic=desk.topic)) == [Delivered()] * 10
    inbox = await broker.receive([desk.topic], consumer="c")
    inbox._ready.extend(await inbox._poll(url, 10))
    handled, _ = await inbox.take(2)
    await inbox.ack([handled])
    await inbox.close()
    other = await broker.receive([desk.topic], consumer="c")
    again = await take_all(other, 9)
    assert handled.id not in {each.id for each in again}
    await other.close()


async def test_each_consumer_has_a_queue_that_sns_fills(desk: Desk) -> None:
    """Raw delivery to one, the envelope of SNS to the other; both read the same."""
    names = [f"{consumer}-{desk.topic}" for consumer in ("billing", "stock")]
    for name in names:
        await make_queue(desk.server, name)
    await make_sns_topic(desk.server, desk.topic, queues=names[:1])
    await make_sns_topic(desk.server, desk.topic, queues=names[1:], raw=False)
    sender = desk.open(service="sns")
    await sender.ping()
    own = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    batch = [
        make_message(b'{"total": 42}', topic=desk.topic, key="k 1", headers=own),
        make_message(b"\x00\xff", topic=desk.topic),
        make_message(b"", topic=desk.topic),
    ]
    assert await sender.send(batch) == [Delivered()] * 3
    reader = desk.open("{consumer}-{topic}")
    (outcome,) = await reader.send(batch[:1])
    assert isinstance(outcome, Transient)
    assert outcome.code == "bad_url"
    for consumer in ("billing", "stock"):
        inbox = await reader.receive([desk.topic], consumer=consumer)
        taken = {each.id: each for each in await take_all(inbox, 3)}
        assert {id: each.payload for id, each in taken.items()} == {m.id: m.payload for m in batch}
        first = taken[batch[0].id]
        assert (first.key, first.type, first.topic) == ("k 1", "order.placed.v1", desk.topic)
        assert first.headers["traceparent"] == own["traceparent"]
        assert first.content_type == "application/json"
        await inbox.close()


async def test_to_receive_from_a_queue_that_is_missing(desk: Desk) -> None:
    with pytest.raises(Unreachable, match="there is no queue"):
        await desk.open().receive([desk.topic], consumer="c")


async def test_somebody_elses_message_has_the_id_sqs_gave_it(desk: Desk) -> None:
    url = await make_queue(desk.server, desk.topic)
    async with client(desk.server, "sqs") as sqs:
        made = await sqs.send_message(QueueUrl=url, MessageBody=json.dumps({"a": 1}))
    inbox = await desk.open().receive([desk.topic], consumer="c")
    (taken,) = await take_all(inbox, 1)
    assert (taken.id, taken.payload, taken.topic) == (made["MessageId"], b'{"a": 1}', desk.topic)
    await inbox.close()


# ── What would lose messages ───────────────────────────────────────────────────────────────────


async def test_examine_tells_of_queues_that_are_missing_or_have_nowhere_to_put_bad_ones(
    desk: Desk,
) -> None:
    await make_queue(desk.server, f"{desk.topic}-plain")
    await make_redriven_queue(desk.server, f"{desk.topic}-good")
    topics = [f"{desk.topic}-{name}" for name in ("missing", "plain", "good")]
    missing, plain = await desk.open().examine(topics)
    assert f"there is no queue {desk.topic}-missing; create one" in missing
    assert f"the queue {desk.topic}-plain has no redrive policy" in plain


async def test_examine_tells_of_sns_topics_that_are_missing_or_have_no_subscription(
    desk: Desk,
) -> None:
    await make_queue(desk.server, desk.topic)
    await make_sns_topic(desk.server, f"{desk.topic}-lonely")
    await make_sns_topic(desk.server, f"{desk.topic}-good", queues=[desk.topic])
    topics = [f"{desk.topic}-{name}" for name in ("missing", "lonely", "good")]
    missing, lonely = await desk.open(service="sns").examine(topics)
    assert f"there is no SNS topic {desk.topic}-missing; create one" in missing
    assert f"the SNS topic {desk.topic}-lonely has no subscription" in lonely


async def test_a_missing_sns_topic_is_down_and_a_fifo_one_takes_groups(desk: Desk) -> None:
    sender = desk.open("{topic}.fifo", service="sns")
    message = make_message(topic=desk.topic, key="k")
    (outcome,) = await sender.send([message])
    assert isinstance(outcome, Transient)
    assert (outcome.code, outcome.down) == ("no_topic", "topic")
    await make_queue(desk.server, f"{desk.topic}.fifo")
    await make_sns_topic(desk.server, f"{desk.topic}.fifo", queues=[f"{desk.topic}.fifo"])
    assert await sender.send([message]) == [Delivered()]
    inbox = await desk.open("{topic}.fifo").receive([desk.topic], consumer="c")
    (taken,) = await take_all(inbox, 1)
    assert (taken.id, taken.key) == (message.id, "k")
    await inbox.close()
