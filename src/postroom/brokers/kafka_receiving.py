"""Receiving from Kafka as a member of a consumer group: the part that stands in the event loop.

Promise: only what was acknowledged is committed, and of a partition only as far as nothing before
it is missing. What is given back comes again from memory: going back in the partition would bring
what is still in hand as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from postroom import signals
from postroom.brokers.kafka_pump import Pump
from postroom.brokers.kafka_shelf import Shelf, Wanted
from postroom.brokers.receiving import Delivery
from postroom.errors import ConfigurationError, Unreachable

__all__ = ["KafkaSubscription"]

TAKE_SECONDS = 1.0
# An ordinary rebalance is over by then; Kafka itself delays the first one by 3 seconds.
SLOW_JOIN_SECONDS = 6.0
SESSION_MS = 45_000  # librdkafka's default


class KafkaSubscription:
    """A member of the group named as the consumer; a source is a partition, `topic/number`."""

    exclusive = True
    extend_seconds: float | None = None

    def __init__(
        self,
        library: Any,
        settings: dict[str, Any],
        topics: Sequence[str],
        *,
        place: str,
        timeout_seconds: float,
        without_secrets: Callable[[str], str],
    ) -> None:
        self._place = place
        self._group = str(settings["group.id"])
        self._session_ms = int(settings.get("session.timeout.ms", SESSION_MS))
        self._told_joining_since: float | None = None
        self._timeout = timeout_seconds
        self._pid = os.getpid()
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._closed = False
        self._takers: set[asyncio.Future[None]] = set()
        self._ackers: set[asyncio.Future[str | None]] = set()
        self._shelf = Shelf(lambda: self._tell(self._wake))
        self._pump = Pump(
            library,
            {
                "topic.metadata.refresh.interval.ms": 10_000,  # topics made later are found soon
                "queued.min.messages": 2000,
                "queued.max.messages.kbytes": 16 * 1024,
                "fetch.wait.max.ms": 100,
                "fetch.queue.backoff.ms": 10,
                **settings,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "partition.assignment.strategy": "cooperative-sticky",
            },
            topics,
            self._shelf,
            on_commit=lambda trouble: self._tell(self._acked, trouble),
            on_end=lambda: self._tell(self._ended.set),
            without_secrets=without_secrets,
        )
        self._pump.start()

    async def take(self, most: int) -> list[Delivery]:
        self._check()
        deadline = self._loop.time() + TAKE_SECONDS
        while not (taken := self._shelf.take(most)):
            remaining = deadline - self._loop.time()
            if remaining <= 0:
                trouble, self._pump.trouble = self._pump.trouble, None
                if trouble:
                    raise Unreachable(f"cannot receive from Kafka at {self._place}: {trouble}")
                self._tell_of_slow_join()
                return []
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._takers.add(waiter)
            try:
                await asyncio.wait([waiter], timeout=remaining)
            finally:
                self._takers.discard(waiter)
            self._check()
        return taken

    async def lag(self) -> int | None:
        """Count the records of our partitions that were not handed out yet."""
        behind = self._pump.behind
        return None if behind is None else behind + self._shelf.waiting

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        self._check()
        wanted = self._shelf.ack(deliveries)
        trouble: str | None = None
        try:
            async with asyncio.timeout(self._timeout):
                while trouble is None and not self._shelf.is_told(wanted):
                    trouble = await self._next_commit(wanted)
        except TimeoutError:
            trouble = f"no answer within {self._timeout:g} s"
        if trouble:
            # They stay acknowledged here, and go with the next commit.
            raise Unreachable(f"cannot commit to Kafka at {self._place}: {trouble}")

    async def _next_commit(self, wanted: Wanted) -> str | None:
        """Wait for what a commit says, unless it has been said meanwhile."""
        waiter: asyncio.Future[str | None] = self._loop.create_future()
        self._ackers.add(waiter)
        try:
            return None if self._shelf.is_told(wanted) else await waiter
        finally:
            self._ackers.discard(waiter)

    async def give_back(self, deliveries: Sequence[Delivery]) -> None:
        self._check()
        self._shelf.give_back(deliveries)
        self._wake()

    async def extend(self, deliveries: Sequence[Delivery]) -> None:
        """Nothing to do: a partition stays ours as long as this process lives."""

    async def close(self) -> None:
        if self._pid == os.getpid() and not self._closed:
            self._closed = True
            self._pump.stop()
            self._wake()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._timeout):
                    await self._ended.wait()

    # Inside.

    def _check(self) -> None:
        if self._closed:
            raise Unreachable("this subscription was closed")
        if self._pid != os.getpid():
            raise ConfigurationError("a subscription does not survive a fork: receive anew")

    def _tell_of_slow_join(self) -> None:
        """Emit a signal once for each join that takes long, so that the log explains the wait."""
        since = self._pump.joining_since
        if since is None or since == self._told_joining_since:
            return
        waited = time.monotonic() - since
        if waited > SLOW_JOIN_SECONDS:
            self._told_joining_since = since
            signals.emit(
                "consumer.joining",
                consumer=self._group,
                seconds=round(waited, 1),
                reason="waits for partitions: the group may still count a member that is gone; "
                f"Kafka removes it after session.timeout.ms ({self._session_ms / 1000:g} s)",
            )

    def _tell(self, call: Callable[..., None], *arguments: object) -> None:
        """From the thread to the event loop, which may have ended."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, *arguments)

    def _wake(self) -> None:
        for waiter in self._takers:
            if not waiter.done():
                waiter.set_result(None)

    def _acked(self, trouble: str | None) -> None:
        for waiter in self._ackers:
            if not waiter.done():
                waiter.set_result(trouble)
