"""`https://`: webhooks, one POST for each message, through httpcore.

Promise: `Delivered` means that the receiver answered 2xx to this very message. Silence after the
request went out is `Unknown`, never a guess, and no answer makes us follow it anywhere.

httpcore is what httpx is made of. It is used by itself because it has no redirects, cookies,
proxies of the environment or decompression that could be left switched on by mistake. Its pool is
not used: it hands one idle connection to all who wait and sorts them out afterwards, which costs
more than the requests. Whoever has a slot takes a kept connection, or makes one.

Messages go side by side, `concurrency` at a time; order per key is kept by the relay, which has
one message of a key under way. A receiver that asks for rest gets it, and one that is gone is left
alone, whatever the relay goes on trying.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from postroom.brokers.base import (
    BrokerOptions,
    Capabilities,
    Outcome,
    Permanent,
    Scope,
    Transient,
    Unknown,
)
from postroom.brokers.invoke import describe
from postroom.brokers.webhook_address import Target
from postroom.brokers.webhook_wire import is_gone, meaning, request_headers
from postroom.errors import MissingDriver, Unreachable
from postroom.messages import Message

if TYPE_CHECKING:
    from postroom.brokers.webhook_net import Resolver

__all__ = ["WebhookBroker", "open_broker"]

CONNECT_SECONDS = 5.0
KEEP_ALIVE_SECONDS = 30.0
MAX_ANSWER_BYTES = 16 * 1024
ANSWER_SECONDS = 2.0
_MOST_PATHS = 10_000


@dataclass(slots=True)
class _Request:
    """How far one request came."""

    sent: bool = False
    fresh: bool = False
    stream: Any = None

    async def trace(self, event: str, told: Any) -> None:
        if event == "connection.connect_tcp.started":
            self.fresh = True
        elif event == "connection.connect_tcp.complete":
            self.stream = told["return_value"]
        elif event == "http11.send_request_headers.started":
            self.sent = True


class WebhookBroker:
    """Posts to one receiver, or to a path for each topic where the URL holds `{topic}`.

    `resolver` stands in for the system's name resolution; whatever it answers is checked.
    """

    def __init__(
        self, url: str, options: BrokerOptions | None = None, *, resolver: Resolver | None = None
    ) -> None:
        try:
            from postroom.brokers import webhook_net
        except ImportError as error:
            raise MissingDriver(
                "https:// needs httpcore: pip install 'postroom[webhooks]'"
            ) from error
        import httpcore

        self._http: Any = httpcore
        self._options = options or BrokerOptions()
        self._target = Target.of(url, self._options.extra)
        self._new_backend: Callable[[], Any] = lambda: webhook_net.GuardedBackend(
            self._target, resolver
        )
        self._refused = webhook_net.AddressRefused
        self._not_resolved = webhook_net.NotResolved
        self._scope: Scope = "topic" if self._target.by_topic else "broker"
        self.capabilities = Capabilities(max_batch=self._target.concurrency)
        self._home: tuple[int, asyncio.AbstractEventLoop] | None = None
        self._kept: list[Any] = []
        self._backend: Any = None
        self._slots = asyncio.Semaphore(self._target.concurrency)
        # By path: until when it rests, and why. One that is gone rests for ever.
        self._resting: dict[str, tuple[float, Transient]] = {}
        self._answered_at: dict[str, float] = {}
        self._sends = 0
        self._idle = asyncio.Event()
        self._closed = False

    def __repr__(self) -> str:
        return str(self._target)

    async def send(self, batch: Sequence[Message], *, epoch: int = 0) -> list[Outcome]:
        """Post all; the whole of it takes at most the send timeout."""
        if self._closed:
            closed = Transient("closed", f"the broker {self} was closed", down="broker")
            return [closed] * len(batch)
        self._come_home()
        deadline = self._now() + self._options.send_timeout_seconds
        outcomes: dict[int, Outcome] = {}
        todo = iter(enumerate(batch))

        async def work() -> None:
            for index, message in todo:
                outcomes[index] = await self._in_turn(message, epoch, deadline)

        self._sends += 1
        self._idle.clear()
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self._target.concurrency, len(batch))):
                    group.create_task(work())
        finally:
            self._sends -= 1
            if not self._sends:
                self._idle.set()
        return [outcomes[index] for index in range(len(batch))]

    async def ping(self) -> None:
        """Connect, with TLS, and say nothing: a receiver should not be bothered with questions."""
        if self._closed:
            raise Unreachable(f"the broker {self} was closed")
        self._come_home()
        resting = None if self._target.by_topic else self._at_rest(self._target.path)
        if resting is not None and is_gone(resting):
            raise Unreachable(resting.text)
        seconds = min(CONNECT_SECONDS, self._options.send_timeout_seconds)
        target = self._target
        try:
            async with asyncio.timeout(seconds):
                stream = await self._backend.connect_tcp(target.host, target.port, seconds)
                try:
                    if target.context is not None:
                        stream = await stream.start_tls(target.context, target.host, seconds)
                finally:
                    await stream.aclose()
        except Exception as error:
            raise Unreachable(self._not_connected(error).text) from None

    async def close(self) -> None:
        """Let requests that have begun come to their end, then close their connections."""
        self._closed = True
        if self._home != (os.getpid(), asyncio.get_running_loop()):
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._options.send_timeout_seconds):
                if self._sends:
                    await self._idle.wait()
        kept, self._kept = self._kept, []
        for connection in kept:
            await connection.aclose()

    # One message.

    async def _in_turn(self, message: Message, epoch: int, deadline: float) -> Outcome:
        path = self._target.path_for(message.topic)
        if resting := self._at_rest(path):
            return resting
        start_by = deadline - self._options.send_timeout_seconds / 2
        slots = self._slots
        try:
            async with asyncio.timeout_at(start_by):
                await slots.acquire()
        except TimeoutError:
            return self._busy()
        try:
            # Others may have learnt something while this one waited for its turn.
            if resting := self._at_rest(path):
                return resting
            if self._now() >= start_by:
                return self._busy()
            return await self._post(message, path, epoch, deadline)
        finally:
            slots.release()

    async def _post(self, message: Message, path: str, epoch: int, deadline: float) -> Outcome:
        try:
            request = self._request(message, path, epoch)
        except (ValueError, TypeError) as error:
            return Permanent("bad_header", describe(error))
        began = self._now()
        while True:
            far = _Request()
            request.extensions["trace"] = far.trace
            try:
                outcome = await self._exchange(request, far, deadline)
            except Exception as error:
                if far.sent and not far.fresh and self._hung_up(error):
                    continue  # a connection kept from earlier had ended; the next one is fresh
                return self._without_answer(error, far, path, began)
            self._note_answer(path)
            if isinstance(outcome, Transient) and outcome.down is not None:
                self._rest(path, outcome)
            return outcome

    async def _exchange(self, request: Any, far: _Request, deadline: float) -> Outcome:
        connection = await self._connection()
        try:
            async with asyncio.timeout_at(deadline):
                response = await connection.handle_async_request(request)
            try:
                body = await self._body(response, min(deadline, self._now() + ANSWER_SECONDS))
            finally:
                await response.aclose()
        except BaseException:
            if far.stream is not None:  # cancelled in the midst of TLS, nobody else closes it
                await far.stream.aclose()
            raise
        await self._keep(connection)
        headers = {
            name.lower().decode(): value.decode("latin-1") for name, value in response.headers
        }
        return meaning(response.status, headers, body, scope=self._scope)

    async def _body(self, response: Any, until: float) -> bytes:
        """As much of the answer as we care for. Its end only lets the connection be kept: what
        the receiver thinks of the message stands in the status, which has come."""
        body = b""
        with contextlib.suppress(Exception):
            async with (
                asyncio.timeout_at(until),
                contextlib.aclosing(aiter(response.stream)) as parts,
            ):
                async for part in parts:
                    body += part
                    if len(body) > MAX_ANSWER_BYTES:
                        break
        return body[:MAX_ANSWER_BYTES]

    def _request(self, message: Message, path: str, epoch: int) -> Any:
        target = self._target
        headers = request_headers(
            message,
            source=self._options.source,
            epoch=epoch,
            secrets=target.secrets,
            now=time.time(),
        )
        headers |= {
            "host": target.authority,
            "content-length": str(len(message.payload)),
            "accept-encoding": "identity",
            "user-agent": "postroom",
        }
        if target.credentials is not None:
            headers["authorization"] = target.credentials
        return self._http.Request(
            "POST",
            self._http.URL(
                scheme=target.scheme.encode(),
                host=target.host.encode(),
                port=target.port,
                target=path.encode(),
            ),
            headers=[(name.encode(), value.encode("ascii")) for name, value in headers.items()],
            content=message.payload,
            extensions={"timeout": {"connect": CONNECT_SECONDS}},
        )

    # What silence means.

    def _hung_up(self, error: Exception) -> bool:
        http = self._http
        return isinstance(error, http.ReadError | http.WriteError | http.RemoteProtocolError)

    def _without_answer(self, error: Exception, far: _Request, path: str, began: float) -> Outcome:
        if isinstance(error, self._http.LocalProtocolError):
            return Permanent("bad_header", describe(error))
        if not far.sent:
            return self._not_connected(error)
        if not isinstance(error, TimeoutError | self._http.TimeoutException):
            code = "bad_answer" if isinstance(error, self._http.RemoteProtocolError) else "lost"
            return Unknown(code, f"{self} did not answer as HTTP does: {describe(error)}")
        # It is the receiver's fault, unless it had answers for others meanwhile.
        down = None if self._answered_at.get(path, 0.0) >= began else self._scope
        text = f"no answer from {self} within {self._options.send_timeout_seconds:g} s"
        return Unknown("timeout", text, down=down)

    def _not_connected(self, error: Exception) -> Transient:
        code = "unreachable"
        if isinstance(error, self._refused):
            code, said = "address_refused", str(error)
        elif isinstance(error, self._not_resolved):
            code, said = "not_resolved", str(error)
        elif isinstance(error, TimeoutError | self._http.TimeoutException):
            said = "it does not accept connections in time"
        else:
            said = describe(error.__cause__ or error)
            code = "tls" if "SSL" in said or "certificate" in said else code
        return Transient(code, f"cannot connect to {self}: {said}", down="broker")

    def _note_answer(self, path: str) -> None:
        if len(self._answered_at) >= _MOST_PATHS:
            self._answered_at.clear()
        self._answered_at[path] = self._now()

    # Rest.

    def _at_rest(self, path: str) -> Transient | None:
        until, why = self._resting.get(path, (0.0, None))
        if why is None or until > self._now():
            return why
        del self._resting[path]
        return None

    def _rest(self, path: str, why: Transient) -> None:
        if len(self._resting) >= _MOST_PATHS:
            self._resting.clear()
        if is_gone(why):
            self._resting[path] = (float("inf"), why)
        elif why.retry_after_seconds:
            self._resting[path] = (self._now() + why.retry_after_seconds, why)

    def _busy(self) -> Transient:
        text = (
            f"{self} answered too slowly: {self._target.concurrency} requests at a time left no "
            f"room for this one within {self._options.send_timeout_seconds / 2:g} s"
        )
        return Transient("busy", text, down="broker")

    # The connections.

    def _come_home(self) -> None:
        """After a fork, or on another loop, the old connections are somebody else's."""
        home = (os.getpid(), asyncio.get_running_loop())
        if self._home == home:
            return
        self._home = home
        self._backend = self._new_backend()
        self._slots = asyncio.Semaphore(self._target.concurrency)
        self._idle = asyncio.Event()
        self._sends = 0
        self._kept = []

    async def _connection(self) -> Any:
        """A connection that was kept and has not ended since, or one to be made."""
        while self._kept:
            connection = self._kept.pop()
            if connection.is_available() and not connection.has_expired():
                return connection
            await connection.aclose()
        target = self._target
        return self._http.AsyncHTTPConnection(
            origin=self._http.Origin(target.scheme.encode(), target.host.encode(), target.port),
            ssl_context=target.context,
            keepalive_expiry=KEEP_ALIVE_SECONDS,
            network_backend=self._backend,
        )

    async def _keep(self, connection: Any) -> None:
        if connection.is_available() and not self._closed:
            self._kept.append(connection)
        else:
            await connection.aclose()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def open_broker(url: str, options: BrokerOptions) -> WebhookBroker:
    """The broker for `https://host/path#secret=whsec_…`."""
    return WebhookBroker(url, options)
