"""The worker that finishes orphans: resumable requests whose process is gone, or whose next attempt
has come. Several may run: each orphan is adopted by one of them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import threading
from collections.abc import Callable
from typing import Any

from postroom import signals
from postroom.errors import ConfigurationError, PostroomError
from postroom.idempotency import store
from postroom.idempotency.exchange import tell_doubt
from postroom.idempotency.resume import Resumable, ResumableInThreads
from postroom.idempotency.rules import Name
from postroom.leasing import leased

__all__ = ["Finisher"]

ORPHANS = 50
TIDY_SECONDS = 1.0  # for what is broken off, to give its connection back


class Finisher:
    """Goes on with what nobody is at: in a process of its own or beside others."""

    def __init__(
        self,
        *resumables: Resumable | ResumableInThreads,
        poll_seconds: float = 1.0,
        at_once: int = 4,
        grace_seconds: float = 20,
    ) -> None:
        if not resumables:
            raise ConfigurationError("a Finisher needs at least one resumable function.")
        for each in resumables:
            if not isinstance(each, Resumable | ResumableInThreads):
                name = getattr(each, "__qualname__", None) or type(each).__name__
                raise ConfigurationError(
                    f"a Finisher goes on with what @resumable has made, and {name} is none."
                )
        self._by_operation = {each.operation: each for each in resumables}
        self._keys = resumables[0].keys
        if any(each.keys is not self._keys for each in resumables):
            raise ConfigurationError("a Finisher looks into one Keys: run one for each.")
        shortest = min(each.policy.lease_seconds for each in resumables)
        rest = shortest - leased(shortest)  # in which a run that was lost is to be gone on with
        self._poll_seconds = min(poll_seconds, rest / 2)
        self._at_once = at_once
        self._grace_seconds = grace_seconds
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """End `run` after what is under way, or after `grace_seconds`."""
        self._stopping.set()

    async def run(self) -> None:
        """Look for orphans until told to stop, while there are free places: one that takes long
        holds up no other."""
        stopping = asyncio.ensure_future(self._stopping.wait())
        under_way = set[asyncio.Future[bool]]()
        try:
            while not stopping.done():
                free, found = self._at_once - len(under_way), 0
                try:
                    await self._sweep()
                    for name, epoch, _ in await self._orphans(free) if free else ():
                        found += 1
                        under_way.add(asyncio.ensure_future(self._adopt(name, epoch)))
                except PostroomError as error:
                    self._failed(error)
                await self._rest(stopping, under_way, full=found == free)
            if under_way:
                await asyncio.wait(under_way, timeout=self._grace_seconds)
                self._ended(under_way)
        finally:
            stopping.cancel()
            for each in under_way:
                each.cancel()
            await asyncio.gather(stopping, *under_way, return_exceptions=True)

    async def _rest(
        self, stopping: asyncio.Future[Any], under_way: set[asyncio.Future[bool]], *, full: bool
    ) -> None:
        """Until the next look. With all places taken there may be more, so the next one that is
        free is for them; but what could not be adopted would only be found again."""
        now = asyncio.get_running_loop().time
        until = now() + self._poll_seconds
        while not stopping.done() and (left := until - now()) > 0:
            watched = (stopping, *under_way) if full else (stopping,)
            await asyncio.wait(watched, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            ended = self._ended(under_way)
            full = full and None not in ended
            if full and True in ended:
                return

    async def once(self) -> int:
        """Finish what can be finished now, `at_once` together; how many were gone on with."""
        await self._sweep()
        places = asyncio.Semaphore(self._at_once)

        async def one(name: Name, epoch: int) -> bool:
            async with places:
                return not self._stopping.is_set() and await self._adopt(name, epoch)

        work = [one(name, epoch) for name, epoch, _ in await self._orphans(ORPHANS)]
        ended = await asyncio.gather(*work, return_exceptions=True)
        for each in ended:
            if isinstance(each, BaseException):
                raise each
        return sum(each for each in ended if not isinstance(each, BaseException))

    async def _sweep(self) -> None:
        for name in await self._keys.engines.ask_async(lambda: store.sweep(ORPHANS)):
            tell_doubt(name, "the process that had it was lost")

    async def _orphans(self, rows: int) -> list[tuple[Name, int, int]]:
        operations, engines = list(self._by_operation), self._keys.engines
        found: list[tuple[Name, int, int]]
        found = await engines.ask_async(lambda: store.orphans(operations, rows))
        return found

    def _ended(self, under_way: set[asyncio.Future[bool]]) -> list[bool | None]:
        """Of each that has ended, whether it was adopted; None: that failed."""
        ended: list[bool | None] = []
        for each in [each for each in under_way if each.done()]:
            under_way.discard(each)
            try:
                ended.append(each.result())
            except PostroomError as error:
                self._failed(error)
                ended.append(None)
        return ended

    def _failed(self, error: PostroomError) -> None:
        wait = self._poll_seconds
        signals.emit("key.worker_failed", error=str(error), retry_in_seconds=wait)

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
        going: asyncio.Future[None]
        if isinstance(work, Resumable):
            going = asyncio.ensure_future(work.go_on(claim, record))
        else:
            going = _in_a_thread(work.go_on, claim, record)
        # What went wrong stands in its record, and has been told of.
        going.add_done_callback(lambda each: each.cancelled() or each.exception())
        longest = work.policy.longest_seconds
        try:
            ended, _ = await asyncio.wait((going,), timeout=longest)
        finally:
            # A thread cannot be broken off. Its lease ends too, and whoever goes on then has
            # another epoch: it reaches no point after that.
            going.cancel()
            await asyncio.wait((going,), timeout=TIDY_SECONDS)
        if not ended:
            what = f"{name.operation} with key {name.key!r}"
            signals.emit(
                "key.worker_failed",
                error=f"{what} did not end within {longest:g} s: give its calls a timeout",
                retry_in_seconds=lease,
            )
        return True


def _in_a_thread(function: Callable[..., None], *arguments: Any) -> asyncio.Future[None]:
    """In a thread of its own: one that hangs takes no place from others, and keeps no process."""
    outside: concurrent.futures.Future[None] = concurrent.futures.Future()
    outside.set_running_or_notify_cancel()
    context = contextvars.copy_context()

    def work() -> None:
        try:
            outside.set_result(context.run(function, *arguments))
        except BaseException as error:
            outside.set_exception(error)

    threading.Thread(target=work, daemon=True, name="postroom-finisher").start()
    return asyncio.wrap_future(outside)
