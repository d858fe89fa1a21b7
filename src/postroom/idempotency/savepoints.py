"""A savepoint in the caller's transaction, on whatever kind of session or connection that is.

A function that raises has done nothing, whatever its caller then makes of the transaction. What a
session of SQLAlchemy's has queued belongs to its own savepoints, so it is asked for one.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from postroom.databases.caller import carry_out, carry_out_async
from postroom.databases.kinds import bare, kind_of
from postroom.flow import Flow, Statement
from postroom.idempotency.store import ROOM

__all__ = ["Savepoint"]

_WHAT = "record of this request"
_depth: ContextVar[int] = ContextVar("postroom_savepoints", default=0)


class Savepoint:
    """Set after the claim and before the work."""

    def __init__(self, tx: Any) -> None:
        self._tx = bare(tx)
        self._depth = _depth.get() + 1
        _depth.set(self._depth)
        # One name for each depth: MariaDB forgets an outer one of the same name, and drivers keep
        # what they have prepared.
        self._name = f"postroom_key_{self._depth}"
        self._asks = kind_of(self._tx).library == "sqlalchemy"
        self._nested: Any = None
        self._stands = False

    def set(self) -> None:
        if self._asks:
            self._nested = self._tx.begin_nested()
        else:
            self._say("SAVEPOINT")
        self._stands = True

    def release(self) -> None:
        """The work is done. Those of drivers end with their transaction."""
        if self._nested is not None and self._nested.is_active:
            self._nested.commit()

    def undo(self) -> bool:
        """Take back what was done since. False: the work has ended the transaction itself."""
        if not self._stands:
            return True  # it could not be set, so the work has not begun
        try:
            if self._nested is not None:
                self._nested.rollback()
            else:
                self._say("ROLLBACK TO SAVEPOINT")
        except Exception:
            return False
        return True

    async def set_async(self) -> None:
        if not self._asks:
            await self._say_async("SAVEPOINT")
        elif kind_of(self._tx).is_async:
            self._nested = await self._tx.begin_nested()
        else:
            self._nested = self._tx.begin_nested()
        self._stands = True

    async def release_async(self) -> None:
        nested = self._nested
        if nested is not None and nested.is_active and (waiting := nested.commit()) is not None:
            await waiting

    async def undo_async(self) -> bool:
        if not self._stands:
            return True
        try:
            if self._nested is None:
                await self._say_async("ROLLBACK TO SAVEPOINT")
            elif (waiting := self._nested.rollback()) is not None:
                await waiting
        except Exception:
            return False
        return True

    def leave(self) -> None:
        """Whatever became of it."""
        _depth.set(self._depth - 1)

    def _say(self, what: str) -> None:
        carry_out(self._tx, _flow(f"{what} {self._name}"), what=_WHAT, instead="an async function")

    async def _say_async(self, what: str) -> None:
        await carry_out_async(self._tx, _flow(f"{what} {self._name}"), what=_WHAT)


def _flow(text: str) -> Flow[None]:
    yield Statement(ROOM, "savepoint", {}, text=text)
