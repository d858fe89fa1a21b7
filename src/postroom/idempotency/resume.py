"""`resume`: named recovery points, each its own commit, and a worker that finishes orphans.

    @resumable(keys, "rides.create")
    async def create_ride(run, ride):
        await run.point("ride_created", lambda session: insert(session, ride))
        charge = await run.call("charged", lambda: pay(ride, key=run.key_for("charged")))
        return 201, {"charge": charge}

A run that dies goes on behind the last point it reached, by the client's next try or by a
`Finisher`. What stands between two points may be done twice, so a call to another system carries
`run.key_for(point)`, which is the same at every attempt. A function that is not async is the same
without `await`: it is called in the caller's thread, and by a `Finisher` in one of its own.
"""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from postroom import signals
from postroom.calling import is_async
from postroom.errors import ConfigurationError, KeyInDoubt, KeyLost, PostroomError
from postroom.idempotency import problems, store
from postroom.idempotency.canonical import fingerprint
from postroom.idempotency.exchange import (
    Asked,
    Do,
    Steps,
    closing,
    drive,
    drive_async,
    opening,
    tell_doubt,
)
from postroom.idempotency.functions import JSON, key_of_call, refuse, result_of
from postroom.idempotency.leases import kept_in_loop
from postroom.idempotency.policy import Policy
from postroom.idempotency.rules import (
    Answer,
    Claim,
    Doubtful,
    Mine,
    Name,
    Replay,
    Running,
    Verdict,
    bodiless,
    checked_answer,
    owned,
    scope_name,
)
from postroom.idempotency.runs import Run, ThreadRun, awaited
from postroom.idempotency.telling import refused, tell_replay, tell_unprotected, why_of
from postroom.retry import RetryPolicy
from postroom.worker.waiting import finish

if TYPE_CHECKING:
    from postroom.idempotency.keys import Keys
    from postroom.idempotency.turn import Turn

__all__ = ["Resumable", "ResumableInThreads", "Run", "ThreadRun", "resumable"]

# What a route returns to its framework in place of an answer without JSON: Flask logs an error for
# None, though nobody is sent what a route returns.
_NOTHING = ""
RETRY = RetryPolicy((5, 10, 20, 40, 80, 160), attempts=6)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended, for its client."""

    answer: Answer
    replayed: bool


class _Resumable:
    """A function that can be gone on with, by anybody who has its input."""

    def __init__(
        self, keys: Keys, operation: str, function: Callable[..., Any], policy: Policy
    ) -> None:
        self.keys = keys
        self.operation = operation
        self.policy = policy
        self._function = function

    def _called(self, key: object, input: Any, scope: Any) -> Asked:
        body = json.dumps(input).encode()
        name = Name(scope_name(scope), self.operation, key_of_call(key, self.operation))
        digest = fingerprint("CALL", self.operation, "", body, "application/json")
        return Asked(name, digest, self.policy, body)

    def _served(self, turn: Turn, input: Any) -> Asked | None:
        """None: there is no key to go on by, and its client is told so."""
        policy = turn.policy if turn.asked is None else turn.asked.policy
        if policy is None or policy.mode != "resume":
            # The other modes have claimed the key, or would commit what is not of this run.
            turn.kept = False  # nothing was begun
            mode = policy.mode if policy else "external"
            raise ConfigurationError(
                f'the route of {self.operation} needs a policy with mode="resume", and its own '
                f'says "{mode}"'
            )
        if turn.asked is None:
            turn.instead = problems.missing(policy)
            return None
        turn.used = True
        name = owned(turn.asked.name)._replace(operation=self.operation)
        return replace(turn.asked, name=name, request=json.dumps(input).encode())

    def _adopted(self, claim: Claim, record: Any) -> tuple[Asked, Mine]:
        asked = Asked(claim.name, record.fingerprint, self.policy, bytes(record.request or b"null"))
        return asked, Mine(claim, record.attempts, record.recovery_point, record.progress)

    def _spent(self, asked: Asked, mine: Mine) -> Steps[bool]:
        """Whether it was begun too often: a run that takes its process down counts none itself."""
        if mine.attempts <= RETRY.attempts:
            return False
        why = f"begun {RETRY.attempts} times, and never brought to an end"
        if (yield Do(lambda: store.doubt(mine.claim, why))):
            tell_doubt(asked.name, why)
        return True

    def _lost(self, mine: Mine) -> None:
        signals.emit(
            "key.lost",
            operation=self.operation,
            idempotency_key=mine.claim.name.key,
            epoch=mine.claim.epoch,
        )

    def _failing(self, asked: Asked, mine: Mine, error: Exception) -> Steps[None]:
        """It is tried again when its time comes; spent, a person must look."""
        why = why_of(error)
        delay = RETRY.delay_after(mine.attempts, random=random.random)
        signals.emit(
            "key.failed",
            error,
            operation=self.operation,
            idempotency_key=asked.name.key,
            attempts=mine.attempts,
            error=why,
            retry_in_seconds=delay,
        )
        keep = asked.policy.keep_seconds
        try:
            if delay is not None:
                yield Do(
                    lambda: store.fail(mine.claim, why, keep_seconds=keep, delay_seconds=delay)
                )
                return
            yield Do(lambda: store.doubt(mine.claim, why))
        except PostroomError as trouble:  # its lease will end by itself
            tell_unprotected(asked, trouble)
            return
        tell_doubt(asked.name, why)


class Resumable(_Resumable):
    """An async function that can be gone on with."""

    async def __call__(
        self, key: str | int | uuid.UUID, input: Any, *, scope: Any = "shared"
    ) -> Any:
        """Carry it out for a key, or go on with it; gives what it returned."""
        asked = self._called(key, input, scope)
        verdict = await drive_async(opening(asked), self.keys.engines)
        if isinstance(verdict, Mine):
            verdict = Replay((await self._run(asked, verdict)).answer)
        return result_of(verdict, asked)

    async def serve(self, turn: Turn, input: Any) -> Any:
        """The same for a request: the middleware sends its answer, whatever the route returns."""
        asked = self._served(turn, input)
        if asked is None:
            return _NOTHING
        try:
            verdict = await drive_async(opening(asked), self.keys.engines)
        except PostroomError as error:
            return _told(turn, refused(asked, error))
        if not isinstance(verdict, Mine):
            return _told(turn, _said(asked, verdict))
        try:
            return _told(turn, _ended(await self._run(asked, verdict)))
        except KeyLost:
            return _told(turn, _said(asked, Running(1.0)))
        except KeyInDoubt:
            return _told(turn, _said(asked, Doubtful(verdict.claim.epoch)))

    async def go_on(self, claim: Claim, record: Any) -> None:
        """A worker has adopted it."""
        await self._run(*self._adopted(claim, record))

    async def _run(self, asked: Asked, mine: Mine) -> Outcome:
        input, engines = json.loads(asked.request or b"null"), self.keys.engines
        if await drive_async(self._spent(asked, mine), engines):
            refuse(Doubtful(mine.claim.epoch), asked.name)
        try:
            with kept_in_loop(asked, mine.claim, engines):
                run = Run(self.keys, mine, asked.policy)
                answer = _answer(await awaited(self._function(run, input)))
        except KeyLost:
            self._lost(mine)
            raise
        except Exception as error:
            await finish(drive_async(self._failing(asked, mine, error), engines))
            raise
        return _outcome(answer, await finish(drive_async(closing(asked, mine, answer), engines)))


class ResumableInThreads(_Resumable):
    """A function that is not async, and can be gone on with."""

    def __call__(self, key: str | int | uuid.UUID, input: Any, *, scope: Any = "shared") -> Any:
        """Carry it out for a key, or go on with it; gives what it returned."""
        asked = self._called(key, input, scope)
        verdict = drive(opening(asked), self.keys.engines)
        if isinstance(verdict, Mine):
            verdict = Replay(self._run(asked, verdict).answer)
        return result_of(verdict, asked)

    def serve(self, turn: Turn, input: Any) -> Any:
        """The same for a request: the middleware sends its answer, whatever the route returns."""
        asked = self._served(turn, input)
        if asked is None:
            return _NOTHING
        try:
            verdict = drive(opening(asked), self.keys.engines)
        except PostroomError as error:
            return _told(turn, refused(asked, error))
        if not isinstance(verdict, Mine):
            return _told(turn, _said(asked, verdict))
        try:
            return _told(turn, _ended(self._run(asked, verdict)))
        except KeyLost:
            return _told(turn, _said(asked, Running(1.0)))
        except KeyInDoubt:
            return _told(turn, _said(asked, Doubtful(verdict.claim.epoch)))

    def go_on(self, claim: Claim, record: Any) -> None:
        """A worker has adopted it."""
        self._run(*self._adopted(claim, record))

    def _run(self, asked: Asked, mine: Mine) -> Outcome:
        input, engines = json.loads(asked.request or b"null"), self.keys.engines
        if drive(self._spent(asked, mine), engines):
            refuse(Doubtful(mine.claim.epoch), asked.name)
        try:
            with self.keys.beats.kept(asked, mine.claim):
                run = ThreadRun(self.keys, mine, asked.policy)
                answer = _answer(self._function(run, input))
        except KeyLost:
            self._lost(mine)
            raise
        except Exception as error:
            drive(self._failing(asked, mine, error), engines)
            raise
        return _outcome(answer, drive(closing(asked, mine, answer), engines))


def resumable(
    keys: Keys, operation: str, policy: Policy | None = None
) -> Callable[[Callable[..., Any]], Any]:
    """Make `function(run, input)` resumable; `input` is JSON and is kept until it is finished."""
    chosen = replace(policy or Policy(), mode="resume")

    def decorate(function: Callable[..., Any]) -> Any:
        asynchronous = is_async(function, wrapped=False)
        kind = Resumable if asynchronous else ResumableInThreads
        return kind(keys, operation, function, chosen)

    return decorate


def _said(asked: Asked, verdict: Verdict) -> Answer:
    assert not isinstance(verdict, Mine)
    tell_replay(asked, verdict)
    return problems.answer_to(verdict, asked.policy)


def _ended(outcome: Outcome) -> Answer:
    return problems.replayed(outcome.answer) if outcome.replayed else outcome.answer


def _told(turn: Turn, answer: Answer) -> Any:
    """The middleware sends it; its route gets what it says, to return that."""
    turn.instead = answer
    try:
        said = json.loads(answer.body)
    except ValueError:
        return _NOTHING
    return _NOTHING if said is None else said


def _outcome(answer: Answer, ended: Replay | Doubtful | None) -> Outcome:
    if isinstance(ended, Replay):
        return Outcome(ended.answer, replayed=True)
    if ended is not None:
        raise KeyLost
    return Outcome(answer, replayed=False)


def _answer(value: Any) -> Answer:
    if isinstance(value, Answer):
        return checked_answer(value)
    status = 200
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], int):
        status, value = value
        if isinstance(status, bool) or not 200 <= status <= 599:
            raise ConfigurationError(
                f"a run returned ({status}, …), and {status} is no status: return what it gives, "
                "or a status from 200 to 599 and a body; a list, as in [17, …], where the number "
                "is a part of the result."
            )
    if value is None and bodiless(status):
        return Answer(status)
    try:
        return checked_answer(Answer(status, JSON, json.dumps(value).encode()))
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"the result must be JSON: {error}.") from None
