"""What of RabbitMQ's queues and bindings would lose messages, and who is asked about it."""

import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from helpers_amqp import PATIENT, Shelf, opened
from postroom.brokers import CanExamine, CanReceive
from postroom.brokers.amqp import AmqpBroker
from postroom.brokers.amqp_topology import faults, matches
from postroom.errors import Unreachable
from servers import RabbitMQServer, Unavailable, free_port, leave_out


@pytest.fixture
async def shelf(rabbitmq_server: RabbitMQServer) -> AsyncIterator[Shelf]:
    async with opened(rabbitmq_server) as made:
        yield made


@pytest.mark.parametrize(
    ("pattern", "topic", "fits"),
    [
        ("orders", "orders", True),
        ("orders", "orders.created", False),
        ("*", "orders", True),
        ("*", "orders.created", False),
        ("orders.*", "orders.created", True),
        ("orders.*", "orders", False),
        ("#", "orders.created.v1", True),
        ("orders.#", "orders", True),
        ("#.v1", "orders.created.v1", True),
        ("#.v1", "orders.created.v2", False),
        ("*.#.v1", "v1", False),
        ("a.#.b.#.c", "a.x.b.c", True),
        ("", "orders", False),
    ],
)
def test_bindings_match_as_in_rabbitmq(pattern: str, topic: str, fits: bool) -> None:
    assert matches(pattern, topic) is fits


def test_faults_of_a_queue() -> None:
    sound = {"durable": True, "arguments": {"x-dead-letter-exchange": "dead"}}
    assert list(faults("q", sound)) == []
    by_policy = {"effective_policy_definition": {"dead-letter-exchange": "dead"}}
    assert list(faults("q", by_policy)) == []
    frail = {"durable": False, "arguments": {"x-message-ttl": 5, "x-max-length": 9}}
    said = " ".join(faults("q", frail))
    for word in ("not durable", "no dead-letter exchange", "message-ttl", "reject-publish"):
        assert word in said
    full = {"x-dead-letter-exchange": "d", "x-max-length": 9, "x-overflow": "reject-publish"}
    assert list(faults("q", {"arguments": full})) == []


async def test_what_amqp_alone_can_tell(shelf: Shelf) -> None:
    assert isinstance(shelf.broker, CanExamine)
    assert isinstance(shelf.broker, CanReceive)
    (blind,) = await shelf.broker.examine([shelf.topic])
    assert "?management=" in blind
    broker = AmqpBroker(shelf.server.url, PATIENT)
    missing, _ = await broker.examine([shelf.topic])
    assert f"there is no queue named {shelf.topic}" in missing
    await shelf.queue(bind=False)
    assert len(await broker.examine([shelf.topic])) == 1
    await broker.close()


class ManagedServer(RabbitMQServer):
    """With the management plugin, which takes its time to start."""

    def __init__(self) -> None:
        self.management = free_port()
        super().__init__(
            config=f"management.tcp.port = {self.management}\nmanagement.tcp.ip = 127.0.0.1",
            fsync=False,
        )

    def _prepare(self) -> None:
        super()._prepare()
        (self.directory / "plugins").write_text("[rabbitmq_management].\n")


@pytest.fixture
def managed(rabbitmq_server: RabbitMQServer) -> Iterator[ManagedServer]:
    rabbitmq_server.require_private()
    try:
        server = ManagedServer()
    except Unavailable as error:
        leave_out(str(error))
    with server:
        yield server


class Web(BaseHTTPRequestHandler):
    """Answers with nothing, or sends elsewhere, and keeps what it was told."""

    def do_GET(self) -> None:
        self.server.told.append(self.headers.get("Authorization"))  # type: ignore[attr-defined]
        elsewhere = self.server.elsewhere  # type: ignore[attr-defined]
        self.send_response(302 if elsewhere else 200)
        if elsewhere:
            self.send_header("Location", elsewhere)
        self.end_headers()
        self.wfile.write(b"[]")

    def log_message(self, *_: Any) -> None: ...


@contextlib.contextmanager
def web(elsewhere: str | None = None) -> Iterator[tuple[str, list[str | None]]]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Web) as server:
        server.elsewhere, server.told = elsewhere, []  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", server.told  # type: ignore[attr-defined]
        server.shutdown()


@pytest.mark.parametrize("way", ["redirect", "proxy"])
async def test_rabbitmqs_password_goes_to_nobody_else(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr("urllib.request._opener", None)  # it remembers the proxies of before
    with web() as (thief, stolen), web(thief if way == "redirect" else None) as (plugin, told):
        if way == "proxy":
            monkeypatch.setenv("http_proxy", thief)
            monkeypatch.delenv("no_proxy", raising=False)
        broker = AmqpBroker(f"{shelf.url}&management={plugin}", PATIENT)
        await shelf.queue()
        with contextlib.suppress(Unreachable):
            await broker.examine([shelf.topic])
        await broker.close()
    assert told
    assert stolen == []


async def test_dangers_are_named(managed: ManagedServer) -> None:
    management = f"http://127.0.0.1:{managed.management}"
    shelf = Shelf(managed)
    url = f"{shelf.url}&management={management}"
    broker = AmqpBroker(url, PATIENT)
    await broker.ping()
    (unbound,) = await broker.examine([shelf.topic])
    assert "no queue is bound" in unbound
    billing = await broker.receive([shelf.topic], consumer="billing")
    (no_exchange,) = await broker.examine([shelf.topic])
    assert "has no dead-letter exchange" in no_exchange
    await billing.close()
    sound = AmqpBroker(f"{url}&dead_letter_exchange=dead", PATIENT)
    shipping = await sound.receive([f"{shelf.topic}.shipped"], consumer="shipping")
    assert await sound.examine([f"{shelf.topic}.shipped"]) == []
    await shipping.close()
    for each in (broker, sound, shelf.broker):
        await each.close()
