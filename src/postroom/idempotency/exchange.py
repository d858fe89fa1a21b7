"""One request with a key, from claim to answer, for event loops and threads alike.

`opening` and `closing` are generators: they yield what is to be done (`Do` a flow, `Pause`, `Call`
a function) and `drive` or `drive_async` does it. The rule: nothing is carried out without a claim,
and no byte of an answer leaves before it is written down. What breaks in from outside (a task is
cancelled, a signal raises) is told to the steps too: a claim is given back, an answer is written.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from postroom import failpoints, signals
from postroom.errors import ConfigurationError, PostroomError, Unreachable
from postroom.flow import Flow
from postroom.idempotency import store
from postroom.idempotency.policy import NotDone, Policy
from postroom.idempotency.rules import (
    Answer,
    Claim,
    Doubtful,
    Mine,
    Name,
    Replay,
    Running,
    Verdict,
    answer_of,
    bodiless,
    checked_answer,
    kept_headers,
    sent_elsewhere,
    storable,
)
from postroom.worker.waiting import finish

if TYPE_CHECKING:
    from postroom.idempotency.engines import Engines

__all__ = [
    "Asked",
    "closing",
    "drive",
    "drive_async",
    "for_storing",
    "giving_up",
    "opening",
    "tell_doubt",
]

T = TypeVar("T")
PAUSE_SECONDS = 0.02
LONGEST_PAUSE_SECONDS = 1.0
AGAIN_SECONDS = 0.1
RESUMED_AFTER_SECONDS = 5.0  # by a Finisher, when a run has answered 500 or more


@dataclass(frozen=True, slots=True)
class Asked:
    """A request with a key: what it is called, what it says, and how it is treated."""

    name: Name
    fingerprint: str
    policy: Policy
    request: bytes | None = None
    path: str = ""  # as the client has it


@dataclass(frozen=True, slots=True)
class Do:
    """A flow on a connection of our own; made anew if it must be tried again."""

    make: Callable[[], Flow[Any]]
    whole: bool = False  # whoever is cancelled meanwhile waits for what comes of it


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Call:
    """Call a function of the user's, which may be async."""

    function: Callable[..., Any]
    argument: Name


@dataclass(frozen=True, slots=True)
class Afterwards:
    """A claim to give back when the database answers again; nobody waits for it."""

    name: Name
    owner: str


Steps: TypeAlias = Generator["Do | Pause | Call | Afterwards", Any, T]


def drive(steps: Steps[T], engines: Engines) -> T:
    """Do what the steps ask for, in a thread."""
    answer: Any = None
    trouble: BaseException | None = None
    try:
        while True:
            step = steps.send(answer) if trouble is None else steps.throw(trouble)
            trouble = None
            if isinstance(step, Do):
                try:
                    answer = engines.ask(step.make)
                except BaseException as error:
                    trouble = error
            elif isinstance(step, Pause):
                time.sleep(step.seconds)
                answer = None
            elif isinstance(step, Afterwards):
                engines.afterwards.in_thread(step.name, step.owner)
            else:
                try:
                    answer = step.function(step.argument)
                except Exception as error:
                    _unverified(step.argument, type(error).__name__, error)
                    answer = None
                if inspect.isawaitable(answer):
                    raise ConfigurationError("verify is async, and this application is not.")
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    finally:
        steps.close()


async def drive_async(steps: Steps[T], engines: Engines) -> T:
    """The same in an event loop."""
    answer: Any = None
    trouble: BaseException | None = None
    try:
        while True:
            step = steps.send(answer) if trouble is None else steps.throw(trouble)
            trouble = None
            if isinstance(step, Do):
                try:
                    asking = engines.ask_async(step.make)
                    answer = await (finish(asking) if step.whole else asking)
                except BaseException as error:
                    trouble = error
            elif isinstance(step, Pause):
                await asyncio.sleep(step.seconds)
                answer = None
            elif isinstance(step, Afterwards):
                engines.afterwards.in_loop(step.name, step.owner)
            else:
                try:
                    answer = step.function(step.argument)
                    if inspect.isawaitable(answer):
                        answer = await answer
                except Exception as error:
                    _unverified(step.argument, type(error).__name__, error)
                    answer = None
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    finally:
        steps.close()


def _unverified(name: Name, why: str, cause: Exception | None = None) -> None:
    """Whoever could tell does not answer, or not so that it helps: the doubt stays."""
    signals.emit(
        "key.unverified", cause, operation=name.operation, idempotency_key=name.key, error=why
    )


def opening(asked: Asked) -> Steps[Verdict]:
    """Claim the key; wait for whoever is at it as long as the policy says; end a doubt."""
    policy, pause = asked.policy, PAUSE_SECONDS
    until = time.monotonic() + (policy.wait_seconds or 0)
    verified = False
    owner = store.new_owner()
    while True:
        failpoints.hit("key.claim.before")
        verdict: Verdict = yield from _claimed(asked, owner)
        failpoints.hit("key.claim.after")
        if isinstance(verdict, Running) and (left := until - time.monotonic()) > 0:
            yield Pause(min(pause, left))
            pause = min(pause * 2, LONGEST_PAUSE_SECONDS)
            continue
        if isinstance(verdict, Doubtful):
            if verdict.lost:
                tell_doubt(asked.name, "the process that had it was lost")
            if policy.verify is not None and not verified:
                verified = True
                found = yield from _verified(asked, verdict)
                if isinstance(found, Answer):
                    return Replay(found)
                if found:
                    continue
        return verdict


def _claimed(asked: Asked, owner: str) -> Steps[Verdict]:
    """Claim it; a claim that was asked for in vain is undone when the database answers again."""
    external, refuses = asked.policy.mode == "external", asked.policy.on_unreachable == "refuse"
    sent = False
    verdict: Verdict | None = None

    def claim() -> Flow[Verdict]:
        nonlocal sent, verdict
        sent, verdict = True, None  # on a connection: what cannot be opened has taken nothing
        verdict = yield from _claim(asked, owner)
        return verdict

    try:
        return (yield from _again(claim, whole=True))
    except (PostroomError, GeneratorExit) as error:
        # What runs without its key, and what has points behind it, is better held than free.
        if isinstance(error, Unreachable) and sent and external and refuses:
            yield Afterwards(asked.name, owner)
        raise
    except BaseException:  # its caller was broken off, and nothing has begun
        if isinstance(verdict, Mine):
            with suppress(PostroomError):  # or its lease will end by itself
                yield from _given_back(verdict)
        elif verdict is None and sent and external:
            yield Afterwards(asked.name, owner)
        raise


def _given_back(mine: Mine) -> Steps[None]:
    """Free again. What stands behind its points is done, so a Finisher may go on with the rest."""
    delay = None if mine.recovery_point is None else 0.0
    why = "it was never begun"
    yield Do(lambda: store.fail(mine.claim, why, keep_seconds=0, delay_seconds=delay), whole=True)


def _again(make: Callable[[], Flow[T]], *, whole: bool = False) -> Steps[T]:
    """Do it once more if it failed: its reply may have been lost. The owner's token tells whether
    what stands there then is our own."""
    try:
        return (yield Do(make, whole))  # type: ignore[no-any-return]
    except PostroomError:
        yield Pause(AGAIN_SECONDS)
        return (yield Do(make, whole))  # type: ignore[no-any-return]


def _written(make: Callable[[], Flow[bool]]) -> Steps[bool]:
    """The same for what has been carried out: whatever breaks in comes after it."""
    try:
        return (yield from _again(make))
    except (PostroomError, GeneratorExit):
        raise
    except BaseException:
        with suppress(PostroomError):
            yield Do(make)
        raise


def _claim(asked: Asked, owner: str) -> Flow[Verdict]:
    policy = asked.policy
    return store.claim(
        asked.name,
        asked.fingerprint,
        policy.mode,
        keep_seconds=policy.keep_seconds,
        lease_seconds=None if policy.mode == "same_transaction" else policy.lease_seconds,
        request=asked.request,
        owner=owner,
    )


def _verified(asked: Asked, doubt: Doubtful) -> Steps[Answer | bool]:
    """Ask `verify`: the answer that was given, or whether the request may be claimed anew."""
    policy = asked.policy
    assert policy.verify is not None
    found = yield Call(policy.verify, asked.name)
    if found is None:
        return False
    not_done = found is NotDone or isinstance(found, NotDone)
    said = None if not_done else _whole(found)
    if isinstance(said, str):
        _unverified(asked.name, said)
        return False
    answer = None if said is None else for_storing(said, policy)
    settled = yield Do(
        lambda: store.settle(
            asked.name,
            doubt.epoch,
            answer,
            why="verified: it was not done" if answer is None else None,
            keep_seconds=policy.keep_seconds,
        )
    )
    if answer is None or not settled:
        return True  # claim again, and see
    return answer


def _whole(found: Any) -> Answer | str:
    """The answer that a function of the user's has found, or what is wrong with it."""
    if not isinstance(found, Answer):
        return f"verify returned {type(found).__name__}; it may return an Answer, NotDone or None"
    try:
        return checked_answer(found)
    except ConfigurationError as error:
        return f"verify returned what cannot be sent: {error}"


def for_storing(answer: Answer, policy: Policy) -> Answer:
    """An answer as it is kept: allowed headers, and a body up to the limit, where there is one."""
    headers = kept_headers(answer.headers, policy.stored_headers)
    body = b"" if bodiless(answer.status) else answer.body
    kept = Answer(answer.status, headers, body, answer.absent)
    if kept.absent is None and len(kept.body) > policy.most_stored_bytes:
        return kept.without_body("too_large")
    return kept


def closing(
    asked: Asked, mine: Mine, answer: Answer, *, kept: bool = True
) -> Steps[Replay | Doubtful | None]:
    """Write the answer down. None: it stands, and may be sent; else what stands in its place.

    Not `kept`: the request was refused before anything began, and its key is free again.
    """
    policy, claim = asked.policy, mine.claim
    failpoints.hit("key.finish.before")
    if not kept and answer.status >= 400:
        done = yield from _written(
            lambda: store.fail(claim, "refused before it began", keep_seconds=0)
        )
    elif storable(answer.status) and not sent_elsewhere(answer, asked.path):
        stored = for_storing(answer, policy)
        done = yield from _written(
            lambda: store.finish(claim, stored, keep_seconds=policy.keep_seconds)
        )
    elif answer.status >= 500 and policy.mode == "external" and policy.on_error == "doubt":
        done = yield from giving_up(asked, mine, f"answered {answer.status}")
    else:
        # Nothing was done, and strangers must not fill the table; a server's error is remembered.
        # What a run itself has refused is its client's to try again, and no Finisher's.
        broken = answer.status >= 500
        why, keep = f"answered {answer.status}", policy.keep_seconds if broken else 0
        delay = RESUMED_AFTER_SECONDS if policy.mode == "resume" and broken else None
        done = yield from _written(
            lambda: store.fail(claim, why, keep_seconds=keep, delay_seconds=delay)
        )
    failpoints.hit("key.finish.after")
    record = None if done else (yield Do(lambda: store.look(asked.name)))
    if record is not None and (record.owner, record.epoch) == (claim.owner, claim.epoch):
        done = record.status in ("completed", "failed")  # by ourselves: only the reply was lost
    if done:
        signals.emit(
            "key.executed",
            operation=asked.name.operation,
            mode=policy.mode,
            status=answer.status,
            attempts=mine.attempts,
        )
        return None
    signals.emit(
        "key.lost", operation=asked.name.operation, idempotency_key=asked.name.key,
        epoch=claim.epoch,
    )  # fmt: skip
    if record is not None and record.status == "completed":
        return Replay(answer_of(record))
    return Doubtful(claim.epoch)


def giving_up(
    asked: Asked, mine: Mine, why: str, *, broken_off: bool = False, kept: bool = True
) -> Steps[bool]:
    """The work ended with an error: what it did is not known, unless the policy says so. Of
    what was broken off in the middle nobody can say so. Not `kept`: as in `closing`."""
    policy, claim = asked.policy, mine.claim
    if not kept:
        done = yield Do(lambda: store.fail(claim, "refused before it began", keep_seconds=0))
    elif policy.mode == "external" and (policy.on_error == "doubt" or broken_off):
        done = yield Do(lambda: store.doubt(claim, why))
        if done:
            tell_doubt(asked.name, why)
    else:
        done = yield Do(lambda: store.fail(claim, why, keep_seconds=policy.keep_seconds))
    return bool(done)


def beating(claim: Claim, lease_seconds: float) -> Steps[bool]:
    """Keep the lease; False: it is lost."""
    return bool((yield Do(lambda: store.beat(claim, lease_seconds))))


def may_run_without(asked: Asked, error: PostroomError) -> bool:
    """Whether the policy lets a request run while its key cannot be written down."""
    if asked.policy.on_unreachable != "run" or not isinstance(error, Unreachable):
        return False
    signals.emit("key.unprotected", operation=asked.name.operation, error=str(error))
    return True


def tell_doubt(name: Name, why: str) -> None:
    """Somebody must find out: `verify`, or a person."""
    signals.emit("key.indeterminate", operation=name.operation, idempotency_key=name.key, error=why)
