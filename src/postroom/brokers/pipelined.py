"""A broker that has many messages under way on one connection: what such brokers have in common.

Promise: `send` answers for each message within the send timeout. What was written and not answered
is `Unknown`; what was not written is `Transient`, and is never written later by anybody.

The connection is made at the first send and belongs to the process and the event loop that made
it: after a fork, or on another loop, a new one is made. A connection that fails is thrown away with
what it had not sent; clients' own reconnecting would send it later, when another relay may own its
lane.
"""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

from postroom.brokers.base import (
    DELIVERED,
    BrokerOptions,
    Capabilities,
    Delivered,
    Outcome,
    Permanent,
    Scope,
    Transient,
    Unknown,
)
from postroom.brokers.options import whole_number
from postroom.brokers.window import MAX_OUTSTANDING, Sending, Window
from postroom.errors import Unreachable
from postroom.messages import Message

__all__ = ["CONNECT_SECONDS", "Link", "Pipelined"]

CONNECT_SECONDS = 2.0
_CHUNK_ROWS = 128
_CHUNK_BYTES = 256 * 1024
_ECHO_AT = 0.75  # of the send timeout: time enough for the server to show that it lives


class Link(Window, ABC):
    """A connection, and what is on its way over it."""

    @property
    def stalled(self) -> Transient | None:
        """Why the server takes no messages at the moment, if it says so."""
        return None

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether it can be written to."""

    @abstractmethod
    def command(self, message: Message, source: str, epoch: int) -> bytes | Permanent:
        """The bytes that send a message, or why it can never be sent."""

    @abstractmethod
    def number(self, message: Message) -> int:
        """The number under which the message written next will be answered."""

    @abstractmethod
    def write(self, data: bytes) -> None:
        """Give bytes to the socket, behind all that were given before; it waits for nothing."""

    @abstractmethod
    def echo(self) -> Sending:
        """Ask for a sign of life: answered when it came."""

    @abstractmethod
    def discard(self) -> None:
        """Throw the connection away, with whatever it has not sent."""

    @abstractmethod
    async def close(self) -> None:
        """Close it in good order, or within a second without."""


L = TypeVar("L", bound=Link)


class Pipelined(ABC, Generic[L]):
    """Sends through a link of its kind, and makes a new one when the old one is lost."""

    kind: str  # the server's name, for people
    topics_apart = False  # whether one topic may be silent while others are answered

    def __init__(self, options: BrokerOptions) -> None:
        self.capabilities = Capabilities()
        self._options = options
        self._max_rows = whole_number(options.extra, "max_outstanding", MAX_OUTSTANDING)
        self._home: tuple[int, asyncio.AbstractEventLoop] | None = None
        self._link: L | None = None
        self._connecting = asyncio.Lock()
        self._failed: tuple[float, Transient] | None = None
        self._sends = 0
        self._closed = False

    @abstractmethod
    async def _connect(self, seconds: float) -> L | Transient:
        """A fresh link, or why there is none."""

    @abstractmethod
    def __repr__(self) -> str:
        """The address, without secrets."""

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
        """Return if the server answers, else raise `Unreachable`."""
        deadline = self._now() + self._options.send_timeout_seconds
        link = await self._connected(deadline)
        if isinstance(link, Transient):
            raise Unreachable(link.text)
        if link.stalled:
            raise Unreachable(link.stalled.text)
        asked = link.echo()
        until = min(deadline, self._now() + CONNECT_SECONDS)
        if not await link.until(lambda: asked.answered, until) and not link.lost:
            link.discard()
            raise Unreachable(f"{self.kind} at {self} accepts connections but does not answer")
        (answer,) = asked.outcomes
        if not isinstance(answer, Delivered):
            said = answer.text if answer else "the connection was lost"
            raise Unreachable(f"{self.kind} at {self}: {said}")

    async def close(self) -> None:
        """Let sends that have begun come to their end, then close the connection."""
        self._closed = True
        if self._link is not None and self._home == (os.getpid(), asyncio.get_running_loop()):
            link, self._link = self._link, None
            deadline = self._now() + self._options.send_timeout_seconds
            await link.until(lambda: not self._sends, deadline)
            await link.close()

    # One send.

    async def _write(self, link: L, sending: Sending, epoch: int, deadline: float) -> None:
        """Write the batch in chunks. Between a message's number and its bytes nobody else may
        write, or answers would be taken for those to others."""
        chunk: list[bytes] = []
        chunk_bytes = 0
        source = self._options.source
        for index, message in enumerate(sending.batch):
            command = link.command(message, source, epoch)
            if isinstance(command, Permanent):
                sending.outcomes[index] = command
                continue
            if link.full:
                _flush(link, chunk)
                chunk_bytes = 0
                if not await link.until_room(deadline):
                    break
            if link.lost or link.stalled:
                break
            link.expect(link.number(message), sending, index, len(command))
            chunk.append(command)
            chunk_bytes += len(command)
            if len(chunk) >= _CHUNK_ROWS or chunk_bytes >= _CHUNK_BYTES:
                _flush(link, chunk)
                chunk_bytes = 0
                await asyncio.sleep(0)  # let the socket and the answers have their turn
        _flush(link, chunk)

    async def _await_answers(self, link: L, sending: Sending, deadline: float) -> None:
        echo_at = deadline - (1 - _ECHO_AT) * self._options.send_timeout_seconds
        if not await link.until(lambda: sending.answered, echo_at) and not link.lost:
            if self.topics_apart and not link.stalled:
                link.echo()
            await link.until(lambda: sending.answered, deadline)

    def _conclude(self, link: L, sending: Sending, *, silent: bool) -> list[Outcome]:
        """The outcomes, with what it means where no answer came.

        A message is not at fault for silence: servers refuse aloud. So the whole broker counts as
        down if nothing at all was heard, and a topic if nothing of it was delivered.
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
        stalled = link.stalled
        whole = silent or not self.topics_apart

        def without_answer(index: int) -> Outcome:
            if index not in awaited:
                late = Transient("not_sent", "time or connection ended before it", down="broker")
                return stalled or late
            if stalled:
                return Unknown(stalled.code, f"{text}: {stalled.text}", down="broker")
            if whole:
                return Unknown("timeout", text, down="broker")
            topic = sending.batch[index].topic
            down: Scope | None = None if topic in delivered else "topic"
            return Unknown("timeout", f"{text} about {topic}", down=down)

        outcomes = [
            outcome or without_answer(index) for index, outcome in enumerate(sending.outcomes)
        ]
        if awaited and whole and not stalled:
            link.discard()
        return outcomes

    # The connection.

    async def _connected(self, deadline: float) -> L | Transient:
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
            made = await self._connect(max(min(CONNECT_SECONDS, deadline - began), 0.01))
            if isinstance(made, Transient):
                self._failed = (self._now(), made)
                return made
            self._link = made
            return made

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _flush(link: Link, chunk: list[bytes]) -> None:
    if chunk:
        if not link.lost:
            link.write(b"".join(chunk))
        chunk.clear()
