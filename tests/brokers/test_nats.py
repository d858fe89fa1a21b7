"""What only NATS JetStream does: streams, limits, duplicates, silence, secrets."""

import asyncio
import datetime as dt
import gc
import itertools
import json
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.js.api import DiscardPolicy, StreamConfig

from helpers_messages import make_message, make_messages
from postroom.brokers import BrokerOptions, Delivered, Permanent, Transient, Unknown
from postroom.brokers import nats as nats_broker
from postroom.brokers.nats import NatsBroker
from postroom.brokers.nats_link import Link
from postroom.brokers.nats_wire import answer_of, publish_command
from postroom.errors import ConfigurationError, MissingDriver, Unreachable
from postroom.messages import new_id, wire_headers
from proxy import ChaosProxy
from servers import NatsServer

PATIENT = BrokerOptions(send_timeout_seconds=20.0)
QUICK = BrokerOptions(send_timeout_seconds=4.0)  # for tests of silence: they wait it out


class Shelf:
    """A stream of our own and a broker that sends to it."""

    def __init__(self, server: NatsServer) -> None:
        self.server = server
        self.topic = f"t{new_id()}"
        self.broker = NatsBroker(server.url, PATIENT)

    async def make(self, topic: str | None = None, **settings: Any) -> None:
        topic = topic or self.topic
        async with await nats.connect(self.server.url) as client:
            config = StreamConfig(name=topic, subjects=[topic], **settings)
            await client.jetstream().add_stream(config)

    async def stored(self) -> list[Any]:
        async with await nats.connect(self.server.url) as client:
            jetstream = client.jetstream()
            state = (await jetstream.stream_info(self.topic)).state
            numbers = range(state.first_seq, state.last_seq + 1)
            return [await jetstream.get_msg(self.topic, number) for number in numbers]


@pytest.fixture
async def shelf(nats_server: NatsServer) -> AsyncIterator[Shelf]:
    made = Shelf(nats_server)
    yield made
    await made.broker.close()


async def test_a_missing_stream_says_how_to_make_one(shelf: Shelf) -> None:
    (outcome,) = await shelf.broker.send([make_message(topic=shelf.topic)])
    assert isinstance(outcome, Transient)
    assert (outcome.code, outcome.down) == ("no_stream", "topic")
    assert f"no JetStream stream captures subject {shelf.topic}" in outcome.text
    assert f"`nats stream add --subjects {shelf.topic}`" in outcome.text


async def test_a_missing_stream_is_no_trouble_for_other_topics(shelf: Shelf) -> None:
    await shelf.make()
    batch = [make_message(topic=topic) for topic in (shelf.topic, "nowhere", shelf.topic)]
    outcomes = await shelf.broker.send(batch)
    assert outcomes[0] == outcomes[2] == Delivered()
    assert isinstance(outcomes[1], Transient)


@pytest.mark.parametrize(("over", "fits"), [(-1, True), (0, True), (1, False)])
async def test_the_servers_limit_is_kept_without_sending(
    shelf: Shelf, over: int, fits: bool
) -> None:
    await shelf.make()
    await shelf.broker.ping()
    limit = shelf.broker.capabilities.max_bytes
    assert limit == 1_048_576
    message = make_message(b"", topic=shelf.topic)
    command = publish_command(message, b"x", source="postroom", epoch=0, max_payload=limit)
    assert isinstance(command, bytes)
    head = len(command.partition(b"\r\n")[2]) - 2
    message = message._replace(payload=b"x" * (limit - head + over))
    (outcome,) = await shelf.broker.send([message])
    if fits:
        assert outcome == Delivered()
    else:
        assert isinstance(outcome, Permanent)
        assert outcome.code == "too_large"
    assert await shelf.broker.send([make_message(topic=shelf.topic)]) == [Delivered()]


@pytest.mark.parametrize("created_us", [0, 1_000_000, 1_760_000_000_000_001, 1_760_000_000_120_000])
@pytest.mark.parametrize("redrives", [0, 2])
@pytest.mark.parametrize("key", [None, "schlüssel"])
@pytest.mark.parametrize(("aggregate_type", "aggregate_id"), [(None, None), ("order", "17")])
def test_the_short_way_to_a_head_says_what_all_brokers_say(
    created_us: int,
    redrives: int,
    key: str | None,
    aggregate_type: str | None,
    aggregate_id: str | None,
) -> None:
    message = make_message(
        key=key, aggregate_type=aggregate_type, aggregate_id=aggregate_id, redrives=redrives
    )._replace(created_us=created_us)
    said = wire_headers(message, source="shop", epoch=7)
    created = dt.datetime(1970, 1, 1, tzinfo=dt.UTC) + dt.timedelta(microseconds=created_us)
    assert said["ce-time"] == created.isoformat()
    command = publish_command(message, b"x", source="shop", epoch=7, max_payload=1_000_000)
    assert isinstance(command, bytes)
    head, _, payload = command.partition(b"\r\n")[2].partition(b"\r\n\r\n")
    assert payload == message.payload + b"\r\n"
    version, *lines = head.decode().split("\r\n")
    assert version == "NATS/1.0"
    sent = dict(line.split(": ", 1) for line in lines)
    own = {"Nats-Msg-Id": message.broker_id, "ce-datacontenttype": message.content_type}
    assert sent == {**said, **own}


@pytest.mark.parametrize("field", ["key", "type", "content_type", "aggregate_id"])
@pytest.mark.parametrize("end", ["\r", "\n", "\r\n"])
def test_a_line_end_in_any_field_is_refused(field: str, end: str) -> None:
    message = make_message()._replace(**{field: f"a{end}Evil: 1"})
    refused = publish_command(message, b"x", source="shop", epoch=0, max_payload=1_000_000)
    assert isinstance(refused, Permanent)
    assert refused.code == "bad_header"


async def test_the_streams_limit_is_permanent(shelf: Shelf) -> None:
    await shelf.make(max_msg_size=1_000)
    small, large = make_message(topic=shelf.topic), make_message(b"x" * 2_000, topic=shelf.topic)
    delivered, refused = await shelf.broker.send([small, large])
    assert delivered == Delivered()
    assert isinstance(refused, Permanent)
    assert refused.code == "too_large"


async def test_a_full_stream_is_the_topics_fault(shelf: Shelf) -> None:
    await shelf.make(max_msgs=2, discard=DiscardPolicy.NEW)
    outcomes = await shelf.broker.send(make_messages(3, topic=shelf.topic))
    assert outcomes[:2] == [Delivered()] * 2
    assert isinstance(outcomes[2], Transient)
    assert outcomes[2].down == "topic"
    assert "maximum messages exceeded" in outcomes[2].text


async def test_a_wish_that_is_not_met_is_the_messages_fault(shelf: Shelf) -> None:
    await shelf.make()
    wish = {"Nats-Expected-Last-Sequence": "99"}
    (outcome,) = await shelf.broker.send([make_message(topic=shelf.topic, headers=wish)])
    assert isinstance(outcome, Transient)
    assert outcome.down is None
    assert "wrong last sequence" in outcome.text


async def test_sent_twice_is_stored_once_and_a_redrive_again(shelf: Shelf) -> None:
    await shelf.make()
    own = {"Nats-Msg-Id": "mine", "nats-msg-id": "too", "nats-pin-id": "mine", "Nats-Pin-Id": "too"}
    message = make_message(topic=shelf.topic, headers=own)
    for sent in (message, message, message._replace(redrives=1), message._replace(redrives=1)):
        assert await shelf.broker.send([sent]) == [Delivered()]
    stored = await shelf.stored()
    assert [m.headers["Nats-Msg-Id"] for m in stored] == [message.id, f"{message.id}:r1"]
    assert [m.headers["event_id"] for m in stored] == [message.id] * 2
    assert not [name for m in stored for name in m.headers if name.lower() == "nats-pin-id"]


@pytest.mark.parametrize(
    "bad",
    [
        {"headers": {"a": "b\r\n\r\nPUB other 0"}},
        {"headers": {"a": "b\nNats-Rollup: all"}},
        {"headers": {"a\r\nb": "c"}},
        {"headers_json": "[1]"},
        {"headers_json": "{"},
        {"headers_json": '{"a": "\\ud800"}'},
        {"key": "a\r\nb"},
        {"type": "a\nb"},
        {"topic": "a b"},
        {"topic": "a\r\nPUB b 0\r\n\r\n"},
        {"topic": "$JS.API.STREAM.DELETE.x"},
        {"topic": "orders.>"},
        {"topic": ""},
    ],
)
async def test_nothing_in_a_message_speaks_to_the_server(shelf: Shelf, bad: dict[str, Any]) -> None:
    await shelf.make()
    messages = [make_message(**({"topic": shelf.topic} | one)) for one in ({}, bad, {})]
    outcomes = await shelf.broker.send(messages)
    assert outcomes[0] == outcomes[2] == Delivered()
    assert isinstance(outcomes[1], Permanent)
    assert outcomes[1].code in ("bad_header", "bad_topic")
    assert len(await shelf.stored()) == 2


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        ({"stream": "S", "seq": 1}, Delivered()),
        ({"stream": "S", "seq": 1, "duplicate": True}, Delivered()),
        ({"stream": 'the "error" stream', "seq": 1}, Delivered()),
        ({"error": {"code": 400, "err_code": 10054, "description": "too big"}}, Permanent),
        ({"error": {"code": 400, "description": "maximum message size exceeded"}}, Permanent),
        ({"error": {"code": 503, "err_code": 10023, "description": "insufficient"}}, "topic"),
        ({"error": {"code": 500, "err_code": 10047, "description": "storage"}}, "topic"),
        ({"error": {"code": 503, "err_code": 10008, "description": "no leader"}}, "topic"),
        ({"error": {"code": 503, "err_code": 10077, "description": "maximum bytes"}}, "topic"),
        ({"error": {"code": 400, "err_code": 10071, "description": "wrong last"}}, None),
        ({"error": {}, "seq": 0}, None),
        ({"hello": "world"}, None),
        ([], None),
        # Whatever replies on the subject, the connection of all the others must go on.
        ({"error": {"err_code": []}}, None),
        ({"error": {"err_code": {}}}, None),
    ],
)
def test_answers(answer: object, outcome: object) -> None:
    said = answer_of(json.dumps(answer).encode(), None, "orders")
    if outcome == Delivered():
        assert said == Delivered()
    elif outcome is Permanent:
        assert isinstance(said, Permanent)
    else:
        assert isinstance(said, Transient)
        assert said.down == outcome


async def test_a_silent_server_leaves_the_outcome_unknown(shelf: Shelf) -> None:
    shelf.broker = NatsBroker(shelf.server.url, QUICK)
    await shelf.make()
    assert await shelf.broker.send([make_message(topic=shelf.topic)]) == [Delivered()]
    shelf.server.require_private()
    batch = make_messages(50, topic=shelf.topic)
    with shelf.server.paused():
        began = time.monotonic()
        for outcome in await shelf.broker.send(batch):
            assert isinstance(outcome, Unknown)
            assert (outcome.code, outcome.down) == ("timeout", "broker")
        assert 3.9 < time.monotonic() - began < 10
        # The silent connection was given up, and a new one gets no greeting.
        for outcome in await shelf.broker.send(batch):
            assert isinstance(outcome, Transient)
            assert (outcome.code, outcome.down) == ("unreachable", "broker")
        with pytest.raises(Unreachable, match="cannot connect to NATS at nats://127"):
            await shelf.broker.ping()
    assert await shelf.broker.send(batch) == [Delivered()] * 50
    assert len(await shelf.stored()) == 51


async def test_a_silent_topic_does_not_make_the_broker_silent(shelf: Shelf) -> None:
    shelf.broker = NatsBroker(shelf.server.url, QUICK)
    await shelf.make()
    silent = f"{shelf.topic}-silent"
    await shelf.make(silent, no_ack=True)
    first, second = await shelf.broker.send(
        [make_message(topic=silent), make_message(topic=shelf.topic)]
    )
    assert isinstance(first, Unknown)
    assert (first.code, first.down) == ("timeout", "topic")
    assert second == Delivered()
    # Alone, too: the server echoes, so it lives, and the connection is kept.
    link = shelf.broker._link
    (alone,) = await shelf.broker.send([make_message(topic=silent)])
    assert isinstance(alone, Unknown)
    assert alone.down == "topic"
    assert shelf.broker._link is link


async def test_a_lost_answer_is_unknown_and_sending_again_adds_nothing(shelf: Shelf) -> None:
    await shelf.make()
    with ChaosProxy(shelf.server.url) as proxy:
        broker = NatsBroker(proxy.url, PATIENT)
        await broker.ping()
        batch = make_messages(20, topic=shelf.topic)
        loss = proxy.lose_reply(to=b"HPUB")
        outcomes = await broker.send(batch)
        assert loss.happened
        assert {(o.code, o.down) for o in outcomes if isinstance(o, Unknown)} == {
            ("connection_lost", "broker")
        }
        assert await broker.send(batch) == [Delivered()] * 20
        await broker.close()
    assert len(await shelf.stored()) == 20


async def test_answers_held_back_are_unknown(shelf: Shelf) -> None:
    await shelf.make()
    with ChaosProxy(shelf.server.url) as proxy:
        broker = NatsBroker(proxy.url, QUICK)
        await broker.ping()
        proxy.freeze("to_client")
        (outcome,) = await broker.send([make_message(topic=shelf.topic)])
        assert isinstance(outcome, Unknown)
        proxy.thaw()
        assert await broker.send([make_message(topic=shelf.topic)]) == [Delivered()]
        await broker.close()
    assert len(await shelf.stored()) == 2


async def test_nobody_there(unused_tcp_port: int, capfd: pytest.CaptureFixture[str]) -> None:
    broker = NatsBroker(f"nats://127.0.0.1:{unused_tcp_port}", PATIENT)
    answers = await asyncio.gather(*(broker.send(make_messages(2)) for _ in range(3)))
    for outcome in itertools.chain(*answers):
        assert isinstance(outcome, Transient)
        assert (outcome.code, outcome.down) == ("unreachable", "broker")
    with pytest.raises(Unreachable, match="Connect call failed"):
        await broker.ping()
    await broker.close()
    assert await broker.send([make_message()]) != [Delivered()]
    assert capfd.readouterr().err == ""


async def test_a_connection_lost_while_writing_prints_nothing(
    shelf: Shelf, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    await shelf.make()
    with ChaosProxy(shelf.server.url) as proxy:
        broker = NatsBroker(proxy.url, BrokerOptions())
        await broker.ping()
        proxy.freeze("to_server")
        batch = [make_message(b"x" * 100_000, topic=shelf.topic) for _ in range(300)]
        sending = asyncio.create_task(broker.send(batch))
        await asyncio.sleep(0.3)
        assert not sending.done()
        began = time.monotonic()
        await asyncio.to_thread(proxy.cut)
        outcomes = await sending
        assert time.monotonic() - began < 5  # not the timeout
        proxy.thaw()
        # What was on its way is unknown; what had no place in the window was not sent.
        assert {(type(o), o.code, o.down) for o in outcomes if not isinstance(o, Delivered)} == {
            (Unknown, "connection_lost", "broker"),
            (Transient, "not_sent", "broker"),
        }
        assert await broker.send(batch) == [Delivered()] * 300
        await broker.close()
    gc.collect()  # asyncio tells of errors nobody looked at when their task is thrown away
    assert caplog.text == ""
    assert capfd.readouterr().err == ""


async def test_a_killed_server_prints_nothing(
    shelf: Shelf, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    await shelf.make()
    shelf.server.require_private()
    assert await shelf.broker.send(make_messages(2, topic=shelf.topic)) == [Delivered()] * 2
    sending = asyncio.create_task(shelf.broker.send(make_messages(3_000, topic=shelf.topic)))
    await asyncio.sleep(0.02)
    await asyncio.to_thread(shelf.server.kill)
    outcomes = await sending
    assert {o.down for o in outcomes if isinstance(o, Unknown | Transient)} <= {"broker"}
    del sending
    gc.collect()
    assert caplog.text == ""
    assert capfd.readouterr().err == ""


async def test_the_window_is_bounded_by_rows(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    await shelf.make()
    seen = _watch_window(monkeypatch)
    extra = {"max_outstanding": "16"}
    broker = NatsBroker(shelf.server.url, BrokerOptions(send_timeout_seconds=20, extra=extra))
    batches = [make_messages(500, topic=shelf.topic) for _ in range(3)]
    for outcomes in await asyncio.gather(*(broker.send(batch) for batch in batches)):
        assert outcomes == [Delivered()] * 500
    assert 1 < max(rows for rows, _ in seen) <= 16
    await broker.close()


async def test_the_window_is_bounded_by_bytes(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    await shelf.make()
    seen = _watch_window(monkeypatch)
    monkeypatch.setattr(nats_broker, "MAX_OUTSTANDING_BYTES", 100_000)
    batch = [make_message(b"x" * 30_000, topic=shelf.topic) for _ in range(100)]
    assert await shelf.broker.send(batch) == [Delivered()] * 100
    assert 100_000 <= max(size for _, size in seen) <= 140_000


def _watch_window(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    seen: list[tuple[int, int]] = []
    expect = Link.expect

    def watched(link: Link, *arguments: Any) -> None:
        expect(link, *arguments)
        seen.append((len(link._waiting), link._bytes))

    monkeypatch.setattr(Link, "expect", watched)
    return seen


async def test_a_cancelled_send_gives_its_place_back(shelf: Shelf) -> None:
    await shelf.make()
    await shelf.broker.ping()
    shelf.server.require_private()
    with shelf.server.paused():
        sending = asyncio.create_task(shelf.broker.send(make_messages(100, topic=shelf.topic)))
        await asyncio.sleep(0.1)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
    link = shelf.broker._link
    assert link is not None
    assert (len(link._waiting), link._bytes) == (0, 0)
    assert await shelf.broker.send(make_messages(100, topic=shelf.topic)) == [Delivered()] * 100


def test_one_broker_on_two_loops_and_in_a_forked_child(nats_server: NatsServer) -> None:
    script = """
        import asyncio, os, sys
        sys.path.insert(0, sys.argv[2])
        import nats
        from helpers_messages import make_messages
        from postroom.brokers import Delivered, open_broker

        broker = open_broker(sys.argv[1])

        async def first():
            async with await nats.connect(sys.argv[1]) as client:
                await client.jetstream().add_stream(name="forked", subjects=["forked"])
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
        [sys.executable, "-c", textwrap.dedent(script), nats_server.url, tests],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "ok\n", done.stderr


def test_a_missing_library_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nats.aio.client", None)
    with pytest.raises(MissingDriver, match=r"pip install 'postroom\[nats\]'"):
        NatsBroker("nats://localhost")


def test_importing_brokers_imports_no_client() -> None:
    check = "import sys, postroom.brokers, postroom.brokers.nats; print('nats' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("nats://localhost", "nats://localhost:4222"),
        ("nats://", "nats://localhost:4222"),
        ("nats://u:p%40ss@a,b:5222", "nats://a:4222,nats://b:5222"),
        ("tls://token@[::1]:7", "tls://[::1]:7"),
    ],
)
def test_addresses(url: str, shown: str) -> None:
    assert repr(NatsBroker(url)) == shown


def test_bad_settings_are_refused_without_showing_secrets() -> None:
    with pytest.raises(ConfigurationError) as caught:
        NatsBroker("nats://user:s3cr3t@host:port")
    assert "s3cr3t" not in str(caught.value)
    with pytest.raises(ConfigurationError, match="max_outstanding"):
        NatsBroker("nats://", BrokerOptions(extra={"max_outstanding": "0"}))
    with pytest.raises(ConfigurationError, match="tls_ca"):
        NatsBroker("tls://", BrokerOptions(extra={"tls_ca": "/nowhere"}))
