"""From a wave of messages to a verdict for each: routes, brokers, breakers, timeouts, look-ups.

Nothing here touches the database. A broker that raises or does not answer in time has told us
nothing, so its messages are of unknown outcome and go out again with the same id. A broker that can
be asked what became of a message is asked before it goes out again.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import cast

from postroom import failpoints, signals
from postroom.brokers.base import (
    CROWDED,
    DELIVERED,
    Broker,
    BrokerOptions,
    CanLookUp,
    Outcome,
    Transient,
    Unknown,
)
from postroom.config import Routes
from postroom.ledger.rules import entered, is_entered
from postroom.messages import Message
from postroom.outbox import attempts
from postroom.outbox.destinations import Destinations, topic_name
from postroom.outbox.doubts import Doubts
from postroom.outbox.rules import (
    SETTLED,
    UNSENT,
    Breaker,
    Bury,
    Down,
    Hold,
    Settled,
    Unsent,
    Verdict,
    in_doubt,
    verdict,
)
from postroom.retry import RetryPolicy
from postroom.signals import redact, redact_url

__all__ = ["Sender"]

ERROR_CHARACTERS = 2000


class Sender:
    """Sends to every broker of the routing table."""

    def __init__(
        self,
        routes: Routes,
        brokers: Mapping[str, Broker],
        *,
        retry: RetryPolicy | Mapping[str, RetryPolicy],
        options: BrokerOptions,
        clock: Callable[[], float] = time.monotonic,
        randomness: Callable[[], float] = random.random,
    ) -> None:
        self._routes = routes
        self._brokers = dict(brokers)
        self._retry = retry
        self._timeout = options.send_timeout_seconds
        self._clock = clock
        self._random = randomness
        self._urls: dict[str, str | None] = {}
        self.destinations = Destinations(brokers, clock, randomness)
        self._breakers = self.destinations.breakers
        self._sends: dict[object, tuple[str, float]] = {}
        self._answered_at: dict[str, float] = {}
        # Found out once: to ask a protocol takes longer than a message.
        self._can_look_up = {url for url in brokers if isinstance(brokers[url], CanLookUp)}
        self._doubts = Doubts(self._timeout)
        self.settled = self._doubts.settled
        self.unsettled = self._doubts.any_left

    # ── destinations ───────────────────────────────────────────────────────────────────────────

    def later_seconds(self, message: Message) -> float:
        """How long a message of a destination that is down waits before it is looked at again."""
        return self.destinations.later_seconds(self._url(message.topic), message.topic)

    def waits_for(self, topic: str) -> str | None:
        """Return the name of the broker or topic that is down and keeps a topic's messages."""
        for name in (self._url(topic), topic_name(topic)):
            breaker = None if name is None else self._breakers.get(name)
            if name is not None and breaker is not None and breaker.retry_at is not None:
                return redact_url(name)
        return None

    def overdue(self, grace_seconds: float) -> str | None:
        """A broker that has a send under way for longer than its timeout allows, if there is one:
        it does not let itself be cancelled, and its lane hangs with it."""
        limit = self._clock() - self._timeout - grace_seconds
        late = [url for url, begun in list(self._sends.values()) if begun < limit]
        return redact_url(late[0]) if late else None

    def adapter(self, topic: str) -> str:
        """Where messages of a topic go, for people: the broker's URL without its secrets."""
        return redact_url(self._url(topic) or "none")

    def can_be_asked(self, topic: str) -> bool:
        """Whether the broker of a topic can say what became of a message."""
        return self._url(topic) in self._can_look_up

    def keeps_doubt(self, message: Message) -> bool:
        """Whether it matters for ever that a message may have arrived: it is a request, or there is
        somebody to ask."""
        return is_entered(message) or self.can_be_asked(message.topic)

    def doubts(self, message: Message) -> bool:
        """Whether a message may have arrived, as far as this relay and its history know."""
        return self._doubts.about(message)

    def is_ordered(self, batch: Sequence[Message]) -> bool:
        """Whether this batch may go to its broker as one, later messages only after earlier. Not to
        one that is asked about each by itself: what is asked for in vain stays behind."""
        urls = self._urls_of(batch)
        return urls.isdisjoint(self._can_look_up) and all(
            url and self._brokers[url].capabilities.ordered_pipeline for url in urls
        )

    def max_batch(self, batch: Sequence[Message]) -> int | None:
        """Most messages of this batch that may be under way at once; None: any number."""
        urls = self._urls_of(batch)
        limits = [self._brokers[url].capabilities.max_batch for url in urls if url]
        return min((limit for limit in limits if limit is not None), default=None)

    def _urls_of(self, batch: Sequence[Message]) -> set[str | None]:
        return {self._url(topic) for topic in {message.topic for message in batch}}

    def _url(self, topic: str) -> str | None:
        if topic not in self._urls:
            if len(self._urls) > 10_000:
                self._urls.clear()
            self._urls[topic] = self._routes.url_for(topic)
        return self._urls[topic]

    # ── sending ────────────────────────────────────────────────────────────────────────────────

    async def send(
        self,
        wave: Sequence[Message],
        *,
        epoch: int,
        may_send: Callable[[], Awaitable[bool]],
        suspect: bool = False,
    ) -> list[Verdict]:
        """One verdict for each message, in order.

        `may_send` is asked before every call of a broker; once it says no, the rest stays unsent.
        `suspect`: a relay died while it was sending these, so they may have arrived.
        """
        urls = self._urls_of(wave)
        if len(urls) == 1:
            (url,) = urls
            return await self._send_to(url, wave, epoch, may_send, suspect)
        groups: dict[str | None, list[int]] = {}
        for index, message in enumerate(wave):
            groups.setdefault(self._url(message.topic), []).append(index)
        verdicts: list[Verdict | None] = [None] * len(wave)

        async def serve(url: str | None, indexes: list[int]) -> None:
            messages = [wave[index] for index in indexes]
            answers = await self._send_to(url, messages, epoch, may_send, suspect)
            for index, answer in zip(indexes, answers, strict=True):
                verdicts[index] = answer

        await asyncio.gather(*(serve(url, indexes) for url, indexes in groups.items()))
        return [answer for answer in verdicts if answer is not None]

    async def _send_to(
        self,
        url: str | None,
        messages: Sequence[Message],
        epoch: int,
        may_send: Callable[[], Awaitable[bool]],
        suspect: bool,
    ) -> list[Verdict]:
        """Send to one broker, in parts while it ramps up; nothing passes what failed before it."""
        if url is None:
            return [self._no_route(message.topic) for message in messages]
        if not self._breakers:
            if not await may_send():
                return [UNSENT] * len(messages)
            return await self._send_part(url, messages, epoch, may_send, suspect)
        verdicts: dict[int, Verdict] = {}
        stopped: set[tuple[str, str]] = set()
        waiting = list(range(len(messages)))
        while waiting:
            if not await may_send():
                verdicts |= dict.fromkeys(waiting, UNSENT)
                break
            ready = self._ready(messages, waiting, stopped, verdicts)
            breaker = self._breakers.get(url)
            admitted = breaker.admits(self._clock()) if breaker is not None and ready else None
            if breaker is not None and admitted == 0:
                verdicts |= dict.fromkeys(ready, Down("broker", breaker.code, breaker.text))
                break
            sent = ready if admitted is None else ready[:admitted]
            waiting = ready[len(sent) :]
            if sent:
                part = [messages[index] for index in sent]
                answers = await self._send_part(url, part, epoch, may_send, suspect)
                for index, answer in zip(sent, answers, strict=True):
                    verdicts[index] = answer
                    if not isinstance(answer, Settled):
                        stopped.add(messages[index].order)
        return [verdicts[index] for index in range(len(messages))]

    def _ready(
        self,
        messages: Sequence[Message],
        waiting: list[int],
        stopped: set[tuple[str, str]],
        verdicts: dict[int, Verdict],
    ) -> list[int]:
        """Which of these may be tried: not behind a failure, and not of a topic that is down."""
        room: dict[str, int | None] = {}
        ready: list[int] = []
        now = self._clock()
        for index in waiting:
            message = messages[index]
            if message.order in stopped:
                verdicts[index] = UNSENT
                continue
            breaker = self._breakers.get(topic_name(message.topic))
            if breaker is not None:
                left = room.setdefault(message.topic, breaker.room(now))
                if left is not None and left <= 0:
                    verdicts[index] = Down("topic", breaker.code, breaker.text)
                    stopped.add(message.order)
                    continue
                room[message.topic] = None if left is None else left - 1
            ready.append(index)
        return ready

    async def _send_part(
        self,
        url: str,
        part: Sequence[Message],
        epoch: int,
        may_send: Callable[[], Awaitable[bool]],
        suspect: bool,
    ) -> list[Verdict]:
        if self._breakers:
            for topic in {message.topic for message in part}:
                if (breaker := self._breakers.get(topic_name(topic))) is not None:
                    breaker.admits(self._clock())
        if url in self._can_look_up:
            return await self._send_asking(url, part, epoch, may_send, suspect)
        requests = entered(part)
        if not requests:
            outcomes = await self._sent(url, part, epoch)
            return self._judge(url, part, outcomes, lambda m: suspect or in_doubt(m.history))
        before = {m.position for m in part if suspect or self._doubts.about(m)}
        self._doubts.sending(requests)
        outcomes = await self._sent(url, part, epoch)
        self._doubts.answered(
            m
            for m, outcome in zip(part, outcomes, strict=True)
            if isinstance(outcome, Transient) and m.position not in before
        )
        return self._judge(url, part, outcomes, lambda m: m.position in before)

    async def _send_asking(
        self,
        url: str,
        part: Sequence[Message],
        epoch: int,
        may_send: Callable[[], Awaitable[bool]],
        suspect: bool,
    ) -> list[Verdict]:
        """Send to a broker that can be asked: what is in doubt is asked for first, and once more
        before it would be buried."""
        broker = cast(CanLookUp, self._brokers[url])
        doubtful = [m for m in part if suspect or self._doubts.about(m)]
        known = await self._doubts.ask_first(broker, doubtful) if doubtful else {}
        unsent = [message for message in part if message.position not in known]
        if doubtful and unsent and not await may_send():  # asking took its time
            unsent = []
        if unsent:
            self._doubts.sending(unsent)
            outcomes = await self._sent(url, unsent, epoch)
            before = {message.position for message in doubtful}
            known |= await self._doubts.look_after(
                broker,
                [
                    (message, outcome, message.position in before, self._ends(message, outcome))
                    for message, outcome in zip(unsent, outcomes, strict=True)
                ],
            )
        answered = [message for message in part if message.position in known]
        judged = self._judge(
            url,
            answered,
            [known[message.position].outcome for message in answered],
            lambda message: known[message.position].doubt,
            lambda message: known[message.position].sent,
        )
        verdicts = {m.position: each for m, each in zip(answered, judged, strict=True)}
        return [verdicts.get(message.position, UNSENT) for message in part]

    def _ends(self, message: Message, outcome: Outcome) -> bool:
        """Whether a message would be buried for this outcome."""
        policy = self._policy(message.topic)
        return isinstance(verdict(outcome, message, policy, self._random), Bury)

    async def _sent(self, url: str, part: Sequence[Message], epoch: int) -> list[Outcome]:
        token = object()
        self._sends[token] = (url, self._clock())
        try:
            outcomes = await self._outcomes(url, part, epoch)
        finally:
            del self._sends[token]
        if signals.heard("message.attempted"):
            attempts.tell(url, outcomes)
        return outcomes

    async def _outcomes(self, url: str, messages: Sequence[Message], epoch: int) -> list[Outcome]:
        broker = self._brokers[url]
        failpoints.hit("relay.send.before")
        try:
            # A broker keeps the timeout itself, message by message; this is for one that hangs.
            async with asyncio.timeout(self._timeout + 0.5):
                outcomes = await broker.send(messages, epoch=epoch)
            failpoints.hit("relay.send.after")
            if len(outcomes) != len(messages):
                raise RuntimeError(f"{len(outcomes)} outcomes for {len(messages)} messages")
        except TimeoutError:
            silent = Unknown("timeout", f"no answer within {self._timeout:g} s", down="broker")
            outcomes = [silent] * len(messages)
        except Exception as error:
            text = redact(f"{type(error).__name__}: {error}")[:ERROR_CHARACTERS]
            outcomes = [Unknown(type(error).__name__, text)] * len(messages)
        return outcomes

    def _judge(
        self,
        url: str,
        messages: Sequence[Message],
        outcomes: Sequence[Outcome],
        doubt: Callable[[Message], bool],
        sent: Callable[[Message], bool] = lambda _: True,
    ) -> list[Verdict]:
        """A verdict for each, and what it says of the broker. `doubt`: whether one may have arrived
        before; `sent`: whether it was sent, and not only asked for."""
        if not self._breakers and outcomes.count(DELIVERED) == len(outcomes):
            self._answered_at[url] = self._clock()
            return [SETTLED] * len(outcomes)
        verdicts = [
            verdict(outcome, m, self._policy(m.topic), self._random, doubt(m), sent(m))
            for m, outcome in zip(messages, outcomes, strict=True)
        ]
        downs: dict[str, Down] = {}
        ups: dict[str, int] = {}
        # Whatever the broker said of a single message or topic, it lives.
        answered = sum(
            not isinstance(outcome, Unknown)
            and getattr(outcome, "down", None) != "broker"
            and outcome != CROWDED
            for outcome in outcomes
        )
        for message, answer in zip(messages, verdicts, strict=True):
            name = topic_name(message.topic)
            if isinstance(answer, Down):
                downs.setdefault(url if answer.scope == "broker" else name, answer)
                if answer.scope == "broker":
                    self.destinations.learnt_nothing(name)
            elif isinstance(answer, Hold) and not answer.spent:
                if url in self._breakers:  # a probe that could not even ask
                    downs.setdefault(url, Down("broker", answer.code, answer.text))
            elif isinstance(answer, Unsent):
                if answer.crowded:
                    self.destinations.learnt_nothing(name)
            elif name in self._breakers:
                ups[name] = ups.get(name, 0) + 1
        for name, down in downs.items():
            self.destinations.is_down(name, down)
        for name, count in ups.items():
            if name not in downs:
                self.destinations.is_up(name, count)
        if answered:
            self._answered_at[url] = self._clock()
        if url not in downs and answered:
            self.destinations.is_up(url, answered)
        elif url not in downs and CROWDED in outcomes:
            self.destinations.learnt_nothing(url)
        return verdicts

    def _no_route(self, topic: str) -> Down:
        down = Down("topic", "no_route", f"no route for topic {topic!r}: add one or a default")
        if not self._breakers.get(topic_name(topic), Breaker()).is_open(self._clock()):
            self.destinations.is_down(topic_name(topic), down)
        return down

    def _policy(self, topic: str) -> RetryPolicy:
        if isinstance(self._retry, RetryPolicy):
            return self._retry
        for pattern, policy in self._retry.items():
            if fnmatchcase(topic, pattern):
                return policy
        return RetryPolicy()

    async def ping(self, quiet_seconds: float = 0.0) -> dict[str, str]:
        """Ask every broker whether it can be reached; returns what is wrong, by URL. Those that
        have answered a send within `quiet_seconds` need not be asked."""
        since = self._clock() - quiet_seconds

        async def ask(url: str, broker: Broker) -> tuple[str, str]:
            try:
                async with asyncio.timeout(self._timeout + 0.5):
                    await broker.ping()
            except Exception as error:
                return url, redact(str(error) or type(error).__name__)
            return url, ""

        answers = await asyncio.gather(
            *(
                ask(url, broker)
                for url, broker in self._brokers.items()
                if not quiet_seconds or self._answered_at.get(url, -math.inf) < since
            )
        )
        return {url: text for url, text in answers if text}

    async def keep_pinging(self, seconds: float) -> None:
        """Say at the start which brokers cannot be reached, rather than at the first message; and
        go on asking: it is known without messages too, and a broker that is back is used."""
        unreachable = await self.ping()
        self.destinations.pinged(unreachable)
        for url, text in unreachable.items():
            self.destinations.is_down(url, Down("broker", "unreachable", text))
        while True:
            await asyncio.sleep(seconds)
            self.destinations.pinged(await self.ping(seconds))

    async def close(self) -> None:
        """Close every broker; a failure to close loses nothing."""
        for broker in self._brokers.values():
            try:
                async with asyncio.timeout(self._timeout):
                    await broker.close()
            except Exception as error:
                signals.emit("destination.unclosed", error=redact(str(error)))
