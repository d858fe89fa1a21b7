"""A connection to NATS that asks JetStream's API and hears what consumers are sent.

Promise: a question ends with its answer, with `Refusal`, or with `Unreachable`; never in silence.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterable
from typing import Any

from postroom.brokers.invoke import describe
from postroom.brokers.nats_link import Link
from postroom.brokers.nats_wire import Arrived, parsed_headers
from postroom.errors import Unreachable
from postroom.signals import redact

__all__ = ["AskingLink", "Refusal"]

API = "$JS.API."
_NO_RESPONDERS = "503"
_WORK = ("$js.ack.", "$js.api.consumer.msg.next.")  # nats-py tells of errors in lower case
_DENIED = re.compile(r'permissions violation for publish to "([^"]+)"')


class Refusal(Exception):
    """JetStream answered with an error; `number` is its own for what is wrong."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(f"{text} ({number})" if number else text)
        self.number = number


class AskingLink(Link):
    """A link whose inbox takes answers to questions, and messages for `on_message`."""

    def __init__(self, client: Any, **limits: Any) -> None:
        super().__init__(client, **limits)
        self.on_message: Callable[[Arrived], None] = lambda _: None
        self._ears: dict[bytes, Callable[[Any], None]] = {}
        self._denied: dict[str, str] = {}
        self.heard_at = self._loop.time()
        self.muted: str | None = None  # why pulls or acks do not get through

    @property
    def now(self) -> float:
        """The loop's time."""
        return self._loop.time()

    async def ask(self, what: str, body: object, deadline: float) -> dict[str, Any]:
        """The answer of JetStream's API to a request."""
        data = json.dumps(body).encode() if body is not None else b""
        answer = await self.call(API + what, data, deadline)
        try:
            document = json.loads(answer.data)
            error = document.get("error")
        except (ValueError, AttributeError):
            raise Refusal(0, f"the answer to {what} is not JetStream's") from None
        if error:
            said = redact(str(error.get("description") or "no reason given")[:500])
            raise Refusal(int(error.get("err_code") or 0), said)
        return dict(document)

    async def call(self, subject: str, data: bytes, deadline: float) -> Any:
        """Publish with a reply subject of our own, and wait for what comes there."""
        heard: list[Any] = []
        token, reply = self.hear(heard.append)
        self._denied.pop(subject.lower(), None)
        try:
            await self.write(publication(subject, data, reply))
            await self.until(lambda: bool(heard) or subject.lower() in self._denied, deadline)
        finally:
            self.ignore(token)
        if not heard:
            if denied := self._denied.get(subject.lower()):
                raise Refusal(0, f"this user may not publish to {subject}: {denied}")
            raise Unreachable(f"no answer about {subject}")
        if (heard[0].headers or {}).get("Status") == _NO_RESPONDERS:
            raise Refusal(503, f"nobody answers on {subject}: is JetStream on, and allowed here?")
        return heard[0]

    def hear(self, ear: Callable[[Any], None]) -> tuple[bytes, bytes]:
        """A reply subject, and its token; what comes there goes to `ear` until `ignore`."""
        token, reply = self.next_token()
        self._ears[token] = ear
        return token, reply

    def ignore(self, token: bytes) -> None:
        """Hear no more of it."""
        self._ears.pop(token, None)

    def _take_from_here(self) -> None:
        from postroom.brokers.nats_reader import MessageReader  # imports nats-py

        self._subscription._pending_queue = _Straight(self._subscription, self._take)
        self.client._ps = MessageReader(
            self.client._ps, self._subscription._id, self._take_messages
        )

    async def _on_message(self, message: Any) -> None:
        """What came before messages were taken straight from the socket."""
        self._take(message)

    def _take(self, message: Any) -> None:
        """A message of a stream bears its own subject, all else that of a reply."""
        if message.reply:
            headers = parsed_headers(message.headers or {})
            arrived = Arrived(message.subject, message.reply, headers, message.data)
            self._take_messages([arrived])
            return
        self.heard += 1
        self.heard_at = self._loop.time()
        if ear := self._ears.get(message.subject[len(self._prefix) :].encode()):
            ear(message)
        self.wake()

    def _take_messages(self, arrived: Iterable[Arrived]) -> None:
        self.heard += 1
        self.heard_at = self._loop.time()
        for each in arrived:
            self.on_message(each)
        self.wake()

    async def on_error(self, error: Exception) -> None:
        await super().on_error(error)
        if found := _DENIED.search(str(error).lower()):
            if len(self._denied) > 100:
                self._denied.clear()
            self._denied[found[1]] = describe(error)
            if found[1].startswith(_WORK):
                self.muted = f"this user may not publish to {found[1]}"
            self.wake()

    async def rest(self, seconds: float) -> None:
        """Wait until something comes, at most so long."""
        await self._woken(seconds)

    async def answers(self, seconds: float) -> bool:
        """Whether the server shows a sign of life within so many seconds."""
        heard = self.heard
        await self.echo()
        return await self.until(lambda: self.heard > heard, self.now + seconds)


class _Straight(asyncio.Queue[Any]):
    """In place of a subscription's queue: a message is taken where it is read from the socket.

    Through the queue each one would wake a task of nats-py's first, one turn of the loop later.
    """

    def __init__(self, subscription: Any, take: Callable[[Any], None]) -> None:
        super().__init__()
        self._owner, self._take = subscription, take

    def put_nowait(self, message: Any) -> None:
        self._owner._pending_size -= len(message.data)  # nats-py counts what waits here
        self._take(message)


def publication(subject: str, data: bytes, reply: bytes = b"") -> bytes:
    """The bytes that publish without headers. The subject is ours or the server's own."""
    gap = b" " if reply else b""
    return b"PUB %b %b%b%d\r\n%b\r\n" % (subject.encode(), reply, gap, len(data), data)
