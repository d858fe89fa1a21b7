"""Messages that may have arrived: a broker that can be asked is asked, before they are sent again.

In doubt is what a broker gave no answer to, what a relay was sending when it died (its journal says
so), and what was sent and not settled because the database was lost in between. The doubt stays,
and is asked about before every try, until it is delivered or the broker gives a definite answer;
`rules.after_a_look` is the table.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from postroom import failpoints
from postroom.brokers.base import CROWDED, CanLookUp, Delivered, Outcome, Transient, Unknown
from postroom.messages import Message
from postroom.outbox.rules import after_a_look, in_doubt, learnt, may_be_sent
from postroom.signals import redact

__all__ = ["Doubts", "Finding"]

ERROR_CHARACTERS = 2000
MOST_UNSETTLED = 10_000
TURN_SECONDS = 0.02
NOT_WRITTEN = Unknown("unsettled", "it was sent, and what became of it was not written down")


@dataclass(frozen=True, slots=True)
class Finding:
    """What is known of a message after it was sent, or asked for. `doubt`: it may have arrived all
    the same. `sent`: it went out now; else it was only asked for."""

    outcome: Outcome
    doubt: bool = False
    sent: bool = True


class Doubts:
    """What one relay knows of messages whose fate is not written down."""

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout = timeout_seconds
        self._unsettled: dict[str, int] = {}

    def sending(self, messages: Sequence[Message]) -> None:
        """These are about to be sent, and their doubt is to be kept."""
        for message in messages:
            self._unsettled[message.id] = message.lane
        while len(self._unsettled) > MOST_UNSETTLED:
            del self._unsettled[next(iter(self._unsettled))]

    def settled(self, messages: Sequence[Message]) -> None:
        """What became of these is written down, their doubt too."""
        if self._unsettled:
            for message in messages:
                self._unsettled.pop(message.id, None)

    def about(self, message: Message) -> bool:
        """Whether a message may have arrived, as far as this relay and its history know."""
        return message.id in self._unsettled or in_doubt(message.history)

    def any_left(self, lane: int | None = None) -> bool:
        """Whether anything, or anything of a lane, was sent and is not written down."""
        return lane in self._unsettled.values() if lane is not None else bool(self._unsettled)

    async def ask_first(self, broker: CanLookUp, doubtful: Sequence[Message]) -> dict[int, Finding]:
        """What was learnt of those that may have arrived, by position; the others may be sent."""
        answers = await asyncio.gather(*(self._ask(broker, m, NOT_WRITTEN) for m in doubtful))
        return {
            message.position: Finding(answer, isinstance(answer, Unknown), sent=False)
            for message, answer in zip(doubtful, answers, strict=True)
            if not may_be_sent(answer)
        }

    async def look_after(
        self, broker: CanLookUp, sends: Sequence[tuple[Message, Outcome, bool, bool]]
    ) -> dict[int, Finding]:
        """What is known of messages that were sent, by position: each with its outcome, whether it
        was in doubt before, and whether this would be its end."""
        found = await asyncio.gather(*(self._look_after(broker, *send) for send in sends))
        return {send[0].position: each for send, each in zip(sends, found, strict=True)}

    async def _look_after(
        self, broker: CanLookUp, message: Message, outcome: Outcome, doubt: bool, ends: bool
    ) -> Finding:
        silent = isinstance(outcome, Unknown)
        if silent or (doubt and ends):
            silence = outcome if isinstance(outcome, Unknown) else NOT_WRITTEN
            return Finding(*after_a_look(outcome, await self._ask(broker, message, silence)))
        if isinstance(outcome, Transient) and not doubt:
            self.answered([message])
        return Finding(outcome, doubt and not isinstance(outcome, Delivered))

    def answered(self, messages: Iterable[Message]) -> None:
        """The only send of these was answered with "not now": they did not arrive."""
        for message in messages:
            self._unsettled.pop(message.id, None)

    async def _ask(self, broker: CanLookUp, message: Message, silence: Unknown) -> Outcome:
        """What was learnt; after an outage, or an error, as little as in `silence`."""
        failpoints.hit("relay.lookup.before")
        try:
            found: Outcome = CROWDED
            while found == CROWDED:  # so many are asked about at a time, and it is not its turn yet
                async with asyncio.timeout(self._timeout):
                    found = await broker.lookup(message)
                    if found == CROWDED:
                        await asyncio.sleep(TURN_SECONDS)
        except Exception as error:
            text = redact(f"{silence.text}; look-up failed: {error}")[:ERROR_CHARACTERS]
            found = Unknown(silence.code, text, down="broker")  # nobody could be asked
        failpoints.hit("relay.lookup.after")
        return learnt(found)
