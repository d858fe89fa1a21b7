"""Leases of requests under way, kept by event loops and threads alike.

A lease is kept while the process is alive and for `longest_seconds` at most, so that work which
never ends does not hold its key for ever.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from postroom.errors import PostroomError
from postroom.idempotency.exchange import Asked, beating, drive, drive_async
from postroom.idempotency.forks import renewed_in_child
from postroom.idempotency.rules import Claim
from postroom.idempotency.telling import tell_unprotected

if TYPE_CHECKING:
    from postroom.idempotency.engines import Engines

__all__ = ["Beats", "kept_in_loop"]

REST_SECONDS = 1.0


@contextmanager
def kept_in_loop(asked: Asked, claim: Claim, engines: Engines) -> Iterator[None]:
    """Keep the lease of this claim meanwhile; costs nothing for what ends soon."""
    lease, task = asked.policy.lease_seconds, None

    def start() -> None:
        nonlocal task
        task = asyncio.ensure_future(_keep(asked, claim, engines))

    timer = asyncio.get_running_loop().call_later(lease / 3, start)
    try:
        yield
    finally:
        timer.cancel()
        if task is not None:
            task.cancel()


async def _keep(asked: Asked, claim: Claim, engines: Engines) -> None:
    lease = asked.policy.lease_seconds
    until = time.monotonic() + asked.policy.longest_seconds
    while time.monotonic() < until:
        try:
            if not await drive_async(beating(claim, lease), engines):
                return
        except PostroomError as error:
            tell_unprotected(asked, error)
        await asyncio.sleep(lease / 3)


class Beats:
    """Keeps the leases of requests under way; its thread lives while there are any."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self.renew()
        renewed_in_child(self)

    def renew(self) -> None:
        """Begin without a thread, as after a fork."""
        self._turn = threading.Condition()
        self._live: dict[Claim, tuple[Asked, float, float]] = {}
        self._thread: threading.Thread | None = None

    @contextmanager
    def kept(self, asked: Asked, claim: Claim) -> Iterator[None]:
        """Keep the lease of this claim meanwhile."""
        now, policy = time.monotonic(), asked.policy
        with self._turn:
            self._live[claim] = (
                asked,
                now + policy.lease_seconds / 3,
                now + policy.longest_seconds,
            )
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True, name="postroom-keys")
                self._thread.start()
            elif policy.lease_seconds / 3 < REST_SECONDS:  # it would sleep too long
                self._turn.notify()
        try:
            yield
        finally:
            with self._turn:
                self._live.pop(claim, None)

    def _run(self) -> None:
        while True:
            with self._turn:
                now = time.monotonic()
                # What is past its end is beaten for no more, so it is never due.
                dues = (due for _, due, end in self._live.values() if now < end)
                nearest = min(dues, default=now + REST_SECONDS)
                if not self._live:
                    # Gone soon after its work, so that a test leaves no thread behind.
                    if not self._turn.wait(REST_SECONDS) and not self._live:
                        self._thread = None
                        return
                    continue
                self._turn.wait(max(0.01, min(nearest - now, REST_SECONDS)))
                now = time.monotonic()
                due = [(c, a) for c, (a, at, end) in self._live.items() if at <= now < end]
            for claim, asked in due:
                self._beat(claim, asked)

    def _beat(self, claim: Claim, asked: Asked) -> None:
        lease = asked.policy.lease_seconds
        try:
            alive = drive(beating(claim, lease), self._engines)
        except PostroomError as error:
            tell_unprotected(asked, error)
            alive = True
        with self._turn:
            if claim in self._live:
                _, _, end = self._live[claim]
                if alive:
                    self._live[claim] = (asked, time.monotonic() + lease / 3, end)
                else:
                    del self._live[claim]
