"""The worker that finishes orphans: resumable requests whose process is gone, or whose next attempt
has come. Several may run: each orphan is adopted by one of them."""

from __future__ import annotations

import asyncio
import inspect

from postroom import signals
from postroom.errors import ConfigurationError, PostroomError
from postroom.idempotency import store
from postroom.idempotency.exchange import tell_doubt
from postroom.idempotency.resume import Resumable, ResumableInThreads
from postroom.idempotency.rules import Name

__all__ = ["Finisher"]

ORPHANS = 50


class Finisher:
    """Goes on with what nobody is at: in a process of its own or beside others."""

    def __init__(
        self,
        *resumables: Resumable | ResumableInThreads,
        poll_seconds: float = 1.0,
        at_once: int = 4,
    ) -> None:
        if not resumables:
            raise ConfigurationError("a Finisher needs at least one resumable function.")
        self._by_operation = {each.operation: each for each in resumables}
        self._keys = resumables[0].keys
        if any(each.keys is not self._keys for each in resumables):
            raise ConfigurationError("a Finisher looks into one Keys: run one for each.")
        self._poll_seconds = poll_seconds
        self._at_once = at_once
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """End `run` after what is under way."""
        self._stopping.set()

    async def run(self) -> None:
        """Look for orphans until told to stop."""
        while not self._stopping.is_set():
            try:
                found = await self.once()
            except PostroomError as error:
                found = 0
                wait = self._poll_seconds
                signals.emit("key.worker_failed", error=str(error), retry_in_seconds=wait)
            if not found:
                with_timeout = asyncio.wait_for(self._stopping.wait(), self._poll_seconds)
                await asyncio.gather(with_timeout, return_exceptions=True)

    async def once(self) -> int:
        """Finish what can be finished now, `at_once` together; how many were gone on with."""
        engines, operations = self._keys.engines, list(self._by_operation)
        for name in await engines.ask_async(lambda: store.sweep(ORPHANS)):
            tell_doubt(name, "the process that had it was lost")
        found = await engines.ask_async(lambda: store.orphans(operations, ORPHANS))
        places = asyncio.Semaphore(self._at_once)

        async def one(name: Name, epoch: int) -> bool:
            async with places:
                return not self._stopping.is_set() and await self._adopt(name, epoch)

        work = [one(name, epoch) for name, epoch, _ in found]
        ended = await asyncio.gather(*work, return_exceptions=True)
        for each in ended:
            if isinstance(each, BaseException):
                raise each
        return sum(each for each in ended if not isinstance(each, BaseException))

    async def _adopt(self, name: Name, epoch: int) -> bool:
        work, engines = self._by_operation[name.operation], self._keys.engines
        lease = work.policy.lease_seconds
        adopted = await engines.ask_async(lambda: store.adopt(name, epoch, lease_seconds=lease))
        if adopted is None:
            return False
        claim, record = adopted
        signals.emit(
            "key.resumed",
            operation=name.operation,
            idempotency_key=name.key,
            attempts=record.attempts,
        )
        if inspect.iscoroutinefunction(work.go_on):
            going = work.go_on(claim, record)
        else:
            going = asyncio.to_thread(work.go_on, claim, record)
        # What went wrong stands in its record, and has been told of.
        await asyncio.gather(going, return_exceptions=True)
        return True
