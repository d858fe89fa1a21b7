"""Messages that may have arrived: a broker that can be asked is asked, before they are sent again.

In doubt is what a broker gave no answer to, what a relay was sending when it died (its journal says
so), and what was sent and not settled because the database was lost in between. "It did not arrive"
clears the doubt only right before the next try: until then it may be on its way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from postroom import failpoints
from postroom.brokers.base import CanLookUp, Delivered, Outcome, Permanent, Transient, Unknown
from postroom.messages import Message
from postroom.outbox.rules import in_doubt
from postroom.signals import redact

__all__ = ["Doubts"]

ERROR_CHARACTERS = 2000
MOST_UNSETTLED = 10_000
NOT_WRITTEN = Unknown("unsettled", "it was sent, and what became of it was not written down")


class Doubts:
    """What one relay knows of messages whose fate is not written down."""

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout = timeout_seconds
        self._unsettled: dict[str, None] = {}

    def sending(self, messages: Sequence[Message]) -> None:
        """These are about to be sent to a broker that can be asked."""
        for message in messages:
            self._unsettled[message.id] = None
        while len(self._unsettled) > MOST_UNSETTLED:
            del self._unsettled[next(iter(self._unsettled))]

    def settled(self, messages: Sequence[Message]) -> None:
        """What became of these is written down, their doubt too."""
        if self._unsettled:
            for message in messages:
                self._unsettled.pop(message.id, None)

    async def ask_first(
        self, broker: CanLookUp, messages: Sequence[Message], suspect: bool
    ) -> dict[int, Outcome]:
        """What is known of those that may have arrived, by position; the others are to be sent."""
        doubtful = [
            message
            for message in messages
            if suspect or message.id in self._unsettled or in_doubt(message.history)
        ]
        answers = await asyncio.gather(*(self._ask(broker, m, NOT_WRITTEN) for m in doubtful))
        return {
            message.position: answer
            for message, answer in zip(doubtful, answers, strict=True)
            if not isinstance(answer, Transient)
        }

    async def resolved(
        self, broker: CanLookUp, messages: Sequence[Message], outcomes: Sequence[Outcome]
    ) -> list[Outcome]:
        """The outcomes of a send, after a look for those that are unknown."""
        pairs = zip(messages, outcomes, strict=True)
        return await asyncio.gather(*(self._resolve(broker, *pair) for pair in pairs))

    async def _resolve(self, broker: CanLookUp, message: Message, outcome: Outcome) -> Outcome:
        if not isinstance(outcome, Unknown):
            if isinstance(outcome, Transient):
                self._unsettled.pop(message.id, None)
            return outcome
        found = await self._ask(broker, message, outcome)
        if isinstance(found, Delivered | Permanent):
            return found
        # Never `down`, for which no attempt is written and so no doubt either.
        return Unknown(found.code, found.text)

    async def _ask(self, broker: CanLookUp, message: Message, outcome: Unknown) -> Outcome:
        failpoints.hit("relay.lookup.before")
        try:
            async with asyncio.timeout(self._timeout):
                found = await broker.lookup(message)
        except Exception as error:
            text = redact(f"{outcome.text}; look-up failed: {error}")[:ERROR_CHARACTERS]
            found = Unknown(outcome.code, text)
        failpoints.hit("relay.lookup.after")
        return found
