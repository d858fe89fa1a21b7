"""A limit for what threads ask by psycopg, which has none of its own for a server that is silent.

Whoever waits is woken by an end of its connection: a word to such a server would not be heard, and
closing the connection would leave the thread waiting. One thread of ours watches all the others,
while there is anything to watch.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

__all__ = ["Deadlines", "shut"]


def shut(connection: Any) -> None:
    """End what a connection of psycopg's has open, under whoever waits for it."""
    with suppress(Exception):
        theirs = socket.socket(fileno=connection.fileno())  # no copy: there may be no room for one
        try:
            theirs.shutdown(socket.SHUT_RDWR)
        finally:
            theirs.detach()


class _Ask:
    def __init__(self, until: float) -> None:
        self.until = until
        self.connection: Any = None
        self.cut = False


class Deadlines:
    """For everything that threads ask of one database."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._turn = threading.Lock()
        self._asks: list[_Ask] = []
        self._mine = threading.local()
        self._thread: threading.Thread | None = None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """What this thread does in here ends in time; TimeoutError if it was made to."""
        ask = self._mine.ask = _Ask(time.monotonic() + self._seconds)
        with self._turn:
            self._asks.append(ask)
            if self._thread is None or not self._thread.is_alive():  # no thread survives a fork
                self._thread = threading.Thread(
                    target=self._watch, daemon=True, name="postroom-deadlines"
                )
                self._thread.start()
        try:
            yield
        except Exception as error:
            if ask.cut:
                raise TimeoutError from error
            raise
        finally:
            self._mine.ask = None
            with self._turn:
                self._asks.remove(ask)

    def on(self, connection: Any) -> None:
        """This is what the thread will wait for."""
        ask = getattr(self._mine, "ask", None)
        if ask is not None:
            with self._turn:
                ask.connection = connection
                if ask.cut:
                    shut(connection)

    def _watch(self) -> None:
        while True:
            with self._turn:
                if not self._asks:
                    self._thread = None
                    return
                now = time.monotonic()
                for ask in self._asks:
                    if ask.until <= now and not ask.cut:
                        ask.cut = True
                        shut(ask.connection)
                # Whatever comes meanwhile has longer than that.
                until = min((a.until for a in self._asks if not a.cut), default=now + self._seconds)
            time.sleep(max(until - now, 0.001))
