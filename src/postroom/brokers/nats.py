"""`nats://` and `tls://`: NATS JetStream through nats-py, many messages on their way at once.

Promise: `Delivered` means that a stream stored the message; no answer is `Unknown`, never a guess.

A batch goes out as core publishes, each with a reply subject of its own under one inbox with one
subscription, because awaiting messages one by one is ten times slower. The connection is made at
the first send. nats-py's own reconnecting is off: it would keep bytes of an old send and put them
on the wire later, when another relay may own their lane. A lost connection is thrown away with
what it had not sent, and the next send makes a fresh one.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from postroom.brokers.base import (
    DELIVERED,
    BrokerOptions,
    Capabilities,
    Outcome,
    Permanent,
    Scope,
    Transient,
    Unknown,
)
from postroom.brokers.invoke import describe
from postroom.brokers.nats_address import Address
from postroom.brokers.nats_ask import AskingLink, Refusal
from postroom.brokers.nats_durable import Durable
from postroom.brokers.nats_examine import examine, keeps
from postroom.brokers.nats_link import Link, Sending
from postroom.brokers.nats_receive import NatsSubscription
from postroom.brokers.nats_tray import durable_name
from postroom.brokers.nats_wire import publish_command
from postroom.brokers.options import split_url, whole_number
from postroom.errors import MissingDriver, Unreachable
from postroom.messages import Message, check_topic

__all__ = ["NatsBroker", "open_broker"]

OPTIONS = (
    *("user", "password", "token", "credentials", "tls_ca", "tls_cert", "tls_key"),
    *("inbox_prefix", "max_outstanding", "max_unacked", "ack_wait_seconds"),
)
CONNECT_SECONDS = 2.0
MAX_OUTSTANDING = 4096
MAX_OUTSTANDING_BYTES = 16 * 1024 * 1024
MAX_UNACKED = 1000
ACK_WAIT_SECONDS = 30
_CHUNK_ROWS = 128
_CHUNK_BYTES = 256 * 1024
L = TypeVar("L", bound=Link)
_T = TypeVar("_T")
_ECHO_AT = 0.75  # of the send timeout: time enough for the server to show that it lives


class NatsBroker:
    """Sends to JetStream, and receives from it.

    `OPTIONS` may stand in the URL, as nats://host?tls_ca=ca.pem, or in `options.extra`.
    """

    def __init__(self, url: str, options: BrokerOptions | None = None) -> None:
        try:
            from nats.aio.client import Client
        except ImportError as error:
            raise MissingDriver("nats:// needs nats-py: pip install 'postroom[nats]'") from error
        self.capabilities = Capabilities()
        self._new_client: Callable[[], Any] = Client
        self._options = options or BrokerOptions()
        url, extra = split_url(url, self._options, OPTIONS)
        self._address = Address.of(url, extra)
        self._inbox = extra.get("inbox_prefix", "_INBOX")
        self._max_rows = whole_number(extra, "max_outstanding", MAX_OUTSTANDING)
        self._max_unacked = whole_number(extra, "max_unacked", MAX_UNACKED)
        self._ack_wait_seconds = whole_number(extra, "ack_wait_seconds", ACK_WAIT_SECONDS)
        self._home: tuple[int, asyncio.AbstractEventLoop] | None = None
        self._link: Link | None = None
        self._connecting = asyncio.Lock()
        self._failed: tuple[float, Transient] | None = None
        self._sends = 0
        self._closed = False

    def __repr__(self) -> str:
        return str(self._address)

    async def send(self, batch: Sequence[Message], *, epoch: int = 0) -> list[Outcome]:
        """Send all, then await all answers; the whole of it takes at most the send timeout."""
        deadline = self._now() + self._options.send_timeout_seconds
        link = await self._connected(deadline)
        if isinstance(link, Transient):
            return [link] * len(batch)
        sending = Sending(batch)
        heard = link.heard
        self._sends += 1
        try:
            await self._write(link, sending, epoch, deadline)
            await self._await_answers(link, sending, deadline)
            return self._conclude(link, sending, silent=link.heard == heard)
        finally:
            self._sends -= 1
            link.forget(sending)

    async def ping(self) -> None:
        deadline = self._now() + self._options.send_timeout_seconds
        link = await self._connected(deadline)
        if isinstance(link, Transient):
            raise Unreachable(link.text)
        heard = link.heard
        await link.echo()
        until = min(deadline, self._now() + CONNECT_SECONDS)
        if not await link.until(lambda: link.heard > heard, until):
            link.discard()
            raise Unreachable(f"NATS at {self} accepts connections but does not answer")

    async def receive(self, topics: Sequence[str], *, consumer: str) -> NatsSubscription:
        """Receive for `consumer`, over a connection of its own, from the streams of the topics."""
        names = [check_topic(topic) for topic in topics]
        durable = Durable(
            durable_name(consumer),
            tuple(names),
            ack_wait_seconds=self._ack_wait_seconds,
            pin_seconds=self._ack_wait_seconds / 3,
            max_unacked=self._max_unacked,
        )
        made = NatsSubscription(self._connect_to_ask, str(self), names, durable)
        await made.open()
        return made

    async def examine(self, topics: Sequence[str]) -> list[str]:
        """A sentence for each setting of a stream that could lose messages of these topics."""
        return await self._ask(examine, topics)

    async def keeps(self, topics: Sequence[str]) -> dict[str, float | None]:
        """For how many seconds the streams of these topics keep messages; None: for ever."""
        return await self._ask(keeps, topics)

    async def _ask(
        self, question: Callable[[Any, Sequence[str]], Awaitable[_T]], topics: Sequence[str]
    ) -> _T:
        link = await self._connect_to_ask()
        if isinstance(link, Transient):
            raise Unreachable(link.text)
        try:
            return await question(link, [check_topic(topic) for topic in topics])
        except Refusal as refusal:
            raise Unreachable(f"NATS at {self}: {refusal}") from None
        finally:
            await link.close()

    async def close(self) -> None:
        """Let sends that have begun come to their end, then close the connection."""
        self._closed = True
        if self._link is not None and self._home == (os.getpid(), asyncio.get_running_loop()):
            link, self._link = self._link, None
            deadline = self._now() + self._options.send_timeout_seconds
            await link.until(lambda: not self._sends, deadline)
            await link.close()

    # One send.

    async def _write(self, link: Link, sending: Sending, epoch: int, deadline: float) -> None:
        chunk: list[bytes] = []
        chunk_bytes = 0
        max_payload = link.client.max_payload
        for index, message in enumerate(sending.batch):
            token, reply = link.next_token()
            command = publish_command(
                message, reply, source=self._options.source, epoch=epoch, max_payload=max_payload
            )
            if isinstance(command, Permanent):
                sending.outcomes[index] = command
                continue
            if link.full:
                await link.write(b"".join(chunk))
                chunk, chunk_bytes = [], 0
                if not await link.until_room(deadline):
                    break
            if link.lost:
                break
            link.expect(token, sending, index, len(command))
            chunk.append(command)
            chunk_bytes += len(command)
            if len(chunk) >= _CHUNK_ROWS or chunk_bytes >= _CHUNK_BYTES:
                await link.write(b"".join(chunk))
                chunk, chunk_bytes = [], 0
                await asyncio.sleep(0)  # let the socket and the answers have their turn
        if chunk and not link.lost:
            await link.write(b"".join(chunk), alone=self._sends == 1)

    async def _await_answers(self, link: Link, sending: Sending, deadline: float) -> None:
        echo_at = deadline - (1 - _ECHO_AT) * self._options.send_timeout_seconds
        if not await link.until(lambda: sending.answered, echo_at) and not link.lost:
            await link.echo()
            await link.until(lambda: sending.answered, deadline)

    def _conclude(self, link: Link, sending: Sending, *, silent: bool) -> list[Outcome]:
        """The outcomes, with what it means where no answer came.

        A message is not at fault for silence: JetStream refuses aloud. So the whole broker counts
        as down if nothing at all was heard, and a topic if nothing of it was delivered.
        """
        if None not in sending.outcomes:
            return [outcome for outcome in sending.outcomes if outcome]
        awaited = link.awaited(sending)
        delivered = {
            message.topic
            for message, outcome in zip(sending.batch, sending.outcomes, strict=True)
            if outcome is DELIVERED
        }
        text = f"no answer from {self} within {self._options.send_timeout_seconds:g} s"

        def without_answer(index: int) -> Outcome:
            if index not in awaited:
                return Transient("not_sent", "time or connection ended before it", down="broker")
            if silent:
                return Unknown("timeout", text, down="broker")
            topic = sending.batch[index].topic
            down: Scope | None = None if topic in delivered else "topic"
            return Unknown("timeout", f"{text} about {topic}", down=down)

        outcomes = [
            outcome or without_answer(index) for index, outcome in enumerate(sending.outcomes)
        ]
        if awaited and silent:
            link.discard()
        return outcomes

    # The connection.

    async def _connected(self, deadline: float) -> Link | Transient:
        """The connection, made anew if there is none, or why there is none."""
        if self._closed:
            return Transient("closed", f"the broker {self} was closed", down="broker")
        home = (os.getpid(), asyncio.get_running_loop())
        if self._home != home:
            # After a fork, or on another loop, the old connection is somebody else's: let go of it.
            self._home, self._link, self._connecting = home, None, asyncio.Lock()
        began = self._now()
        async with self._connecting:
            if self._link is not None:
                if self._link.alive:
                    return self._link
                self._link.discard()
                self._link = None
            if self._failed is not None and self._failed[0] >= began:
                return self._failed[1]  # somebody has just tried while we waited
            seconds = max(min(CONNECT_SECONDS, deadline - began), 0.01)
            made = await self._connect(seconds, Link)
            if isinstance(made, Transient):
                self._failed = (self._now(), made)
                return made
            self._link = made
            self.capabilities = Capabilities(max_bytes=made.client.max_payload)
            return made

    async def _connect_to_ask(self) -> AskingLink | Transient:
        return await self._connect(CONNECT_SECONDS, AskingLink)

    async def _connect(self, seconds: float, kind: type[L]) -> L | Transient:
        client = self._new_client()
        limits = {"max_rows": self._max_rows, "max_bytes": MAX_OUTSTANDING_BYTES}
        link = kind(client, inbox=self._inbox, **limits)
        deadline = self._now() + seconds
        try:
            self._address.guard(client)
            async with asyncio.timeout_at(deadline):
                await client.connect(**self._settings(link, seconds))
            await link.begin()
            await link.echo()
            heard = await link.until(lambda: link.heard > 0, deadline)
        except Exception as error:
            link.discard()
            return self._cannot_connect(link, error)
        except BaseException:
            link.discard()
            raise
        if link.barred or not heard:
            link.discard()
            return self._cannot_connect(link, TimeoutError("it does not answer"))
        return link

    def _settings(self, link: Link, seconds: float) -> dict[str, Any]:
        return {
            "name": "postroom",
            "allow_reconnect": False,
            "max_reconnect_attempts": 1,
            "reconnect_time_wait": 0,
            "connect_timeout": seconds,
            "pending_size": 1 << 40,  # our own window bounds it; nats-py would stop to flush
            "error_cb": link.on_error,
            "closed_cb": link.on_closed,
            **self._address.settings(),
        }

    def _cannot_connect(self, link: Link, error: Exception) -> Transient:
        if link.barred:
            text = (
                f"NATS at {self} does not let this user subscribe to {link.inbox}.*, where answers "
                "arrive: allow it, or set inbox_prefix to what is allowed"
            )
            return Transient("not_permitted", text, down="broker")
        # The list of servers being used up says less than what the last of them said.
        cause = link.error if type(error).__name__ == "NoServersError" else None
        text = self._address.without_secrets(describe(cause or error))
        code = "not_permitted" if "authorization" in text.lower() else "unreachable"
        return Transient(code, f"cannot connect to NATS at {self}: {text}", down="broker")

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def open_broker(url: str, options: BrokerOptions) -> NatsBroker:
    """The broker for `nats://host:4222` or `tls://host:4222`, with options behind a ?."""
    return NatsBroker(url, options)
