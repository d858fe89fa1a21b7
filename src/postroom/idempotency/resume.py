"""`resume`: named recovery points, each its own commit, and a worker that finishes orphans.

    @resumable(keys, "rides.create")
    async def create_ride(run, ride):
        await run.point("ride_created", lambda session: insert(session, ride))
        charge = await run.call("charged", lambda: pay(ride, key=run.key_for("charged")))
        return 201, {"charge": charge}

A run that dies goes on behind the last point it reached, by the client's next try or by a
`Finisher`. What stands between two points may be done twice, so a call to another system carries
`run.key_for(point)`, which is the same at every attempt. Every point is fenced by the epoch: a run
that wakes up late reaches none.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from postroom import failpoints, signals
from postroom.databases.sqlalchemy import SQLAlchemyLink
from postroom.derivation import Part
from postroom.errors import ConfigurationError, KeyLost, PostroomError
from postroom.flow import run as run_flow
from postroom.idempotency import problems, store
from postroom.idempotency.canonical import fingerprint
from postroom.idempotency.exchange import Asked, closing, drive_async, opening
from postroom.idempotency.functions import JSON, refuse
from postroom.idempotency.leases import kept_in_loop
from postroom.idempotency.policy import Policy
from postroom.idempotency.rules import Answer, Claim, Mine, Name, Replay, checked_key, scope_name
from postroom.idempotency.telling import tell_replay, tell_unprotected
from postroom.retry import RetryPolicy

if TYPE_CHECKING:
    from postroom.idempotency.keys import Keys
    from postroom.idempotency.turn import Turn

__all__ = ["Finisher", "Resumable", "Run", "resumable"]

RETRY = RetryPolicy((5, 10, 20, 40, 80, 160), attempts=6)
ORPHANS = 50


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended, for its client."""

    answer: Answer
    replayed: bool

    @property
    def value(self) -> Any:
        """What the function returned, as JSON says it."""
        return json.loads(self.answer.body) if self.answer.body else None


class Run:
    """One attempt at a resumable request, from wherever the one before it came to."""

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

    async def point(self, name: str, function: Callable[[Any], Any]) -> Any:
        """Do `function(session)` and reach the point, in one commit; or say what it gave before."""
        from sqlalchemy.ext.asyncio import AsyncSession

        if name in self._reached:
            return self._reached[name]
        async with (
            self._keys.engines.begin_async() as connection,
            AsyncSession(connection, expire_on_commit=False) as session,
        ):
            result = await _awaited(function(session))
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
        result = await _awaited(function())
        failpoints.hit("key.call.after")
        reached = self._with(name, result)
        async with self._keys.engines.begin_async() as connection:
            await connection.run_sync(lambda inner: self._advance(inner, name, reached))
        self._reached = reached
        return reached[name]

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


class Resumable:
    """A function that can be gone on with, by anybody who has its input."""

    def __init__(
        self, keys: Keys, operation: str, function: Callable[..., Any], policy: Policy
    ) -> None:
        self.keys = keys
        self.operation = operation
        self.policy = policy
        self._function = function

    async def __call__(self, key: str, input: Any, *, scope: Any = "shared") -> Any:
        """Carry it out for a key, or go on with it; gives what it returned."""
        body = json.dumps(input).encode()
        name = Name(scope_name(scope), self.operation, checked_key(key))
        digest = fingerprint("CALL", self.operation, "", body, "application/json")
        outcome = await self.carry_out(Asked(name, digest, self.policy, body))
        return outcome.value

    async def serve(self, turn: Turn, input: Any) -> Any:
        """The same for a request: the middleware sends its answer, whatever the route returns."""
        body = json.dumps(input).encode()
        if turn.asked is None:
            raise ConfigurationError(
                f'the route of {self.operation} needs a policy with mode="resume" and required=True'
            )
        name = turn.asked.name._replace(operation=self.operation)
        asked = replace(turn.asked, name=name, policy=self.policy, request=body)
        turn.used = True
        verdict = await drive_async(opening(asked), self.keys.engines)
        if not isinstance(verdict, Mine):
            tell_replay(asked, verdict)
            turn.instead = problems.answer_to(verdict, asked.policy)
            return None
        outcome = await self._run(asked, verdict)
        turn.instead = problems.replayed(outcome.answer) if outcome.replayed else outcome.answer
        return outcome.value

    async def carry_out(self, asked: Asked) -> Outcome:
        """Claim and run; an error says why it was not carried out."""
        verdict = await drive_async(opening(asked), self.keys.engines)
        if isinstance(verdict, Replay):
            return Outcome(verdict.answer, replayed=True)
        if not isinstance(verdict, Mine):
            refuse(verdict, asked.name)
        return await self._run(asked, verdict)

    async def go_on(self, claim: Claim, record: Any) -> None:
        """A worker has adopted it."""
        asked = Asked(claim.name, record.fingerprint, self.policy, bytes(record.request or b"null"))
        mine = Mine(claim, record.attempts, record.recovery_point, record.progress)
        await self._run(asked, mine)

    async def _run(self, asked: Asked, mine: Mine) -> Outcome:
        input = json.loads(asked.request or b"null")
        engines = self.keys.engines
        try:
            with kept_in_loop(asked, mine.claim, engines):
                run = Run(self.keys, mine, self.policy)
                answer = _answer(await _awaited(self._function(run, input)))
        except KeyLost:
            signals.emit(
                "key.lost",
                operation=self.operation,
                idempotency_key=mine.claim.name.key,
                epoch=mine.claim.epoch,
            )
            raise
        except Exception as error:
            try:
                await self._fail(asked, mine, error)
            except PostroomError as trouble:  # its lease will end by itself
                tell_unprotected(asked, trouble)
            raise
        ended = await drive_async(closing(asked, mine, answer), engines)
        if isinstance(ended, Replay):
            return Outcome(ended.answer, replayed=True)
        if ended is not None:
            raise KeyLost
        return Outcome(answer, replayed=False)

    async def _fail(self, asked: Asked, mine: Mine, error: Exception) -> None:
        """It is tried again when its time comes; spent, a person must look."""
        engines, why = self.keys.engines, f"{type(error).__name__}: {signals.redact(str(error))}"
        delay = RETRY.delay_after(mine.attempts, random=random.random)
        if delay is None:
            await engines.ask_async(lambda: store.doubt(mine.claim, why))
            signals.emit(
                "key.indeterminate",
                operation=self.operation,
                idempotency_key=asked.name.key,
                error=why,
            )
            return
        keep = self.policy.keep_seconds
        await engines.ask_async(
            lambda: store.fail(mine.claim, why, keep_seconds=keep, delay_seconds=delay)
        )


def resumable(
    keys: Keys, operation: str, policy: Policy | None = None
) -> Callable[[Callable[..., Any]], Resumable]:
    """Make `function(run, input)` resumable; `input` is JSON and is kept until it is finished."""
    chosen = replace(policy or Policy(), mode="resume")
    return lambda function: Resumable(keys, operation, function, chosen)


class Finisher:
    """The worker that goes on with what nobody is at: in a process of its own or beside others."""

    def __init__(self, *resumables: Resumable, poll_seconds: float = 1.0) -> None:
        if not resumables:
            raise ConfigurationError("a Finisher needs at least one resumable function.")
        self._by_operation = {each.operation: each for each in resumables}
        self._keys = resumables[0].keys
        self._poll_seconds = poll_seconds
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
        """Finish what can be finished now; how many were gone on with."""
        engines, operations = self._keys.engines, list(self._by_operation)
        found = await engines.ask_async(lambda: store.orphans(operations, ORPHANS))
        return sum([await self._adopt(name, epoch) for name, epoch, _ in found])

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
        # What went wrong stands in its record, and has been told of.
        await asyncio.gather(work.go_on(claim, record), return_exceptions=True)
        return True


def _answer(value: Any) -> Answer:
    if isinstance(value, Answer):
        return value
    status = 200
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], int):
        status, value = value
    try:
        return Answer(status, JSON, json.dumps(value).encode())
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"the result must be JSON: {error}.") from None


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
