"""Time that passes without waiting.

The relay takes its times from the database: when a message is due, when it expires, when a lease
ends. So the clock does not touch anybody's idea of the present; it moves what is stored. After
`advance(60)` everything that something waits for is a minute nearer: next attempts, `deliver_at`,
`expires_at`, leases, heartbeats, and the age of dedup keys. What has already happened keeps its
time, and so does what a running relay holds in its own memory: a relay whose lease is moved away
finds itself replaced, as one that was stalled for so long.
"""

from __future__ import annotations

from typing import Any

from postroom.errors import ConfigurationError
from postroom.flow import Flow, Statement
from postroom.testing.running import on_connection, on_connection_async, on_database, wait_for

__all__ = ["Clock"]


class Clock:
    """Moves the times of one database, given by its URL, or as one session or connection sees it.

    On a session or connection nothing is committed: the test's rollback takes it back.
    """

    def __init__(self, where: Any) -> None:
        self._where = where

    def advance(self, seconds: float) -> None:
        """Let so many seconds pass."""
        if isinstance(self._where, str):
            wait_for(on_database(self._where, _advance(seconds)))
        else:
            on_connection(self._where, _advance(seconds), "clock.advance_async")

    async def advance_async(self, seconds: float) -> None:
        """`advance` in an event loop, and on an asynchronous session or connection."""
        if isinstance(self._where, str):
            await on_database(self._where, _advance(seconds))
        else:
            await on_connection_async(self._where, _advance(seconds))


def _advance(seconds: float) -> Flow[None]:
    if seconds < 0:
        raise ConfigurationError("time only goes forward: advance by zero seconds or more.")
    yield Statement("postroom.testing", "advance", {"us": int(seconds * 1e6)})
