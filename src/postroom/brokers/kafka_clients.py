"""The clients of librdkafka that one broker has: made when first needed, thrown away when spent.

Promise: a client is used only in the process and on the loop that it was made in, and none is ended
where its end would be waited for.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from typing import Any

from postroom.brokers.invoke import describe, in_thread
from postroom.brokers.kafka_address import Address
from postroom.brokers.kafka_link import Link, Quiet
from postroom.brokers.kafka_topics import Admin
from postroom.errors import ConfigurationError
from postroom.signals import redact

__all__ = ["Clients"]

MAX_OUTSTANDING_BYTES = 32 * 1024 * 1024
# As librdkafka has it itself. With 2 its requests are smaller, and Kafka has more work with them.
LINGER_MS = 5
_LARGEST = 64 * 1024 * 1024  # of one message; what the broker takes is for the broker to say
_CLOSE_SECONDS = 5.0


class Clients:
    """A producer, another for messages that travel alone, and a client that only asks."""

    def __init__(self, library: Any, address: Address) -> None:
        self._library = library
        self._address = address
        self._max_rows = address.max_outstanding
        self._quiet = Quiet(address.without_secrets)
        self._home: tuple[int, asyncio.AbstractEventLoop] | None = None
        self._link: Link | None = None
        self._narrow: Link | None = None
        self._admin: Admin | None = None
        self._check_settings()

    @property
    def at_home(self) -> bool:
        """Whether this is the process and the loop that they were made in."""
        return self._home == (os.getpid(), asyncio.get_running_loop())

    def come_home(self) -> None:
        """After a fork, or on another loop, the old clients are somebody else's: let go of them."""
        forked = self._home is not None and self._home[0] != os.getpid()
        for box in self._boxes():
            if forked:
                _keep_for_ever(box[0])
            _drop(box)
        self._home = (os.getpid(), asyncio.get_running_loop())

    def link(self) -> Link:
        """The producer, made anew if there is none that works."""
        if self._link is None or self._link.lost:
            if self._link is not None:
                self.discard(self._link)
            # What is refused ends it, and what waits is never thrown away one by one: only so can
            # nothing pass what failed.
            self._link = self._new_link({"enable.gapless.guarantee": True}, strict=True)
        return self._link

    def narrow(self) -> Link:
        """The producer that puts every message into a batch of its own."""
        if self._narrow is None or self._narrow.lost:
            if self._narrow is not None:
                self.discard(self._narrow)
            self._narrow = self._new_link({"batch.num.messages": 1}, strict=False)
        return self._narrow

    def admin(self) -> Admin:
        if self._admin is None:
            self._admin = Admin(self._library, self.settings(), self._address.without_secrets)
        return self._admin

    def discard(self, link: Link) -> None:
        """End a producer, with whatever it has not sent, once nobody awaits reports of it."""
        if link is self._link:
            self._link = None
        if link is self._narrow:
            self._narrow = None
        link.lose()
        if not link.users and (box := link.give_up()):
            _drop(box)

    async def end(self) -> None:
        if ending := [_drop(box) for box in self._boxes()]:
            await asyncio.wait(ending, timeout=_CLOSE_SECONDS)

    def settings(self) -> dict[str, Any]:
        """What every client is told."""
        return {**self._address.common(), "logger": self._quiet}

    def said(self, error: Exception) -> str:
        """The text of an error, without secrets."""
        said = error.args[0] if error.args else error
        text = said.str() if isinstance(said, self._library.KafkaError) else describe(error)
        return self._address.without_secrets(redact(text))

    # Inside.

    def _new_link(self, settings: dict[str, Any], *, strict: bool) -> Link:
        return Link(
            self._library.Producer,
            {**self._producer_settings(), **settings},
            strict=strict,
            max_rows=self._max_rows,
            max_bytes=MAX_OUTSTANDING_BYTES,
            without_secrets=self._address.without_secrets,
        )

    def _producer_settings(self) -> dict[str, Any]:
        return {
            "linger.ms": LINGER_MS,
            "topic.metadata.propagation.max.ms": 2000,
            "message.max.bytes": _LARGEST,
            **self.settings(),
            "acks": "all",
            "enable.idempotence": True,
            "partitioner": "murmur2_random",
            "message.timeout.ms": 0,  # a message that gave up alone would be passed by others
            # Our own window is smaller, so that librdkafka's is never full.
            "queue.buffering.max.messages": 2 * self._max_rows + 1000,
        }

    def _check_settings(self) -> None:
        """Refuse what librdkafka refuses now, and not at the first message."""
        if self._address.settings:
            try:
                self._library.Producer({**self._producer_settings(), "bootstrap.servers": ""})
            except self._library.KafkaException as error:
                raise ConfigurationError(f"kafka://: {self.said(error)}") from None

    def _boxes(self) -> list[list[Any]]:
        """Every client, each in a box that holds the last reference to it."""
        held = (self._link, self._narrow, self._admin)
        self._link = self._narrow = self._admin = None
        return [box for client in held if client is not None and (box := client.give_up())]


def _drop(box: list[Any]) -> asyncio.Future[None]:
    """End the client in this box in a thread, for it waits for threads of its own."""
    return in_thread(box.clear)


def _keep_for_ever(client: Any) -> None:
    """A client that a fork has copied never ends: its threads are not here, and it would wait for
    them for ever."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))
