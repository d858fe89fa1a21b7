"""The adapter that is shipped: "rejected" and "not arrived" only when the exchange has said so."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import httpcore
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from helpers_messages import make_message
from postroom.brokers import open_broker
from postroom.brokers.base import CROWDED, Delivered, Outcome, Permanent, Transient, Unknown
from postroom.errors import Unreachable
from postroom.gateway import adapter
from served import Served

BUSY = '{"reason_code": "busy"}'
BOOKED, REJECTED = '{"status": "booked"}', '{"status": "rejected", "reason_code": "market_closed"}'
MOVED = (301, 302, 307, 308, 421, 426)
PROXY = "upstream connect error or disconnect/reset before headers"


class Scripted:
    """An exchange, or what stands before it, that says one thing."""

    def __init__(self) -> None:
        self.status, self.text = 200, BOOKED
        self.asked: tuple[int, str] | None = None  # what it says to questions, if not the same
        self.tokens: list[str | None] = []
        routes = [
            Route("/orders", self.answer, methods=["POST"]),
            Route("/orders/{id}", self.answer_question),
            Route("/elsewhere", self.elsewhere, methods=["GET", "POST"]),
        ]
        self.served = Served(Starlette(routes=routes))

    async def answer(self, call: Request) -> Response:
        self.tokens.append(call.headers.get("authorization"))
        headers = {"retry-after": "2", "location": f"{self.served.url}/elsewhere"}
        return Response(self.text, self.status, headers=headers)

    async def answer_question(self, call: Request) -> Response:
        if self.asked is None:
            return await self.answer(call)
        return Response(self.asked[1], self.asked[0])

    async def elsewhere(self, call: Request) -> Response:
        raise AssertionError("a redirect was followed")


@pytest.fixture(scope="module")
def place() -> Iterator[Scripted]:
    scripted = Scripted()
    yield scripted
    scripted.served.stop()


@pytest.fixture
def exchange(place: Scripted, monkeypatch: pytest.MonkeyPatch) -> Scripted:
    monkeypatch.setenv("POSTROOM_EXCHANGE_URL", place.served.url)
    monkeypatch.delenv("POSTROOM_EXCHANGE_TOKEN", raising=False)
    place.tokens.clear()
    place.asked = None
    return place


def kind(outcome: Outcome) -> tuple[Any, ...]:
    return type(outcome), getattr(outcome, "code", None), getattr(outcome, "down", None)


@pytest.mark.parametrize(
    ("status", "text", "expected"),
    [
        (200, BOOKED, (Delivered, None, None)),
        (409, BOOKED, (Delivered, None, None)),
        (422, REJECTED, (Permanent, "market_closed", None)),
        (403, REJECTED, (Permanent, "market_closed", None)),
        (400, '{"reason_code": "bad_order"}', (Permanent, "bad_order", None)),
        (400, '{"status": "rejected"}', (Permanent, "rejected", None)),
        *(
            (status, text, (Unknown, f"http_{status}", None))
            for status in (400, 402, 406, 410, 413, 415, 422)
            for text in ("<html>a load balancer</html>", '{"message": "no"}', "[]")
        ),
        (503, BUSY, (Transient, "busy", None)),
        (429, "slow down", (Transient, "busy", None)),
        (503, PROXY, (Unknown, "http_503", None)),
        (503, "{}", (Unknown, "http_503", None)),
        (502, PROXY, (Unknown, "http_502", None)),
        (500, "", (Unknown, "http_500", None)),
        (200, "<html>", (Unknown, "bad_answer", None)),
        (200, "[]", (Unknown, "bad_answer", None)),
        *((status, "no", (Transient, f"http_{status}", "broker")) for status in (401, 403, 404)),
        *((status, "", (Transient, f"http_{status}", "broker")) for status in (405, *MOVED)),
        *((status, REJECTED, (Permanent, "market_closed", None)) for status in (307, 308)),
        (302, BOOKED, (Unknown, "http_302", None)),
        (303, "", (Unknown, "http_303", None)),  # as said of what was done
    ],
)
async def test_what_an_answer_to_an_order_means(
    exchange: Scripted, status: int, text: str, expected: tuple[Any, ...]
) -> None:
    exchange.status, exchange.text = status, text
    assert kind(await adapter.send(make_message(b"{}"))) == expected


@pytest.mark.parametrize("status", [401, 403, 404, 405, 407, *MOVED])
@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ((404, '{"reason_code": "no_such_order"}'), (Transient, None)),  # it is let in to ask
        ((403, "no"), (Transient, "broker")),
        ((404, "<h1>Not Found</h1>"), (Transient, "broker")),
        ((500, ""), (Transient, "broker")),
        ((200, BOOKED), (Delivered, None)),
        ((200, REJECTED), (Permanent, None)),
    ],
)
async def test_an_order_that_alone_is_not_let_in_stops_no_other(
    exchange: Scripted, status: int, asked: tuple[int, str], expected: tuple[Any, ...]
) -> None:
    exchange.status, exchange.text, exchange.asked = status, "<h1>Forbidden</h1>", asked
    outcome = await adapter.send(make_message(b"{}"))
    assert (type(outcome), getattr(outcome, "down", None)) == expected


@pytest.mark.parametrize(
    ("status", "text", "expected"),
    [
        (200, BOOKED, (Delivered, None, None)),
        (200, REJECTED, (Permanent, "market_closed", None)),
        (404, '{"reason_code": "no_such_order"}', (Transient, "not_arrived", None)),
        (404, "<h1>Not Found</h1>", (Unknown, "http_404", "broker")),
        *((status, "", (Unknown, f"http_{status}", "broker")) for status in (401, 303, *MOVED)),
        (503, BUSY, (Unknown, "http_503", "broker")),
        (500, "", (Unknown, "http_500", None)),
    ],
)
async def test_what_an_answer_to_a_question_means(
    exchange: Scripted, status: int, text: str, expected: tuple[Any, ...]
) -> None:
    exchange.status, exchange.text = status, text
    assert kind(await adapter.lookup(make_message())) == expected


async def test_what_got_no_connection_was_not_sent(
    exchange: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POSTROOM_EXCHANGE_TIMEOUT_SECONDS", "0.5")
    monkeypatch.setattr(adapter, "CONNECTIONS", 1)
    monkeypatch.setattr(adapter, "_pools", {})
    exchange.status, exchange.text = 200, BOOKED
    async with adapter._pool(httpcore).stream("GET", f"{exchange.served.url}/orders/x"):
        exchange.tokens.clear()
        assert await adapter.send(make_message(b"{}")) == CROWDED
        assert await adapter.lookup(make_message()) == CROWDED
    assert exchange.tokens == []
    assert kind(await adapter.send(make_message(b"{}"))) == (Delivered, None, None)


async def test_what_nobody_accepts_was_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTROOM_EXCHANGE_TIMEOUT_SECONDS", "0.5")
    with contextlib.ExitStack() as open_sockets:
        door = open_sockets.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(2):  # its queue is full now: whoever else comes hears nothing
            queued = open_sockets.enter_context(socket.socket())
            queued.setblocking(False)
            queued.connect_ex(door.getsockname())
        await asyncio.sleep(0.05)
        monkeypatch.setenv("POSTROOM_EXCHANGE_URL", f"http://127.0.0.1:{door.getsockname()[1]}")
        outcome = await adapter.send(make_message(b"{}"))
    assert kind(outcome) == (Transient, "unreachable", "broker")


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://exchange"])
async def test_a_wrong_address_stops_the_destination_and_fails_no_order(
    monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setenv("POSTROOM_EXCHANGE_URL", url)
    assert kind(await adapter.send(make_message(b"{}"))) == (Transient, "misconfigured", "broker")
    assert kind(await adapter.lookup(make_message())) == (Unknown, "no_answer", "broker")
    with pytest.raises(Unreachable, match="POSTROOM_EXCHANGE_URL"):
        await open_broker("call:postroom.gateway.adapter:send").ping()


async def test_a_token_from_a_file_has_no_newline(
    exchange: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange.status, exchange.text = 200, BOOKED
    monkeypatch.setenv("POSTROOM_EXCHANGE_TOKEN", "p@CANARY-77\n")
    assert kind(await adapter.send(make_message(b"{}"))) == (Delivered, None, None)
    assert exchange.tokens == ["Bearer p@CANARY-77"]
    await open_broker("call:postroom.gateway.adapter:send").ping()


@pytest.mark.parametrize("token", ["CANARY-77 \n x", "CANARY-77é"])
async def test_a_token_that_no_header_holds_is_not_shown(
    exchange: Scripted, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setenv("POSTROOM_EXCHANGE_TOKEN", token)
    outcome = await adapter.send(make_message(b"{}"))
    assert kind(outcome) == (Transient, "misconfigured", "broker")
    assert "CANARY" not in str(outcome)
    assert exchange.tokens == []
