"""One attempt at a resumable request: it goes from point to point, and each point is one commit.

Every point is fenced by the epoch: a run that wakes up after its lease reaches none.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from postroom import failpoints
from postroom.databases.sqlalchemy import SQLAlchemyLink
from postroom.derivation import Part
from postroom.errors import ConfigurationError, KeyLost
from postroom.flow import run as run_flow
from postroom.idempotency import store
from postroom.idempotency.policy import Policy
from postroom.idempotency.rules import Mine, checked_key

if TYPE_CHECKING:
    from postroom.idempotency.keys import Keys

__all__ = ["Run", "ThreadRun", "awaited"]


# The run whose point is being reached, for whatever runs inside of it.
_inside: ContextVar[_Progress | None] = ContextVar("postroom_point", default=None)


class _Progress:
    """How far a request has come, from wherever the attempt before it came to."""

    def __init__(self, keys: Keys, mine: Mine, policy: Policy) -> None:
        self.attempt = mine.attempts
        self._keys = keys
        self._claim = mine.claim
        self._policy = policy
        self._reached: dict[str, Any] = json.loads(mine.progress) if mine.progress else {}
        self._named: set[str] = set()

    @property
    def recovery_point(self) -> str | None:
        """The last point that was reached."""
        return next(reversed(self._reached), None)

    def key_for(self, *steps: Part) -> str:
        """A key for a call to another system, the same at every attempt."""
        return self._claim.name.derive(*steps)

    @contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        """A name stands for one thing in an attempt: what is done under it again would be skipped
        as done. What failed may be tried again."""
        checked_key(name)
        if name in self._named:
            raise ConfigurationError(
                f"{name} was reached already in this attempt: give every point a name of its own, "
                f'such as f"{name} {{number}}" in a loop'
            )
        self._named.add(name)
        try:
            yield
        except BaseException:
            self._named.discard(name)
            raise

    @contextmanager
    def _marked(self) -> Iterator[None]:
        """Inside of a point. Another one in there would wait for it for ever."""
        token = _inside.set(self)
        try:
            yield
        finally:
            _inside.reset(token)

    def _refuse_inside(self) -> None:
        if _inside.get() is self:
            raise ConfigurationError(
                "a point cannot be reached inside another: reach it before or after"
            )

    def _with(self, name: str, result: Any) -> dict[str, Any]:
        try:
            plain = json.loads(json.dumps(result))
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"what {name} gives must be JSON: {error}.") from None
        return {**self._reached, name: plain}

    def _advance(self, connection: Any, name: str, reached: dict[str, Any]) -> None:
        lease = self._policy.lease_seconds
        flow = store.advance(self._claim, name, json.dumps(reached), lease)
        if not run_flow(flow, SQLAlchemyLink(connection)):
            raise KeyLost


class Run(_Progress):
    """An attempt in an event loop. Calls may be under way together; points are reached in turn, so
    that none forgets another."""

    def __init__(self, keys: Keys, mine: Mine, policy: Policy) -> None:
        super().__init__(keys, mine, policy)
        self._turn = asyncio.Lock()

    async def point(self, name: str, function: Callable[[Any], Any]) -> Any:
        """Do `function(session)` and reach the point, in one commit; or say what it gave before."""
        from sqlalchemy.ext.asyncio import AsyncSession

        self._refuse_inside()
        with self._naming(name):
            if name in self._reached:
                return self._reached[name]
            async with self._turn:
                async with (
                    self._keys.engines.begin_async() as connection,
                    AsyncSession(connection, expire_on_commit=False) as session,
                ):
                    with self._marked():
                        result = await awaited(function(session))
                    reached = self._with(name, result)
                    await session.commit()  # what is queued is written; the transaction goes on
                    await connection.run_sync(lambda inner: self._advance(inner, name, reached))
                    failpoints.hit("key.point.before")
                failpoints.hit("key.point.after")
                self._reached = reached
            return reached[name]

    async def call(self, name: str, function: Callable[[], Any]) -> Any:
        """Do `function()`, which works outside of the database, and then reach the point."""
        self._refuse_inside()
        with self._naming(name):
            if name in self._reached:
                return self._reached[name]
            failpoints.hit("key.call.before")
            result = await awaited(function())
            failpoints.hit("key.call.after")
            async with self._turn:
                reached = self._with(name, result)
                async with self._keys.engines.begin_async() as connection:
                    await connection.run_sync(lambda inner: self._advance(inner, name, reached))
                self._reached = reached
            return reached[name]


class ThreadRun(_Progress):
    """An attempt in a thread: the same without `await`, with a `Session`."""

    def __init__(self, keys: Keys, mine: Mine, policy: Policy) -> None:
        super().__init__(keys, mine, policy)
        self._turn = threading.Lock()

    def point(self, name: str, function: Callable[[Any], Any]) -> Any:
        """Do `function(session)` and reach the point, in one commit; or say what it gave before."""
        from sqlalchemy.orm import Session

        self._refuse_inside()
        with self._naming(name):
            if name in self._reached:
                return self._reached[name]
            with self._turn:
                with (
                    self._keys.engines.begin() as connection,
                    Session(connection, expire_on_commit=False) as session,
                ):
                    with self._marked():
                        result = function(session)
                    reached = self._with(name, result)
                    session.commit()  # what is queued is written; the transaction goes on
                    self._advance(connection, name, reached)
                    failpoints.hit("key.point.before")
                failpoints.hit("key.point.after")
                self._reached = reached
            return reached[name]

    def call(self, name: str, function: Callable[[], Any]) -> Any:
        """Do `function()`, which works outside of the database, and then reach the point."""
        self._refuse_inside()
        with self._naming(name):
            if name in self._reached:
                return self._reached[name]
            failpoints.hit("key.call.before")
            result = function()
            failpoints.hit("key.call.after")
            with self._turn:
                reached = self._with(name, result)
                with self._keys.engines.begin() as connection:
                    self._advance(connection, name, reached)
                self._reached = reached
            return reached[name]


async def awaited(value: Any) -> Any:
    """What it is, or what it will be."""
    return await value if inspect.isawaitable(value) else value
