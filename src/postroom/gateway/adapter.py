"""`call:postroom.gateway.adapter:send`: places orders at an exchange that speaks HTTP.

Promise: "rejected" and "not sent" are said only when they are certain; everything else is unknown,
and `lookup` asks the exchange by client order id.

    POST {POSTROOM_EXCHANGE_URL}/orders       the order, with its client_order_id
    GET  {POSTROOM_EXCHANGE_URL}/orders/ID    what became of it; 404: it never came

It is an example of an adapter too: one for another exchange is a module with these two functions.
"""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

from postroom.brokers.base import Delivered, Outcome, Permanent, Transient, Unknown
from postroom.errors import ConfigurationError, MissingDriver
from postroom.messages import Message

__all__ = ["lookup", "send"]

ANSWER_BYTES = 64_000
TIMEOUT_SECONDS = 5.0
CONNECTIONS = 8
_REJECTED = {400, 401, 402, 403, 404, 405, 406, 410, 413, 415, 422}

_pools: dict[int, tuple[asyncio.AbstractEventLoop, Any]] = {}


async def send(message: Message) -> Outcome:
    """Place the order of a message; its id is the client order id."""
    order = {**json.loads(message.payload), "client_order_id": message.id}
    try:
        status, text, headers = await _ask("POST", "/orders", json.dumps(order).encode())
    except ConnectionRefusedError as error:
        return Transient("unreachable", str(error), down="broker")  # it got nothing
    except OSError as error:
        return Unknown("no_answer", f"the exchange gave no answer: {error}")
    if status in (200, 201):
        return _told(text)
    if status == 409:  # it has an order of this id: ours, and this is what became of it
        return _told(text)
    if status in (429, 503):
        return Transient("busy", text, retry_after_seconds=_seconds(headers.get("retry-after")))
    if status in _REJECTED:
        return Permanent(_reason(text), text)
    return Unknown(f"http_{status}", text)


async def lookup(message: Message) -> Outcome:
    """What became of an order, by its client order id."""
    try:
        status, text, _ = await _ask("GET", f"/orders/{message.id}")
    except OSError as error:
        return Unknown("no_answer", f"the exchange gave no answer: {error}")
    if status == 200:
        return _told(text)
    if status == 404:
        return Transient("not_arrived", "the exchange has no order of this id")
    return Unknown(f"http_{status}", text)


def _told(text: str) -> Outcome:
    """What the exchange says of an order it has."""
    try:
        state = json.loads(text).get("status")
    except (ValueError, AttributeError):
        return Unknown("bad_answer", f"the exchange's answer cannot be read: {text[:200]}")
    if state == "booked":
        return Delivered(text)
    if state == "rejected":
        return Permanent(_reason(text), text)
    return Unknown("bad_answer", f"the exchange says neither booked nor rejected: {text[:200]}")


def _reason(text: str) -> str:
    try:
        return str(json.loads(text)["reason_code"])[:200]
    except (ValueError, KeyError, TypeError):
        return "rejected"


def _seconds(text: str | None) -> float | None:
    return float(text) if text is not None and text.isdecimal() else None


async def _ask(
    method: str, path: str, content: bytes | None = None
) -> tuple[int, str, dict[str, str]]:
    """One request; ConnectionRefusedError if it cannot have been sent, OSError if it may have."""
    try:
        import httpcore
    except ImportError as error:
        raise MissingDriver(
            "This adapter needs httpcore: pip install 'postroom[gateway]'."
        ) from error
    url = os.environ.get("POSTROOM_EXCHANGE_URL", "").rstrip("/")
    if not url:
        raise ConfigurationError("Say where the exchange is: POSTROOM_EXCHANGE_URL=http://…")
    headers = {"content-type": "application/json"}
    if token := os.environ.get("POSTROOM_EXCHANGE_TOKEN"):
        headers["authorization"] = f"Bearer {token}"
    seconds = float(os.environ.get("POSTROOM_EXCHANGE_TIMEOUT_SECONDS") or TIMEOUT_SECONDS)
    timeouts = dict.fromkeys(("connect", "read", "write", "pool"), seconds)
    try:
        async with asyncio.timeout(seconds):
            async with _pool(httpcore).stream(
                method, url + path, headers=headers, content=content,
                extensions={"timeout": timeouts},
            ) as response:  # fmt: skip
                body = bytearray()
                async for chunk in response.aiter_stream():
                    body += chunk
                    if len(body) > ANSWER_BYTES:
                        raise OSError("its answer is too long")
    except (httpcore.ConnectError, httpcore.ConnectTimeout, httpcore.PoolTimeout) as error:
        raise ConnectionRefusedError(str(error) or type(error).__name__) from error
    except TimeoutError:
        raise OSError(f"nothing within {seconds:g} s") from None
    except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException) as error:
        raise OSError(str(error) or type(error).__name__) from error
    told = {name.decode().lower(): value.decode("latin-1") for name, value in response.headers}
    return response.status, body.decode("utf-8", "replace"), told


def _pool(httpcore: Any) -> Any:
    """The connections of this event loop: those of an ended one are of no use."""
    loop = asyncio.get_running_loop()
    known = _pools.get(id(loop))
    if known is None or known[0] is not loop:
        _pools.clear()
        pool = httpcore.AsyncConnectionPool(max_connections=CONNECTIONS, keepalive_expiry=30)
        known = _pools[id(loop)] = (loop, pool)
    return known[1]
