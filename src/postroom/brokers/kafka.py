"""`kafka://`: Apache Kafka through confluent-kafka, many messages on their way at once.

Promise: `Delivered` means that all in-sync replicas have the message; what was reported otherwise,
or not at all, is never taken for a yes.

The producer is idempotent and asks for acks from all, so librdkafka's own repetitions neither
double messages nor change their order. Keys go to the partitions where Java clients put them. Each
message has its own report. A producer that reports a fatal error, or lets the time run out in
silence, is thrown away with what it had not sent, and the next send makes a fresh one.

**An ordered pipeline.** librdkafka writes the messages of a partition in the order they were given,
and three things keep later ones from passing one that failed. A refusal ends the producer
(`enable.gapless.guarantee`), and so does any other report that is no yes. No message gives up alone
(`message.timeout.ms` 0): at the deadline everything is thrown away, and the producer with it. And a
partition that does not know the producer yet gets one message at a time (`kafka_proof`).

**A batch that is refused.** Kafka takes or refuses batches, and librdkafka does not take them
apart: one message that is too large fails hundreds that are not. So a topic in trouble goes through
a second producer that puts every message into a batch of its own, one of a key at a time, and only
what is refused there is at fault. It stays there until a send of it is delivered whole. What else
was under way goes out again at once, by a fresh producer: only the first accident of a topic
touches others.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

from postroom.brokers.base import (
    BEHIND,
    DELIVERED,
    BrokerOptions,
    Capabilities,
    Delivered,
    Outcome,
    Permanent,
    Transient,
)
from postroom.brokers.invoke import in_thread
from postroom.brokers.kafka_address import Address
from postroom.brokers.kafka_clients import Clients
from postroom.brokers.kafka_link import Link, Sending
from postroom.brokers.kafka_receiving import KafkaSubscription
from postroom.brokers.kafka_rounds import (
    again,
    conclude,
    merge,
    silent_topics,
    waves,
    without_blame,
)
from postroom.brokers.kafka_topics import ask_topic
from postroom.brokers.kafka_wire import NOT_SENT, Stamp, topic_fault
from postroom.errors import ConfigurationError, InvalidMessage, MissingDriver, Unreachable
from postroom.messages import Message

__all__ = ["KafkaBroker", "open_broker"]

CONNECT_SECONDS = 3.0
_PURGE_SECONDS, _PURGE_SHARE = 0.3, 0.2  # of the send timeout: for reports of what is thrown away
_ECHO_AT = 0.7  # of the send timeout: time enough for the cluster to show that it lives
_ANSWERS = (Delivered, Transient, Permanent)
_ROUNDS = 5  # accidents that one send outlives
_PROBES = 250  # partitions that are tried at once
_BREATH_SECONDS = 0.05
# A new producer fetches its number over its first connection. Asked about topics meanwhile, it may
# drop that connection for a better one, and tries again after half a second.
_HEAD_START_SECONDS = 0.02
T = TypeVar("T")


class KafkaBroker:
    """Sends to topics of Kafka and receives from them.

    Settings of librdkafka may stand in the URL or in `options.extra`, by their own names, beside
    `tls_ca`, `tls_cert`, `tls_key` (files) and `max_outstanding` (how many messages may await their
    report).
    """

    def __init__(self, url: str, options: BrokerOptions | None = None) -> None:
        try:
            import confluent_kafka
            import confluent_kafka.admin
        except ImportError as error:
            text = "kafka:// needs confluent-kafka: pip install 'postroom[kafka]'"
            raise MissingDriver(text) from error
        self.capabilities = Capabilities(ordered_pipeline=True)
        self._library = confluent_kafka
        self._options = options or BrokerOptions()
        self._address = Address.of(url, self._options.extra)
        self._purge_seconds = min(_PURGE_SECONDS, _PURGE_SHARE * self._options.send_timeout_seconds)
        self._clients = Clients(confluent_kafka, self._address)
        self._troubled: set[str] = set()  # topics that go through the second producer
        self._asking = asyncio.Lock()
        self._failed: tuple[float, Transient] | None = None
        self._sends = 0
        self._idle = asyncio.Event()
        self._closed = False

    def __repr__(self) -> str:
        return str(self._address)

    async def send(self, batch: Sequence[Message], *, epoch: int = 0) -> list[Outcome]:
        """Send all, then await all reports; the whole of it takes at most the send timeout."""
        deadline = self._now() + self._options.send_timeout_seconds - self._purge_seconds
        if refusal := self._refusal():
            return [refusal] * len(batch)
        self._sends += 1
        self._idle.clear()
        try:
            return await self._deliver(batch, epoch, deadline)
        finally:
            self._sends -= 1
            if not self._sends:
                self._idle.set()

    async def ping(self) -> None:
        if refusal := self._refusal():
            raise Unreachable(refusal.text)
        await self._reach(min(CONNECT_SECONDS, self._options.send_timeout_seconds))

    async def receive(self, topics: Sequence[str], *, consumer: str) -> KafkaSubscription:
        """Receive as a member of the group `consumer`. A topic that does not exist yet is read
        from its beginning once it does."""
        if not topics:
            raise ConfigurationError("receive needs at least one topic")
        for topic in topics:
            if fault := topic_fault(topic):
                raise InvalidMessage(fault.text)
        await self.ping()
        return KafkaSubscription(
            self._library,
            {**self._clients.settings(), "group.id": consumer},
            topics,
            place=str(self),
            timeout_seconds=self._options.send_timeout_seconds,
            without_secrets=self._address.without_secrets,
        )

    async def examine(self, topics: Sequence[str]) -> list[str]:
        """A sentence for each danger to messages of these topics, with what to do about it."""
        await self.ping()
        admin, seconds = self._clients.admin(), self._options.send_timeout_seconds
        found = await in_thread(_kept(lambda: admin.examine(topics, seconds)))
        if isinstance(found, Exception):
            raise Unreachable(f"cannot look at Kafka at {self}: {self._clients.said(found)}")
        return found

    async def keeps(self, topics: Sequence[str]) -> dict[str, float | None]:
        """For how many seconds Kafka keeps messages of these topics; None: for ever."""
        await self.ping()
        admin, seconds = self._clients.admin(), self._options.send_timeout_seconds
        found = await in_thread(_kept(lambda: admin.keeps(topics, seconds)))
        if isinstance(found, Exception):
            raise Unreachable(f"cannot look at Kafka at {self}: {self._clients.said(found)}")
        return found

    async def close(self) -> None:
        """Let sends that have begun come to their end, then let go of the producer."""
        self._closed = True
        if self._clients.at_home:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._options.send_timeout_seconds):
                    await self._idle.wait()
            await self._clients.end()

    # One send.

    async def _deliver(
        self, batch: Sequence[Message], epoch: int, deadline: float
    ) -> list[Outcome]:
        """Send in rounds: what an accident took along goes again, where it may."""
        if not self._troubled:
            link = self._clients.link()
            outcomes = await self._send(link, batch, epoch, deadline)
            left = self._after(link, batch, outcomes, range(len(batch)), deadline)
        else:
            outcomes, left = [NOT_SENT] * len(batch), list(range(len(batch)))
        for _ in range(_ROUNDS):
            if not left or deadline - self._now() < _BREATH_SECONDS:
                break
            link = self._clients.link()
            wide = [n for n in left if batch[n].topic not in self._troubled]
            narrow = [n for n in left if batch[n].topic in self._troubled]
            answers = await asyncio.gather(
                self._send(link, [batch[n] for n in wide], epoch, deadline),
                self._send_alone([batch[n] for n in narrow], epoch, deadline),
            )
            for n, outcome in zip(wide + narrow, answers[0] + answers[1], strict=True):
                outcomes[n] = merge(outcomes[n], outcome)
            left = self._after(link, batch, outcomes, wide, deadline)
        for n in left:
            outcomes[n] = without_blame(outcomes[n])
        return outcomes

    def _after(
        self,
        link: Link,
        batch: Sequence[Message],
        outcomes: list[Outcome],
        sent: Sequence[int],
        deadline: float,
    ) -> list[int]:
        """What may go again after a round, and which topics are in trouble."""
        if not link.lost:
            return []
        self._troubled |= link.guilty
        if self._now() >= deadline:
            self._troubled |= silent_topics(batch, outcomes)
        return again(batch, outcomes, sent, spent=link.fatal)

    async def _send(
        self, link: Link, batch: Sequence[Message], epoch: int, deadline: float
    ) -> list[Outcome]:
        sending = Sending(batch)
        link.users += 1
        try:
            faults = await self._faults(link, sending.topics, deadline)
            await self._write(link, sending, epoch, deadline, faults)
            alive = await self._await_reports(link, sending, deadline)
        except BaseException:
            if sending.waiting:  # cancelled: nothing of it may leave later
                link.purge()
                link.lose()
            raise
        finally:
            link.users -= 1
            if link.lost:
                self._clients.discard(link)
        return conclude(link, sending, silent=not alive)

    async def _write(
        self,
        link: Link,
        sending: Sending,
        epoch: int,
        deadline: float,
        faults: dict[str, Outcome],
    ) -> None:
        stamp = Stamp(self._options.source, epoch)
        proven = link.proof.is_whole(sending.topics - faults.keys())
        if not proven and not await self._prove(link, sending, stamp, deadline):
            return
        while sending.given < len(sending.batch) and not link.lost:
            if link.full and not await link.until_room(deadline):
                return
            link.give(sending, stamp, faults)
            await asyncio.sleep(0)  # let the reports have their turn

    async def _prove(self, link: Link, sending: Sending, stamp: Stamp, deadline: float) -> bool:
        """Send one message to each partition of this batch that does not know the producer yet,
        and await its report; to one where somebody else does so, send nothing meanwhile. True once
        all of them do."""
        while not link.lost and self._now() < deadline:
            wanted = link.proof.probes(sending.batch, sending.outcomes, _PROBES)
            if not wanted:
                return True
            places = {n: (sending.batch[n].topic, place) for n, place in wanted.items()}
            others = link.probing & set(places.values())
            mine = {n: wanted[n] for n, place in places.items() if place not in others}
            link.probing |= (own := {places[n] for n in mine})
            try:
                link.probe(sending, stamp, mine)
                await link.until_proven(sending, others, deadline)
            finally:
                link.probing -= own
                link.wake()
            await asyncio.sleep(0)
        return False

    async def _await_reports(self, link: Link, sending: Sending, deadline: float) -> bool:
        """Wait for them; what has none by the deadline is thrown away, and the link with it.

        False if the cluster gave no sign of life when it was asked for one.
        """
        echo_at = deadline - (1 - _ECHO_AT) * self._options.send_timeout_seconds
        if await link.until_answered(sending, echo_at):
            return True
        heard = link.heard
        echo = None if link.lost else asyncio.ensure_future(self._answers(deadline - self._now()))
        if not await link.until_answered(sending, deadline):
            await self._throw_away(link, sending, deadline)
        if echo is None or all(isinstance(each, _ANSWERS) for each in sending.outcomes):
            return True
        await asyncio.wait([echo], timeout=max(deadline + self._purge_seconds - self._now(), 0))
        return link.heard > heard or (echo.done() and echo.result())

    async def _throw_away(self, link: Link, sending: Sending, deadline: float) -> None:
        """End the link. If a message ended it, what has left is still heard of."""
        patient = link.lost and not link.fatal
        link.lose()
        for in_flight in (False, True) if patient else (True,):
            until = self._now() + self._purge_seconds
            until = until if in_flight else min(until, deadline)
            while not sending.answered and self._now() < until:
                link.purge(in_flight=in_flight)  # again: what comes back is queued anew
                breath = min(until, self._now() + _BREATH_SECONDS)
                await link.until_answered(sending, breath, though_lost=True)

    async def _send_alone(
        self, batch: Sequence[Message], epoch: int, deadline: float
    ) -> list[Outcome]:
        """Send each in a batch of its own, and one of a key at a time."""
        outcomes: list[Outcome] = [NOT_SENT] * len(batch)
        stopped: set[tuple[str, str]] = set()
        for wave in waves(batch):
            ready = [n for n in wave if batch[n].order not in stopped]
            if not ready or self._now() >= deadline:
                break
            part = [batch[n] for n in ready]
            answers = await self._send(self._clients.narrow(), part, epoch, deadline)
            for n, outcome in zip(ready, answers, strict=True):
                outcomes[n] = outcome
                if outcome != DELIVERED:
                    stopped.add(batch[n].order)
        failed = {batch[n].topic for n, outcome in enumerate(outcomes) if outcome != DELIVERED}
        self._troubled -= {message.topic for message in batch} - failed
        return [
            BEHIND if outcome is NOT_SENT and batch[n].order in stopped else outcome
            for n, outcome in enumerate(outcomes)
        ]

    # Topics.

    async def _faults(self, link: Link, topics: set[str], deadline: float) -> dict[str, Outcome]:
        """What keeps these topics from taking messages, where anything does."""
        link.serve()
        faults: dict[str, Outcome] = {}
        for topic in link.proof.missing(topics):
            fault = topic_fault(topic) or await self._ask(link, topic, deadline)
            if isinstance(fault, Transient) and fault.down == "broker":
                return dict.fromkeys(topics, fault) | faults
            if fault is not None:
                faults[topic] = fault
        return faults

    async def _ask(self, link: Link, topic: str, deadline: float) -> Outcome | None:
        """Ask for a topic before the first message to it: librdkafka would wait half a minute for
        one that does not exist, and for servers that cannot be reached."""
        began = self._now()
        async with self._asking:
            if not link.proof.missing({topic}):
                return None
            if self._failed is not None and self._failed[0] >= began:
                return self._failed[1]  # somebody has just tried while we waited
            await asyncio.sleep(link.born + _HEAD_START_SECONDS - self._now())
            if (producer := link.producer) is None:
                return NOT_SENT
            seconds = max(min(CONNECT_SECONDS, deadline - began), 0.1)
            found = await in_thread(_kept(functools.partial(ask_topic, producer, topic, seconds)))
            link.serve()
            if isinstance(found, Exception):
                failed = self._unreachable(link, found)
                self._failed = (self._now(), failed)
                return failed
            if isinstance(found, int):
                link.proof.exists(topic, found)
                return None
            return found

    def _unreachable(self, link: Link, error: Exception) -> Transient:
        text = f"cannot reach Kafka at {self}: {link.error or self._clients.said(error)}"
        return Transient("not_permitted" if link.barred else "unreachable", text, down="broker")

    async def _reach(self, seconds: float) -> None:
        """Get an answer from the cluster, or raise `Unreachable`."""
        admin = self._clients.admin()
        found = await in_thread(_kept(lambda: admin.reach(max(seconds, 0.1))))
        if isinstance(found, Exception):
            raise Unreachable(
                f"cannot reach Kafka at {self}: {admin.error or self._clients.said(found)}"
            )

    async def _answers(self, seconds: float) -> bool:
        try:
            await self._reach(seconds)
        except Unreachable:
            return False
        return True

    def _refusal(self) -> Transient | None:
        """Why nothing can be sent at all, or None; and this process and loop are home from now."""
        if self._closed:
            return Transient("closed", f"the broker {self} was closed", down="broker")
        if not self._clients.at_home:
            self._clients.come_home()
            self._asking, self._sends, self._idle = asyncio.Lock(), 0, asyncio.Event()
            self._idle.set()
        return None

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _kept(work: Callable[[], T]) -> Callable[[], T | Exception]:
    """The same work with its error as a value, for a thread that must not raise."""

    def safely() -> T | Exception:
        try:
            return work()
        except Exception as error:
            return error

    return safely


def open_broker(url: str, options: BrokerOptions) -> KafkaBroker:
    """The broker for `kafka://user:password@host:9092,host:9092?name=value`."""
    return KafkaBroker(url, options)
