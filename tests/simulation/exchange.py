"""Brokers that are slow, refuse, go down, fall silent, and lose their answers.

Everything that arrives is written down with who sent it and what the sender was told.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from postroom.brokers.base import (
    DELIVERED,
    Capabilities,
    Outcome,
    Permanent,
    Transient,
    Unknown,
)
from postroom.errors import Unreachable
from postroom.messages import Message

from .loop import Future, Loop, Process, current


@dataclass
class Mood:
    """How the brokers behave."""

    latency_seconds: float = 0.003
    refuses: float = 0.0
    unknown: float = 0.0
    raises: float = 0.0
    down: set[str] = field(default_factory=set)  # brokers that refuse everything
    silent: set[str] = field(default_factory=set)  # brokers that answer nothing
    topics_down: set[str] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Send:
    """A batch on its way to a broker, until its sender knows more or gives it up."""

    process: Process
    lane: int
    at: float
    ended_at: float | None = None
    answered: bool = False


@dataclass(slots=True)
class Arrival:
    """A message as it came to a broker."""

    id: str
    at: float
    send: Send
    told: bool = False  # the sender knows that it arrived


class Exchange:
    """All brokers of a schedule, and what they received."""

    def __init__(self, loop: Loop, random: Random, trace: Callable[..., None]) -> None:
        self.loop = loop
        self.random = random
        self.trace = trace
        self.process = Process("brokers")
        self.context = loop.inside(self.process)
        self.mood = Mood()
        self.sends: list[Send] = []
        self.arrivals: list[Arrival] = []
        self.poison: set[str] = set()
        self.refusals: Counter[str] = Counter()  # answers that may cost an attempt
        self.ordered = False

    def broker(self, url: str) -> "SimulatedBroker":
        return SimulatedBroker(self, url)

    def take(self, url: str, batch: Sequence[Message], send: Send, reply: Future) -> None:
        """A batch has come; decide for each message, and let the answer travel back."""
        if send.process.dead and self.random.random() < 0.5:
            return
        arrivals: list[Arrival | None] = []
        outcomes: list[Outcome] = []
        stopped: set[tuple[str, str]] = set()
        for message in batch:
            outcome, arrives = self._decide(url, message, message.order in stopped)
            if outcome is not DELIVERED:
                stopped.add(message.order)
            arrival = Arrival(message.id, self.loop.now, send) if arrives else None
            arrivals.append(arrival)
            outcomes.append(outcome)
        self.arrivals += [arrival for arrival in arrivals if arrival is not None]
        self.trace(
            "arrived",
            send.process.name,
            [(int(m.payload), a is not None) for m, a in zip(batch, arrivals, strict=True)],
        )
        if url not in self.mood.silent:
            self.loop.call_later(self._delay(), self._answer, reply, outcomes, arrivals)

    def _answer(
        self, reply: Future, outcomes: list[Outcome], arrivals: list[Arrival | None]
    ) -> None:
        if not reply.done():
            reply.set_result((outcomes, arrivals))

    def told(
        self,
        batch: Sequence[Message],
        outcomes: list[Outcome],
        arrivals: list[Arrival | None],
    ) -> None:
        """The sender has the answer."""
        for message, outcome, arrival in zip(batch, outcomes, arrivals, strict=True):
            if outcome is DELIVERED and arrival is not None:
                arrival.told = True
            elif getattr(outcome, "down", None) is None:
                self.refusals[message.id] += 1

    def _decide(self, url: str, message: Message, behind: bool) -> tuple[Outcome, bool]:
        mood, dice = self.mood, self.random.random()
        if url in mood.silent:
            return Unknown("silent", "no answer"), not behind and dice < 0.5
        if url in mood.down:
            return Transient("down", "it is down", down="broker"), False
        if message.topic in mood.topics_down:
            return Transient("down", "the topic is down", down="topic"), False
        if behind:
            # Nothing of a key is taken after something that was not.
            return Transient("behind", "an earlier one of its key was refused"), False
        if message.id in self.poison:
            return Permanent("poison", "refused for ever"), False
        if dice < mood.refuses:
            return Transient("refused", "not now"), False
        if dice < mood.refuses + mood.unknown:
            return Unknown("unknown", "no answer came"), self.random.random() < 0.5
        return DELIVERED, True

    def _delay(self) -> float:
        return self.random.expovariate(1 / self.mood.latency_seconds)


class SimulatedBroker:
    """One relay's way to one broker."""

    def __init__(self, exchange: Exchange, url: str) -> None:
        self._exchange = exchange
        self._url = url
        self.capabilities = Capabilities(ordered_pipeline=exchange.ordered)

    async def send(self, batch: Sequence[Message], *, epoch: int = 0) -> list[Outcome]:
        exchange, loop, process = self._exchange, self._exchange.loop, current()
        if process.dead:
            raise ConnectionError("this process is dead")
        if exchange.random.random() < exchange.mood.raises:
            exchange.refusals.update(message.id for message in batch)
            raise RuntimeError("a bug in the adapter")
        reply, sent = loop.create_future(), Send(process, batch[0].lane, loop.now)
        exchange.sends.append(sent)
        context = exchange.context
        loop.call_later(
            exchange._delay(), exchange.take, self._url, batch, sent, reply, context=context
        )
        if process.waits_for_send:
            process.waits_for_send = False
            process.blow()
        try:
            outcomes, arrivals = await reply
            sent.answered = True
        finally:
            sent.ended_at = loop.now
        exchange.told(batch, outcomes, arrivals)
        answers: list[Outcome] = outcomes
        return answers

    async def ping(self) -> None:
        await asyncio.sleep(self._exchange._delay())
        if self._url in self._exchange.mood.down | self._exchange.mood.silent:
            raise Unreachable("it is down")

    async def close(self) -> None:
        pass
