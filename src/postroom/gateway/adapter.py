"""`call:postroom.gateway.adapter:send`: places orders at an exchange that speaks HTTP.

Promise: "rejected", "not sent" and "not arrived" are said only when they are certain; everything
else is unknown, and `lookup` asks the exchange by client order id. What a proxy on the way may have
said is not the exchange's word: that has a `reason_code` or a `status`.

    POST {POSTROOM_EXCHANGE_URL}/orders       the order, with its client_order_id
    GET  {POSTROOM_EXCHANGE_URL}/orders/ID    what became of it; 404, reason_code: it never came

It is an example of an adapter too: one for another exchange is a module with these two functions.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from typing import Any

from postroom.brokers.base import CROWDED, Delivered, Outcome, Permanent, Transient, Unknown
from postroom.errors import ConfigurationError, MissingDriver
from postroom.messages import Message

__all__ = ["lookup", "send"]

ANSWER_BYTES = 64_000
TIMEOUT_SECONDS = 5.0
CONNECTIONS = 8
# Of the time for the whole, how much each step before the sending may take: waiting for one of our
# connections, the TCP handshake, the TLS handshake. What is given up there was certainly not sent.
BEFOREHAND = 0.3
_REJECTED = {400, 402, 406, 410, 413, 415, 422}
# Wrong credentials or a wrong address, or a guard before the exchange that dislikes this one order.
# No redirect is followed. 303 is none of these: it is said of what was done, perhaps of the order.
_MOVED = {301, 302, 307, 308, 421, 426}
_NOT_LET_IN = {401, 403, 404, 405, 407} | _MOVED
_NOBODY_THERE = _NOT_LET_IN | {303, 429, 502, 503, 504}


class _Crowded(ConnectionRefusedError):
    """All of our own connections were taken: it was not sent, and the exchange need not be down."""


_pools: dict[int, tuple[asyncio.AbstractEventLoop, Any]] = {}


async def send(message: Message) -> Outcome:
    """Place the order of a message; its id is the client order id."""
    order = {**json.loads(message.payload), "client_order_id": message.id}
    try:
        status, text, headers = await _ask("POST", "/orders", json.dumps(order).encode())
    except ConfigurationError as error:
        return Transient("misconfigured", str(error), down="broker")
    except _Crowded:
        return CROWDED
    except ConnectionRefusedError as error:
        return Transient("unreachable", str(error), down="broker")  # it got nothing
    except OSError as error:
        return Unknown("no_answer", f"the exchange gave no answer: {error}")
    said = _document(text)
    if status in (200, 201):
        return _told(text)
    if status == 409:  # it has an order of this id: ours, and this is what became of it
        return _told(text)
    if status == 429 or (status == 503 and said.get("reason_code") == "busy"):
        return Transient("busy", text, retry_after_seconds=_seconds(headers.get("retry-after")))
    # A proxy's 400 or 413 is not the exchange's word: the order may have got through.
    rejected = said.get("status") == "rejected" or ("reason_code" in said and status in _REJECTED)
    if rejected and status in _REJECTED | _NOT_LET_IN:
        return Permanent(_reason(text), text)
    if status in _NOT_LET_IN and said.get("status") != "booked":
        return await _not_let_in(message, f"http_{status}", _where(status, text, headers))
    return Unknown(f"http_{status}", text)


async def _not_let_in(message: Message, code: str, text: str) -> Outcome:
    """Nobody is let in, or this order alone: whoever may ask for it may come in. One that is
    disliked spends its attempts, and stops nobody else's."""
    found = await lookup(message)
    if isinstance(found, Delivered | Permanent):
        return found
    alone = isinstance(found, Transient) and found.code == "not_arrived"
    return Transient(code, text, down=None if alone else "broker")


async def lookup(message: Message) -> Outcome:
    """What became of an order, by its client order id."""
    try:
        status, text, headers = await _ask("GET", f"/orders/{message.id}")
    except _Crowded:
        return CROWDED
    except (OSError, ConfigurationError) as error:
        return Unknown("no_answer", f"the exchange gave no answer: {error}", down="broker")
    if status == 200:
        return _told(text)
    if status == 404 and "reason_code" in _document(text):
        return Transient("not_arrived", "the exchange has no order of this id")
    text = _where(status, text, headers)
    return Unknown(f"http_{status}", text, "broker" if status in _NOBODY_THERE else None)


def check() -> None:
    """Raise if what the environment says cannot be, or the client library is not there."""
    _httpcore(), _address(), _headers(), _patience()


send.check = check  # type: ignore[attr-defined]  # the relay calls it at its start


def _document(text: str) -> dict[str, Any]:
    """An answer as the exchange spells it; empty if it is somebody else's."""
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}


def _told(text: str) -> Outcome:
    """What the exchange says of an order it has."""
    state = _document(text).get("status")
    if state == "booked":
        return Delivered(text)
    if state == "rejected":
        return Permanent(_reason(text), text)
    return Unknown("bad_answer", f"the exchange says neither booked nor rejected: {text[:200]}")


def _where(status: int, text: str, headers: dict[str, str]) -> str:
    """An answer, and where it points to instead: most of them say nothing else."""
    if not 300 <= status < 400:
        return text
    place = headers.get("location", "nowhere")[:500]
    return f"it points to {place}, which is not followed. {text}".rstrip()


def _reason(text: str) -> str:
    return str(_document(text).get("reason_code") or "rejected")[:200]


def _address() -> str:
    """Where the exchange is."""
    url = os.environ.get("POSTROOM_EXCHANGE_URL", "").strip().rstrip("/")
    if not re.fullmatch(r"https?://[!-~]+", url):
        raise ConfigurationError("Say where the exchange is: POSTROOM_EXCHANGE_URL=http://…")
    return url


def _headers() -> dict[str, str]:
    headers = {"content-type": "application/json"}
    if token := os.environ.get("POSTROOM_EXCHANGE_TOKEN", "").strip():
        if not re.fullmatch(r"[!-~]+", token):  # it is not shown: it is a secret
            raise ConfigurationError(
                "POSTROOM_EXCHANGE_TOKEN holds what no HTTP header can: spaces, or letters that "
                "are not ASCII."
            )
        headers["authorization"] = f"Bearer {token}"
    return headers


def _patience() -> float:
    given = os.environ.get("POSTROOM_EXCHANGE_TIMEOUT_SECONDS") or str(TIMEOUT_SECONDS)
    if not re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,6})?", given) or not float(given):
        raise ConfigurationError("POSTROOM_EXCHANGE_TIMEOUT_SECONDS must be a number above 0.")
    return float(given)


def _seconds(text: str | None) -> float | None:
    return float(text) if text is not None and text.isdecimal() else None


async def _ask(
    method: str, path: str, content: bytes | None = None
) -> tuple[int, str, dict[str, str]]:
    """One request; ConnectionRefusedError if it cannot have been sent, OSError if it may have."""
    httpcore = _httpcore()
    url, headers = _address(), _headers()
    seconds = _patience()
    timeouts = {"read": seconds, "write": seconds}
    timeouts |= dict.fromkeys(("pool", "connect"), BEFOREHAND * seconds)
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
    except httpcore.PoolTimeout as error:
        raise _Crowded(f"all {CONNECTIONS} connections to it are taken") from error
    except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
        raise ConnectionRefusedError(str(error) or type(error).__name__) from error
    except httpcore.UnsupportedProtocol as error:
        raise ConfigurationError(f"POSTROOM_EXCHANGE_URL: {error}") from error
    except httpcore.LocalProtocolError:
        # Its text may quote a header, and with it the token.
        raise OSError("the request is none that HTTP can carry") from None
    except TimeoutError:
        raise OSError(f"nothing within {seconds:g} s") from None
    except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException) as error:
        raise OSError(str(error) or type(error).__name__) from error
    told = {name.decode().lower(): value.decode("latin-1") for name, value in response.headers}
    return response.status, body.decode("utf-8", "replace"), told


def _httpcore() -> Any:
    try:
        import httpcore
    except ImportError as error:
        raise MissingDriver(
            "This adapter needs httpcore: pip install 'postroom[gateway]'."
        ) from error
    return httpcore


def _pool(httpcore: Any) -> Any:
    """The connections of this event loop: those of an ended one are of no use."""
    loop = asyncio.get_running_loop()
    known = _pools.get(id(loop))
    if known is None or known[0] is not loop:
        _pools.clear()
        pool = httpcore.AsyncConnectionPool(max_connections=CONNECTIONS, keepalive_expiry=30)
        known = _pools[id(loop)] = (loop, pool)
    return known[1]
