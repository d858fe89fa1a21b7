"""Messages that were sent and could not be settled, and whether settles succeed at all.

    proven ──a settle failed──► in doubt ──a settle succeeded──► proven

Promise: a database that refuses settles does not make a relay send the same messages again. The
relay keeps the verdicts of a batch whose settle failed over the reconnect, and settles them without
a second send. While settles are in doubt, one lane at a time works one message, as a probe does for
a breaker.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Protocol

from postroom.messages import Message
from postroom.outbox.rules import Settled, Verdict

__all__ = ["Settling", "answered"]

MOST_VERDICTS = 50_000  # three times what a relay has in flight by default


class Settling:
    """What one relay knows of its settles. It outlives the relay's connections."""

    def __init__(self) -> None:
        self.in_doubt = False
        self._verdicts: dict[tuple[str, int, int, int], tuple[Verdict, int]] = {}
        self._probe = asyncio.Lock()

    def reopen(self) -> None:
        """Begin a new connected life of the relay, perhaps on another event loop."""
        self._probe = asyncio.Lock()

    def failed(self) -> None:
        """Record that a settle failed."""
        self.in_doubt = True

    def succeeded(self) -> None:
        """Record that a settle was committed."""
        self.in_doubt = False

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Let a lane work; while settles are in doubt, one lane after the other."""
        if self.in_doubt:
            async with self._probe:
                if self.in_doubt:
                    yield
                    return
        yield

    def most(self, rows: int) -> int:
        """Return how many messages one read may fetch: one while settles are in doubt."""
        return 1 if self.in_doubt else rows

    def keep(self, verdicts: Iterable[tuple[Message, Verdict]], epoch: int) -> None:
        """Store verdicts that were not settled, for the next time their messages are read."""
        for message, verdict in verdicts:
            self._verdicts[_attempt(message)] = verdict, epoch
        while len(self._verdicts) > MOST_VERDICTS:
            del self._verdicts[next(iter(self._verdicts))]

    def known(self, messages: Sequence[Message], epoch: int) -> dict[int, Verdict]:
        """Return the stored verdicts of these messages, by position.

        A refusal counts only if no other relay owned the lane since: that one may have delivered
        the message.
        """
        if not self._verdicts:
            return {}
        found = ((m.position, self._verdicts.get(_attempt(m))) for m in messages)
        return {
            position: kept[0]
            for position, kept in found
            if kept is not None and (isinstance(kept[0], Settled) or epoch <= kept[1] + 1)
        }

    def forget(self, messages: Sequence[Message]) -> None:
        """Drop the stored verdicts of these messages: they are settled."""
        for message in messages:
            self._verdicts.pop(_attempt(message), None)


def _attempt(message: Message) -> tuple[str, int, int, int]:
    """Identify an attempt of a message: a verdict is not valid for another attempt or a redrive."""
    return message.id, message.position, message.redrives, message.attempts


class _Sends(Protocol):
    sending: bool


async def answered(lanes: Sequence[_Sends], *, within_seconds: float) -> None:
    """Wait until no lane has a send in flight, for at most `within_seconds`."""
    give_up_at = time.monotonic() + within_seconds
    for lane in lanes:
        while lane.sending and time.monotonic() < give_up_at:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
