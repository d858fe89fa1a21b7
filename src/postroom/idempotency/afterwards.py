"""What is still to be done about a key when the database answers again.

A claim that was given up may have reached a database that did not answer. It would hold its key
though nobody carries anything out, so whoever gave it up looks for it for a while, and undoes it.
Should that fail, the key is told indeterminate once the lease is over: nothing is done twice.
However many there are, one thread looks for them all, and in an event loop one task.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from postroom import failpoints, signals
from postroom.idempotency import store
from postroom.idempotency.rules import Name

if TYPE_CHECKING:
    from postroom.idempotency.engines import Engines

__all__ = ["Afterwards"]

PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 5.0
LOOKS = 3  # what it was asked, it may do a moment after it has answered others
LONGEST_SECONDS = 900.0
MOST_CLAIMS = 10_000


@dataclass(slots=True, eq=False)
class _GivenUp:
    """A claim that may stand in the database."""

    name: Name
    owner: str
    until: float
    looks: int = LOOKS
    failed: int = 0


class _Pile:
    """What one worker looks for, oldest first; the worker is there while there is anything."""

    def __init__(self) -> None:
        self.claims: deque[_GivenUp] = deque()
        self.closing = threading.Event()
        self.thread: threading.Thread | None = None
        self.task: asyncio.Task[None] | None = None


# Wait so many seconds, or look for one and say whether the database has answered.
_Work: TypeAlias = "Generator[float | _GivenUp, bool, None]"


class Afterwards:
    """The claims of one database that were given up, by threads and by event loops."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._turn = threading.Lock()
        self._pile = _Pile()
        self._piles: dict[asyncio.AbstractEventLoop, _Pile] = {}

    def in_thread(self, name: Name, owner: str) -> None:
        """Give this claim back once the database answers; nobody waits for it."""
        with self._turn:
            pile = self._pile
            dropped = _put(pile, name, owner)
            if pile.thread is None or not pile.thread.is_alive():  # no thread survives a fork
                pile.thread = threading.Thread(
                    target=self._run, args=(pile,), daemon=True, name="postroom-afterwards"
                )
                pile.thread.start()
        _tell(dropped)

    def in_loop(self, name: Name, owner: str) -> None:
        """The same in the event loop that runs."""
        loop = asyncio.get_running_loop()
        with self._turn:
            for closed in [each for each in self._piles if each.is_closed()]:
                del self._piles[closed]
            pile = self._piles.setdefault(loop, _Pile())
            dropped = _put(pile, name, owner)
            if pile.task is None or pile.task.done():
                pile.task = asyncio.ensure_future(self._run_async(pile))
        _tell(dropped)

    async def end_async(self) -> None:
        """Do no more of it in this event loop."""
        with self._turn:
            pile = self._piles.pop(asyncio.get_running_loop(), None)
        if pile is not None and pile.task is not None:
            pile.task.cancel()
            await asyncio.gather(pile.task, return_exceptions=True)

    def end(self) -> None:
        """Do no more of it in threads."""
        with self._turn:
            pile, self._pile = self._pile, _Pile()
        pile.closing.set()

    def _run(self, pile: _Pile) -> None:
        work, answered = self._work(pile), False
        with suppress(StopIteration):
            step = next(work)
            while not pile.closing.is_set():
                if isinstance(step, _GivenUp):
                    answered = self._look(step)
                else:
                    pile.closing.wait(step)
                step = work.send(answered)

    async def _run_async(self, pile: _Pile) -> None:
        work, answered = self._work(pile), False
        with suppress(StopIteration):
            step = next(work)
            while True:
                if isinstance(step, _GivenUp):
                    answered = await self._look_async(step)
                else:
                    await asyncio.sleep(step)
                step = work.send(answered)

    def _work(self, pile: _Pile) -> _Work:
        """In rounds: a database that does not answer for one is asked for no other in this one."""
        pause = PAUSE_SECONDS
        while left := self._left(pile):
            yield pause
            for claim in left:
                if not (yield claim):
                    claim.failed += 1
                    pause = min(pause * 2, LONGEST_PAUSE_SECONDS)
                    break
                claim.looks -= 1
                pause = PAUSE_SECONDS

    def _left(self, pile: _Pile) -> list[_GivenUp]:
        """What is still to be looked for. Whatever fails again and again is behind the others."""
        with self._turn:
            now = time.monotonic()
            # One look tells most of it; without any, nothing is known.
            late = [c for c in pile.claims if c.until <= now and c.looks == LOOKS]
            pile.claims = deque(c for c in pile.claims if c.until > now and c.looks)
            if not pile.claims:
                pile.thread = pile.task = None
            left = sorted(pile.claims, key=lambda claim: claim.failed)
        _tell(late)
        return left

    def _look(self, claim: _GivenUp) -> bool:
        try:
            failpoints.hit("key.give_back.before")
            self._engines.ask(partial(store.give_back, claim.name, claim.owner))
            failpoints.hit("key.give_back.after")
        except Exception:
            return False
        return True

    async def _look_async(self, claim: _GivenUp) -> bool:
        try:
            failpoints.hit("key.give_back.before")
            await self._engines.ask_async(partial(store.give_back, claim.name, claim.owner))
            failpoints.hit("key.give_back.after")
        except Exception:
            return False
        return True


def _put(pile: _Pile, name: Name, owner: str) -> list[_GivenUp]:
    """One more to look for; returns those that are dropped for it."""
    dropped = [pile.claims.popleft()] if len(pile.claims) >= MOST_CLAIMS else []
    pile.claims.append(_GivenUp(name, owner, time.monotonic() + LONGEST_SECONDS))
    return dropped


def _tell(dropped: Iterable[_GivenUp]) -> None:
    """Nobody looks for these any more."""
    for claim in dropped:
        signals.emit(
            "key.unreturned", operation=claim.name.operation, idempotency_key=claim.name.key
        )
