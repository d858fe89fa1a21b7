"""aiosqlite with one trip to its thread for a statement, where its own cursors take three.

A cursor is only an object until it executes something, so it is made where it is asked for; and
one that was closed is closed in the thread before whatever is done there next.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from functools import partial
from threading import Thread
from typing import Any

import aiosqlite
from aiosqlite.context import Result

__all__ = ["connect"]

ROWS_AT_ONCE = 64  # that an iteration fetches, as in aiosqlite


def connect(path: str, **options: Any) -> aiosqlite.Connection:
    """A connection to be awaited, for SQLAlchemy's `async_creator_fn`."""
    options["check_same_thread"] = False  # cursors are made here; all else happens in the thread
    made = _Connection(partial(sqlite3.connect, path, **options), ROWS_AT_ONCE)
    thread = made if isinstance(made, Thread) else made._thread  # before aiosqlite 0.22 it was one
    thread.daemon = True  # as SQLAlchemy has it
    return made


class _Connection(aiosqlite.Connection):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.closing: list[sqlite3.Cursor] = []

    def cursor(self) -> Result[aiosqlite.Cursor]:
        return Result(self._new_cursor())

    async def _new_cursor(self) -> aiosqlite.Cursor:
        return _Cursor(self, self._conn.cursor())

    async def _execute(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.closing:
            closing, self.closing = self.closing, []
            fn = partial(_close_first, closing, fn)
        return await super()._execute(fn, *args, **kwargs)  # type: ignore[no-untyped-call]

    if hasattr(aiosqlite.Connection, "stop"):  # since 0.22

        def stop(self) -> asyncio.Future[Any] | None:
            for cursor in self.closing:  # an open one would keep the lock of a closed connection
                self._tx.put_nowait((None, cursor.close))
            self.closing = []
            return super().stop()


class _Cursor(aiosqlite.Cursor):
    _conn: _Connection

    async def close(self) -> None:
        self._conn.closing.append(self._cursor)


def _close_first(
    closing: list[sqlite3.Cursor], function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    for cursor in closing:
        cursor.close()
    return function(*args, **kwargs)
