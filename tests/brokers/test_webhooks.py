"""Webhooks to a receiver that misbehaves on purpose: what each misdeed is taken for."""

import asyncio
import contextlib
import logging
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from standardwebhooks import Webhook

from helpers import eventually_async
from helpers_messages import make_message, make_messages
from postroom.brokers import (
    Broker,
    BrokerOptions,
    Delivered,
    Permanent,
    Transient,
    Unknown,
    webhooks,
)
from postroom.brokers.webhooks import WebhookBroker, open_broker
from postroom.errors import MissingDriver, Unreachable
from postroom.testing.conformance import check_broker
from proxy import ChaosProxy
from servers import WebhookServer, free_port

HERE = "allow=127.0.0.1&allow_http=yes"
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
SOON = BrokerOptions(send_timeout_seconds=1.5)
PATIENT = BrokerOptions(send_timeout_seconds=60)

Open = Callable[..., WebhookBroker]


@pytest.fixture
async def opened(webhook_server: WebhookServer) -> AsyncIterator[Open]:
    """Opens brokers on a path of the receiver."""
    webhook_server.forget()
    brokers: list[WebhookBroker] = []

    def open_on(path: str, options: BrokerOptions = PATIENT, more: str = "") -> WebhookBroker:
        url = f"{webhook_server.url}{path}#{HERE}&unsigned=yes{more}"
        brokers.append(WebhookBroker(url, options))
        return brokers[-1]

    yield open_on
    for broker in brokers:
        await broker.close()


async def test_it_is_a_broker_as_the_relay_needs_it(
    opened: Open, webhook_server: WebhookServer
) -> None:
    broker = opened("/ok")
    assert isinstance(broker, Broker)

    def arrived() -> list[tuple[str, bytes]]:
        return [(each.headers["webhook-id"], each.body) for each in webhook_server.received]

    await check_broker(broker, arrived)


# ── Misdeeds ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("path", ["/slow_headers", "/silent", "/storm"])
async def test_whoever_does_not_come_to_an_answer_is_left_at_the_deadline(
    opened: Open, path: str
) -> None:
    began = time.monotonic()
    (outcome,) = await opened(path, SOON).send([make_message()])
    assert isinstance(outcome, Unknown)
    assert (outcome.code, outcome.down) == ("timeout", "broker")
    assert time.monotonic() - began >= 1.4


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/early_close", "bad_answer"),
        ("/half_head", "bad_answer"),
        ("/not_http", "bad_answer"),
        ("/switch", "bad_answer"),
        ("/huge_headers", "bad_answer"),
    ],
)
async def test_an_answer_that_is_none_leaves_it_unknown(opened: Open, path: str, code: str) -> None:
    (outcome,) = await opened(path).send([make_message()])
    assert isinstance(outcome, Unknown)
    assert (outcome.code, outcome.down) == (code, None)


@pytest.mark.parametrize("path", ["/endless_body/200", "/slow_body", "/wrong_length", "/shower"])
async def test_a_yes_counts_whatever_comes_after_it(
    opened: Open, webhook_server: WebhookServer, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks, "ANSWER_SECONDS", 0.3)
    batch = make_messages(3, keys=3)
    assert await opened(path).send(batch) == [Delivered()] * 3
    assert len(webhook_server.received) == 3


async def test_an_endless_answer_is_read_to_a_limit(
    opened: Open, webhook_server: WebhookServer
) -> None:
    with ChaosProxy(webhook_server.url) as proxy:
        url = f"{proxy.url}/endless_body/500#{HERE}&unsigned=yes"
        broker = WebhookBroker(url, PATIENT)
        (outcome,) = await broker.send([make_message()])
        assert isinstance(outcome, Transient)
        assert outcome.code == "http_500"
        assert len(outcome.text) < 300
        # It was not read to its end, so its connection cannot be kept.
        await eventually_async(lambda: proxy.connections == 0)
        await broker.close()


async def test_what_is_packed_stays_packed(opened: Open) -> None:
    (outcome,) = await opened("/gzip_bomb").send([make_message()])
    assert isinstance(outcome, Transient)
    assert outcome.code == "http_500"
    assert "said" not in outcome.text


@pytest.mark.parametrize("after", [0, 0.001, 0.005])
async def test_connections_that_end_between_requests_cost_nothing(
    opened: Open, webhook_server: WebhookServer, after: float
) -> None:
    broker = opened(f"/close_after?after={after}", more="&concurrency=2")
    sent = make_messages(60, keys=60)
    for message in sent:
        assert await broker.send([message]) == [Delivered()]
        await asyncio.sleep(after)
    assert {each.headers["webhook-id"] for each in webhook_server.received} == {m.id for m in sent}


async def test_connections_are_kept(opened: Open, webhook_server: WebhookServer) -> None:
    with ChaosProxy(webhook_server.url) as proxy:
        broker = WebhookBroker(f"{proxy.url}/ok#{HERE}&unsigned=yes&concurrency=4", PATIENT)
        for _ in range(5):
            assert await broker.send(make_messages(40, keys=40)) == [Delivered()] * 40
        assert 1 <= proxy.connections <= 4
        await broker.close()
        await eventually_async(lambda: proxy.connections == 0)


# ── Whose fault silence is ─────────────────────────────────────────────────────────────────────


async def test_silence_about_one_message_is_that_messages_fault(opened: Open) -> None:
    batch = make_messages(4, keys=4)
    batch[2] = batch[2]._replace(type="silence-me")
    outcomes = await opened("/moody", SOON).send(batch)
    assert [outcomes[index] for index in (0, 1, 3)] == [Delivered()] * 3
    assert isinstance(outcomes[2], Unknown)
    assert outcomes[2].down is None


async def test_a_receiver_that_hangs_does_not_hold_those_behind_it_for_long(opened: Open) -> None:
    broker = opened("/silent", SOON, more="&concurrency=2")
    outcomes = await broker.send(make_messages(6, keys=6))
    assert [type(outcome) for outcome in outcomes] == [Unknown] * 2 + [Transient] * 4
    assert {
        outcome.down for outcome in outcomes if not isinstance(outcome, Delivered | Permanent)
    } == {"broker"}


async def test_nobody_there(webhook_server: WebhookServer) -> None:
    broker = WebhookBroker(f"http://127.0.0.1:{free_port()}/#{HERE}&unsigned=yes", PATIENT)
    (outcome,) = await broker.send([make_message()])
    assert isinstance(outcome, Transient)
    assert (outcome.code, outcome.down) == ("unreachable", "broker")
    with pytest.raises(Unreachable):
        await broker.ping()
    await broker.close()


async def test_a_listener_that_never_accepts() -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        port = deaf.getsockname()[1]
        others = [socket.socket() for _ in range(4)]
        for other in others:  # its queue is full after these
            other.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                other.connect(("127.0.0.1", port))
        broker = WebhookBroker(f"http://127.0.0.1:{port}/#{HERE}&unsigned=yes", SOON)
        (outcome,) = await broker.send([make_message()])
        assert isinstance(outcome, Transient)
        assert (outcome.code, outcome.down) == ("unreachable", "broker")
        await broker.close()
        for other in others:
            other.close()


async def test_a_name_server_that_hangs_holds_one_thread() -> None:
    release, asked = threading.Event(), []

    def hang(host: str, port: int) -> list[str]:
        asked.append(host)
        release.wait(30)
        return ["127.0.0.1"]

    broker = WebhookBroker("https://hooks.example/#unsigned=yes", SOON, resolver=hang)
    outcomes = await broker.send(make_messages(10, keys=10))
    outcomes += await broker.send(make_messages(10, keys=10))
    release.set()
    assert {(o.code, o.down) for o in outcomes if isinstance(o, Transient)} <= {
        ("not_resolved", "broker"),
        ("unreachable", "broker"),
        ("busy", "broker"),
    }
    assert len(outcomes) == 20
    assert asked == ["hooks.example"]
    await broker.close()


# ── Rest ───────────────────────────────────────────────────────────────────────────────────────


async def test_a_receiver_that_is_gone_is_left_alone(
    opened: Open, webhook_server: WebhookServer
) -> None:
    broker = opened("/status/410")
    (first,) = await broker.send([make_message()])
    assert isinstance(first, Transient)
    assert (first.code, first.down) == ("http_410", "broker")
    assert await broker.send(make_messages(3)) == [first] * 3
    assert len(webhook_server.received) == 1
    with pytest.raises(Unreachable, match="gone"):
        await broker.ping()


async def test_where_topics_have_paths_only_one_of_them_is_gone(
    opened: Open, webhook_server: WebhookServer
) -> None:
    broker = opened("/status/{topic}")
    batch = [make_message(topic="410"), make_message(topic="200")]
    for _ in range(2):
        gone, delivered = await broker.send(batch)
        assert isinstance(gone, Transient)
        assert gone.down == "topic"
        assert delivered == Delivered()
    assert [each.path for each in webhook_server.received].count("/status/410") == 1
    await broker.ping()


@pytest.mark.parametrize("status", [429, 503])
async def test_retry_after_is_kept_to(
    opened: Open, webhook_server: WebhookServer, status: int
) -> None:
    broker = opened(f"/status/{status}?header=Retry-After:1")
    (outcome,) = await broker.send([make_message()])
    assert isinstance(outcome, Transient)
    assert (outcome.down, outcome.retry_after_seconds) == ("broker", 1.0)
    assert await broker.send([make_message()]) == [outcome]
    assert len(webhook_server.received) == 1
    await asyncio.sleep(1.1)
    await broker.send([make_message()])
    assert len(webhook_server.received) == 2


# ── Signed, encrypted, secret ──────────────────────────────────────────────────────────────────


def by_name(host: str, port: int) -> list[str]:
    return ["127.0.0.1"]


async def test_over_tls_the_name_is_verified_and_the_checked_address_used(
    webhook_tls_server: WebhookServer,
) -> None:
    webhook_tls_server.forget()
    options = f"allow=127.0.0.1&secret={SECRET}&tls_ca={webhook_tls_server.ca}"
    url = f"{webhook_tls_server.url}/ok#{options}"
    broker = WebhookBroker(url, PATIENT, resolver=by_name)
    await broker.ping()
    message = make_message()
    assert await broker.send([message]) == [Delivered()]
    (received,) = webhook_tls_server.received
    assert received.headers["host"] == f"hooks.test:{webhook_tls_server.port}"
    assert Webhook(SECRET).verify(received.body, received.headers) == {"total": 42}
    await broker.close()


@pytest.mark.parametrize("wrong", ["unknown authority", "another name"])
async def test_a_bad_certificate_gets_nothing(
    webhook_tls_server: WebhookServer, wrong: str
) -> None:
    webhook_tls_server.forget()
    ca = f"&tls_ca={webhook_tls_server.ca}" if wrong == "another name" else ""
    host = "other.test" if wrong == "another name" else "hooks.test"
    url = f"https://{host}:{webhook_tls_server.port}/ok#allow=127.0.0.1&secret={SECRET}{ca}"
    broker = WebhookBroker(url, PATIENT, resolver=by_name)
    (outcome,) = await broker.send([make_message()])
    assert isinstance(outcome, Transient)
    assert (outcome.code, outcome.down) == ("tls", "broker")
    assert webhook_tls_server.received == []
    with pytest.raises(Unreachable, match="certificate"):
        await broker.ping()
    await broker.close()


async def test_no_secret_gets_out(
    opened: Open, webhook_server: WebhookServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    place = webhook_server.url.partition("://")[2]
    canaries = ["canary-password", SECRET, SECRET.removeprefix("whsec_")]
    told: list[Any] = []
    for path in (
        "/ok",
        "/status/500",
        "/early_close",
        "/status/422?body=password%3Dcanary-password",
    ):
        url = f"http://me:canary-password@{place}{path}#{HERE}&secret={SECRET}"
        broker = WebhookBroker(url, PATIENT)
        told += [broker, broker._target, await broker.send([make_message()])]
        await broker.close()
    received = webhook_server.received
    assert received
    assert all(each.headers["authorization"].startswith("Basic ") for each in received)
    for canary in canaries:
        assert canary not in repr(told)
        assert canary not in caplog.text


# ── Its life ───────────────────────────────────────────────────────────────────────────────────


async def test_close_ends_it(opened: Open) -> None:
    broker = opened("/ok")
    assert await broker.send([make_message()]) == [Delivered()]
    await broker.close()
    (outcome,) = await broker.send([make_message()])
    assert isinstance(outcome, Transient)
    assert (outcome.code, outcome.down) == ("closed", "broker")
    with pytest.raises(Unreachable):
        await broker.ping()


def test_it_works_on_one_loop_after_another(webhook_server: WebhookServer) -> None:
    broker = open_broker(f"{webhook_server.url}/ok#{HERE}&unsigned=yes", PATIENT)
    for _ in range(3):
        assert asyncio.run(broker.send([make_message()])) == [Delivered()]
    asyncio.run(broker.close())


async def test_a_send_that_is_cancelled_leaves_its_slots_free(opened: Open) -> None:
    broker = opened("/silent", more="&concurrency=2")
    for _ in range(3):
        sending = asyncio.create_task(broker.send(make_messages(2, keys=2)))
        await asyncio.sleep(0.1)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
    assert broker._slots._value == 2


async def test_without_httpcore_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpcore", None)
    monkeypatch.delitem(sys.modules, "postroom.brokers.webhook_net", raising=False)
    monkeypatch.delattr("postroom.brokers.webhook_net", raising=False)
    with pytest.raises(MissingDriver, match="postroom\\[webhooks\\]"):
        WebhookBroker("https://hooks.example/#unsigned=yes")


async def test_large_messages_side_by_side(opened: Open, webhook_server: WebhookServer) -> None:
    batch = [m._replace(payload=bytes(200_000)) for m in make_messages(40, keys=40)]
    assert await opened("/ok").send(batch) == [Delivered()] * 40
    assert sum(len(each.body) for each in webhook_server.received) == 40 * 200_000
