"""One attempt at a resumable request: it goes from point to point, and each point is one commit.

Every point is fenced by the epoch: a run that wakes up after its lease reaches none.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
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


class _Progress:
    """How far a request has come, from wherever the attempt before it came to."""

    def __init__(self, keys: Keys, mine: Mine, policy: Policy) -> None:
        self.attempt = mine.attempts
        self._keys = keys
        self._claim = mine.claim
        self._policy = policy
        self._reached: dict[str, Any] = json.loads(mine.progress) if mine.progress else {}

    @property
    def recovery_point(self) -> str | None:
        """The last point that was reached."""
        return next(reversed(self._reached), None)

    def key_for(self, *steps: Part) -> str:
        """A key for a call to another system, the same at every attempt."""
        return self._claim.name.derive(*steps)

    def _with(self, name: str, result: Any) -> dict[str, Any]:
        checked_key(name)
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
    """An attempt in an event loop."""

    async def point(self, name: str, function: Callable[[Any], Any]) -> Any:
        """Do `function(session)` and reach the point, in one commit; or say what it gave before."""
        from sqlalchemy.ext.asyncio import AsyncSession

        if name in self._reached:
            return self._reached[name]
        async with (
            self._keys.engines.begin_async() as connection,
            AsyncSession(connection, expire_on_commit=False) as session,
        ):
            result = await awaited(function(session))
            reached = self._with(name, result)
            await session.commit()  # whatever is queued is written; the transaction goes on
            await connection.run_sync(lambda inner: self._advance(inner, name, reached))
            failpoints.hit("key.point.before")
        failpoints.hit("key.point.after")
        self._reached = reached
        return reached[name]

    async def call(self, name: str, function: Callable[[], Any]) -> Any:
        """Do `function()`, which works outside of the database, and then reach the point."""
        if name in self._reached:
            return self._reached[name]
        failpoints.hit("key.call.before")
        result = await awaited(function())
        failpoints.hit("key.call.after")
        reached = self._with(name, result)
        async with self._keys.engines.begin_async() as connection:
            await connection.run_sync(lambda inner: self._advance(inner, name, reached))
        self._reached = reached
        return reached[name]


class ThreadRun(_Progress):
    """An attempt in a thread: the same without `await`, with a `Session`."""

    def point(self, name: str, function: Callable[[Any], Any]) -> Any:
        """Do `function(session)` and reach the point, in one commit; or say what it gave before."""
        from sqlalchemy.orm import Session

        if name in self._reached:
            return self._reached[name]
        with (
            self._keys.engines.begin() as connection,
            Session(connection, expire_on_commit=False) as session,
        ):
            reached = self._with(name, function(session))
            session.commit()  # whatever is queued is written; the transaction goes on
            self._advance(connection, name, reached)
            failpoints.hit("key.point.before")
        failpoints.hit("key.point.after")
        self._reached = reached
        return reached[name]

    def call(self, name: str, function: Callable[[], Any]) -> Any:
        """Do `function()`, which works outside of the database, and then reach the point."""
        if name in self._reached:
            return self._reached[name]
        failpoints.hit("key.call.before")
        result = function()
        failpoints.hit("key.call.after")
        reached = self._with(name, result)
        with self._keys.engines.begin() as connection:
            self._advance(connection, name, reached)
        self._reached = reached
        return reached[name]


async def awaited(value: Any) -> Any:
    """What it is, or what it will be."""
    return await value if inspect.isawaitable(value) else value
