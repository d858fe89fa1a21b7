"""The way to a webhook's receiver: resolve, check every address, connect to one of those.

Promise: a connection goes to an address that was checked, because the name is resolved once and
what is dialled is the number. A name server that answers differently a moment later (rebinding)
changes nothing, and TLS still verifies the name.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import httpcore

from postroom.brokers.invoke import describe, in_thread
from postroom.brokers.webhook_address import Target
from postroom.brokers.webhook_guard import literal, why_refused

__all__ = ["AddressRefused", "GuardedBackend", "NotResolved", "Resolver"]

# Host and port to addresses, as text. It may block: it runs in a thread.
Resolver: TypeAlias = Callable[[str, int], Iterable[str]]
MOST_ADDRESSES = 8


class AddressRefused(Exception):
    """The name leads to an address that nobody may connect to."""


class NotResolved(Exception):
    """The name leads nowhere."""


class GuardedBackend(httpcore.AsyncNetworkBackend):
    """Connects for httpcore, to the target's host alone."""

    def __init__(self, target: Target, resolver: Resolver | None = None) -> None:
        self._target = target
        self._resolver = resolver or _ask_system
        self._network = httpcore.AnyIOBackend()
        self._asking: asyncio.Future[list[str] | Exception] | None = None

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connect to the first address that answers; all of them must be allowed."""
        loop = asyncio.get_running_loop()
        until = loop.time() + (timeout if timeout is not None else 60.0)
        addresses = await self.addresses(host, port, until)
        trouble: Exception = NotResolved(f"{host} has no address")
        for number, address in enumerate(addresses):
            # A dead address must leave time for the others.
            seconds = (until - loop.time()) / (len(addresses) - number)
            try:
                return await self._network.connect_tcp(
                    address, port, max(seconds, 0.01), local_address, socket_options
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                trouble = error
        raise trouble

    async def addresses(self, host: str, port: int, until: float) -> list[str]:
        """The checked addresses of a host. One that is refused refuses them all: a name that
        leads both outside and inside was made to do so."""
        found = [host] if literal(host) else await self._resolve(host, port, until)
        checked: dict[str, None] = {}
        for text in found:
            try:
                address = ipaddress.ip_address(text)
            except ValueError:
                raise NotResolved(f"{host} resolves to something that is no address") from None
            why = why_refused(address, host, port, self._target.allowed)
            if why is not None:
                raise AddressRefused(why)
            checked[str(address)] = None
        return list(checked)[:MOST_ADDRESSES]

    async def _resolve(self, host: str, port: int, until: float) -> list[str]:
        # All who want to connect share one question, so that a name server that hangs holds one
        # thread and not many.
        if self._asking is None or self._asking.done():
            self._asking = in_thread(lambda: _answer(self._resolver, host, port))
        try:
            async with asyncio.timeout_at(until):
                answer = await asyncio.shield(self._asking)
        except TimeoutError:
            raise NotResolved(f"the name server does not answer for {host}") from None
        if isinstance(answer, Exception):
            raise NotResolved(f"{host} cannot be resolved: {describe(answer)}")
        return answer

    async def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> httpcore.AsyncNetworkStream:
        raise AddressRefused("a webhook goes over TCP")

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def _answer(resolver: Resolver, host: str, port: int) -> list[str] | Exception:
    try:
        return list(resolver(host, port))
    except Exception as error:
        return error


def _ask_system(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    # A scope stands apart from the address; ours is judged with it.
    return [_with_scope(place) for _, _, _, _, place in found]


def _with_scope(place: tuple[Any, ...]) -> str:
    address = str(place[0])
    scope = place[3] if len(place) > 3 else 0
    return f"{address}%{scope}" if scope and "%" not in address else address
