"""`redis://` and `rediss://`: Redis Streams through redis-py, many messages on their way at once.

Promise: `Delivered` means that Redis added the message to its stream, and with `replicas` that so
many replicas have it; no answer is `Unknown`. How much of that outlives a crash is up to the
server's own settings, which `examine` looks at.

A topic is a stream of that name. What all consumer groups of a stream have read and acknowledged
is cut off now and then, and nothing else ever is.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Sequence

from postroom.brokers.address import Address
from postroom.brokers.base import BrokerOptions, Capabilities, Outcome, Transient
from postroom.brokers.invoke import describe
from postroom.brokers.options import whole_number
from postroom.brokers.pipelined import Pipelined
from postroom.brokers.redis_link import Line, RedisLink, connect, largest
from postroom.brokers.redis_receiving import RedisSubscription
from postroom.brokers.redis_upkeep import examine, trim
from postroom.errors import ConfigurationError, MissingDriver, Unreachable
from postroom.messages import Message, check_topic

__all__ = ["RedisBroker", "open_broker"]

PORTS = {"redis": 6379, "rediss": 6379}
OPTIONS = ("prefix", "replicas", "trim_seconds", "lease_seconds")
_EXAMPLE = "redis://user:password@host:6379/0"
_MOST_TOPICS = 1000
_PERMISSION = ("NOAUTH", "WRONGPASS", "NOPERM", "AuthenticationError", "invalid username")


class RedisBroker(Pipelined[RedisLink]):
    """Sends to streams and receives from them.

    Options, in the URL or in `options.extra`: `prefix` stands before each topic in the keys;
    `replicas` must have a message before it counts as delivered; `trim_seconds` (60; 0: never)
    lie between looks at what all groups have read; `lease_seconds` (15) is how long a receiver
    that died keeps its stream; `tls_ca`, `tls_cert`, `tls_key` are files; `max_outstanding` (4096).
    """

    kind = "Redis"

    def __init__(self, url: str, options: BrokerOptions | None = None) -> None:
        try:
            import redis.asyncio  # noqa: F401
        except ImportError as error:
            raise MissingDriver("redis:// needs redis-py: pip install 'postroom[redis]'") from error
        options = options or BrokerOptions()
        self._address = Address.of(url, options, ports=PORTS, known=OPTIONS, example=_EXAMPLE)
        wishes = self._address.options
        super().__init__(dataclasses.replace(options, extra=wishes))
        if not (self._address.path.strip("/") or "0").isdecimal():
            raise ConfigurationError("the path of a Redis URL is a database number, as in /0")
        self._prefix = wishes.get("prefix", "")
        self._replicas = whole_number(wishes, "replicas", 0, least=0)
        self._trim_seconds = whole_number(wishes, "trim_seconds", 60, least=0)
        self._lease_seconds = whole_number(wishes, "lease_seconds", 15, least=1)
        self._topics: set[str] = set()  # sent to since the last look
        self._trimming: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return str(self._address)

    async def send(self, batch: Sequence[Message], *, epoch: int = 0) -> list[Outcome]:
        """Send all, then await all answers; the whole of it takes at most the send timeout."""
        outcomes = await super().send(batch, epoch=epoch)
        if self._trim_seconds and self._link is not None:
            if len(self._topics) < _MOST_TOPICS:
                self._topics.update({message.topic for message in batch})
            if not _runs_here(self._trimming):
                self._trimming = asyncio.create_task(self._trim_now_and_then(self._link))
        return outcomes

    async def receive(self, topics: Sequence[str], *, consumer: str) -> RedisSubscription:
        """Receive for `consumer`: the group of that name, made at the beginning of each stream."""
        if not topics:
            raise ConfigurationError("there is no topic to receive from")
        keys = {topic: self._prefix + check_topic(topic) for topic in topics}
        subscription = RedisSubscription(
            self._address,
            keys,
            consumer,
            lease_seconds=self._lease_seconds,
            timeout_seconds=self._options.send_timeout_seconds,
        )
        await subscription.begin()
        return subscription

    async def examine(self, topics: Sequence[str]) -> list[str]:
        """What about this server would lose messages, a sentence each."""
        from redis.exceptions import RedisError

        line = Line(self._address, self._options.send_timeout_seconds)
        try:
            return await examine(line, [self._prefix + topic for topic in topics])
        except RedisError as error:
            raise Unreachable(f"Redis at {self} does not tell: {describe(error)}") from error
        finally:
            await line.close()

    async def close(self) -> None:
        """Let sends that have begun come to their end, then close the connection."""
        if self._trimming is not None and _runs_here(self._trimming):
            self._trimming.cancel()
            await asyncio.wait({self._trimming})
        self._trimming = None
        await super().close()

    async def _connect(self, seconds: float) -> RedisLink | Transient:
        try:
            connection = await connect(self._address, seconds)
            async with asyncio.timeout(seconds):
                most = await largest(connection)
        except Exception as error:
            text = self._address.without_secrets(describe(error))
            barred = any(word in text for word in _PERMISSION)
            code = "not_permitted" if barred else "unreachable"
            return Transient(code, f"cannot connect to Redis at {self}: {text}", down="broker")
        self.capabilities = Capabilities(max_bytes=most)
        return RedisLink(
            connection,
            self._prefix,
            max_string=most,
            max_rows=self._max_rows,
            replicas=self._replicas,
            wait_seconds=self._options.send_timeout_seconds / 2,
        )

    async def _trim_now_and_then(self, link: RedisLink) -> None:
        """For as long as the link lives, and beside it: a connection of its own each time."""
        while link.alive:
            await asyncio.sleep(self._trim_seconds)
            topics, self._topics = self._topics, set()
            line = Line(self._address, self._options.send_timeout_seconds)
            with contextlib.suppress(Exception):  # it is tried again, and the stream is only longer
                await trim(line, [self._prefix + topic for topic in topics])
            await line.close()


def _runs_here(task: asyncio.Task[None] | None) -> bool:
    """Whether a task goes on, on this loop: after a fork, or on another one, it never will."""
    if task is None or task.done():
        return False
    return task.get_loop() is asyncio.get_running_loop()


def open_broker(url: str, options: BrokerOptions) -> RedisBroker:
    """The broker for `redis://host:6379/0` or `rediss://host:6379/0`."""
    return RedisBroker(url, options)
