"""A plain function carried out once for each key: `@idempotent`, sync and async.

    @idempotent("charge", key="payment", tx="session")
    def charge(session, payment, amount): ...

With `tx` its record, its effects and its result are one transaction, which the caller commits. With
`keys` it may change something outside of the database: a claim with a lease stands before it. The
result must be JSON, and comes back as JSON says it, the first time too.
"""

from __future__ import annotations

import functools
import inspect
import json
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from postroom.calling import is_async, must_have_run
from postroom.databases.caller import carry_out, carry_out_async
from postroom.databases.trouble import waited_too_long
from postroom.errors import (
    BadKey,
    ConfigurationError,
    KeyInDoubt,
    KeyInProgress,
    KeyReused,
    PostroomError,
    ResultNotKept,
    WrongCall,
)
from postroom.flow import Flow
from postroom.idempotency import store
from postroom.idempotency.arguments import fingerprint_of, member
from postroom.idempotency.exchange import (
    Asked,
    Do,
    Steps,
    closing,
    drive,
    drive_async,
    for_storing,
    opening,
)
from postroom.idempotency.leases import kept_in_loop
from postroom.idempotency.policy import Policy
from postroom.idempotency.rules import (
    Answer,
    Claim,
    Doubtful,
    Mine,
    Name,
    Other,
    Replay,
    Running,
    Verdict,
    checked_key,
    scope_name,
)
from postroom.idempotency.savepoints import Savepoint
from postroom.idempotency.telling import give_up, give_up_async, tell_unprotected
from postroom.worker.waiting import finish

if TYPE_CHECKING:
    from postroom.idempotency.engines import Engines
    from postroom.idempotency.keys import Keys

__all__ = ["idempotent", "key_of_call", "refuse", "result_of"]

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
JSON = (("content-type", "application/json"),)
_WHAT = "record of this request"
_INSTEAD = "Return its result: if it is async, write it and what wraps it with `async def`."


def idempotent(
    operation: str,
    *,
    key: str | Callable[..., Any],
    tx: str | None = None,
    keys: Keys | None = None,
    policy: Policy | None = None,
    scope: str | Callable[..., Any] | None = None,
    compare: Sequence[str] | None = None,
) -> Callable[[F], F]:
    """Carry the function out once for each key.

    `key` and `scope` name an argument, or are called with all of them; `compare` names those that
    make it the same call, else all but `tx` and the key. `tx` names the session or connection. All
    but `tx` may name a member too: `compare=["order.id"]`.
    """
    if (tx is None) == (keys is None):
        raise ConfigurationError("idempotent needs tx= (your session) or keys= (Keys), not both.")
    chosen = policy or Policy()
    if tx is not None:
        chosen = replace(chosen, mode="same_transaction")
    elif chosen.mode != "external":
        raise ConfigurationError('idempotent with keys= is for policies with mode="external".')

    def decorate(function: F) -> F:
        call = _Call(function, operation, key, tx, keys, chosen, scope, compare)

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return call.run(args, kwargs)

        @functools.wraps(function)
        async def wrapper_async(*args: Any, **kwargs: Any) -> Any:
            return await call.run_async(args, kwargs)

        # What a wrapper around an async function gives nobody can see before it is called.
        asynchronous = is_async(function, wrapped=False)
        return wrapper_async if asynchronous else wrapper  # type: ignore[return-value]

    return decorate


class _Call:
    """A decorated function."""

    def __init__(
        self,
        function: Callable[..., Any],
        operation: str,
        key: str | Callable[..., Any],
        tx: str | None,
        keys: Keys | None,
        policy: Policy,
        scope: str | Callable[..., Any] | None,
        compare: Sequence[str] | None,
    ) -> None:
        self.function = function
        self.operation = operation
        self.policy = policy
        self.keys = keys
        self._key, self._tx, self._scope, self._compare = key, tx, scope, compare
        self._signature = inspect.signature(function)
        members = [each for each in (key, scope, *(compare or ())) if isinstance(each, str)]
        for name in (tx, *(each.partition(".")[0] for each in members)):
            if name is not None and name not in self._signature.parameters:
                called = getattr(function, "__qualname__", None) or repr(function)
                raise ConfigurationError(f"{called} has no argument {name!r}.")

    def run(self, args: Any, kwargs: Any) -> Any:
        tx, asked = self._asked(args, kwargs)
        if tx is not None:
            return self._inside(tx, asked, args, kwargs)
        assert self.keys is not None
        engines = self.keys.engines
        verdict = drive(opening(asked), engines)
        if not isinstance(verdict, Mine):
            return result_of(verdict, asked)
        try:
            with self.keys.beats.kept(asked, verdict.claim):
                result = self.function(*args, **kwargs)
        except BaseException as error:
            give_up(asked, verdict, error, engines)
            raise
        try:
            must_have_run(result, self.function, _INSTEAD)
        except WrongCall as error:
            if _not_begun(result):
                with suppress(PostroomError):  # or its lease will end by itself
                    drive(_giving_back(verdict), engines)
            else:
                give_up(asked, verdict, error, engines)
            raise
        answer, unfit = _answer_or_none(result)
        try:
            ended = drive(closing(asked, verdict, answer), engines)
        except PostroomError as error:  # it was carried out; its lease will end by itself
            tell_unprotected(asked, error)
            ended = None
        if unfit is not None:
            raise unfit
        return json.loads(answer.body) if ended is None else result_of(ended, asked)

    async def run_async(self, args: Any, kwargs: Any) -> Any:
        tx, asked = self._asked(args, kwargs)
        if tx is not None:
            return await self._inside_async(tx, asked, args, kwargs)
        assert self.keys is not None
        engines = self.keys.engines
        verdict = await drive_async(opening(asked), engines)
        if not isinstance(verdict, Mine):
            return result_of(verdict, asked)
        try:
            with kept_in_loop(asked, verdict.claim, engines):
                result = await self.function(*args, **kwargs)
                must_have_run(result, self.function, _INSTEAD)
        except BaseException as error:
            await give_up_async(asked, verdict, error, engines)
            raise
        answer, unfit = _answer_or_none(result)
        ended = await finish(_closed(asked, verdict, answer, engines))
        if unfit is not None:
            raise unfit
        return json.loads(answer.body) if ended is None else result_of(ended, asked)

    def _inside(self, tx: Any, asked: Asked, args: Any, kwargs: Any) -> Any:
        """In the caller's transaction. If it raises it has left nothing there, its claim neither,
        whatever the caller then makes of the transaction."""

        def say(flow: Flow[T]) -> T:
            return carry_out(tx, flow, what=_WHAT, instead="an async function")

        owner = store.new_owner()
        try:
            mine = say(self._claim(asked, owner))
        except BaseException as error:
            if waited_too_long(error):
                raise _in_progress(asked.name) from error
            with suppress(Exception):
                say(_give_back(asked.name, owner))
            raise
        if not isinstance(mine, Mine):
            return result_of(mine, asked)
        savepoint = Savepoint(tx)
        try:
            savepoint.set()
            answer = self._answered(self.function(*args, **kwargs))
            say(self._finish(mine, answer))
            savepoint.release()
        except BaseException:
            if savepoint.undo():
                with suppress(Exception):
                    say(_give_back(asked.name, owner))
            raise
        finally:
            savepoint.leave()
        return json.loads(answer.body)

    async def _inside_async(self, tx: Any, asked: Asked, args: Any, kwargs: Any) -> Any:
        """The same in an event loop."""

        async def say(flow: Flow[T]) -> T:
            return await carry_out_async(tx, flow, what=_WHAT)

        owner = store.new_owner()
        try:
            mine = await say(self._claim(asked, owner))
        except BaseException as error:
            if waited_too_long(error):
                raise _in_progress(asked.name) from error
            with suppress(Exception):
                await say(_give_back(asked.name, owner))
            raise
        if not isinstance(mine, Mine):
            return result_of(mine, asked)
        savepoint = Savepoint(tx)
        try:
            await savepoint.set_async()
            answer = self._answered(await self.function(*args, **kwargs))
            await say(self._finish(mine, answer))
            await savepoint.release_async()
        except BaseException:
            if await savepoint.undo_async():
                with suppress(Exception):
                    await say(_give_back(asked.name, owner))
            raise
        finally:
            savepoint.leave()
        return json.loads(answer.body)

    def _answered(self, result: Any) -> Answer:
        must_have_run(result, self.function, _INSTEAD)
        return _answer(result)

    def _claim(self, asked: Asked, owner: str) -> Flow[Verdict]:
        keep, wait = self.policy.keep_seconds, self.policy.wait_seconds
        name, mode = asked.name, self.policy.mode
        claiming = store.claim(name, asked.fingerprint, mode, keep_seconds=keep, owner=owner)
        return store.patiently(claiming, wait)

    def _finish(self, mine: Mine, answer: Answer) -> Flow[None]:
        answer = for_storing(answer, self.policy)
        done = yield from store.finish(mine.claim, answer, keep_seconds=self.policy.keep_seconds)
        if not done:
            raise KeyInDoubt(
                "the record of this request is gone from its transaction, which was rolled back "
                "or committed inside the function: leave both to its caller"
            )

    def _asked(self, args: Any, kwargs: Any) -> tuple[Any, Asked]:
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        values = bound.arguments

        def found(named: str | Callable[..., Any]) -> Any:
            if isinstance(named, str):
                return member(values, named, self.operation)
            return named(*args, **kwargs)

        key = key_of_call(found(self._key), self.operation)
        who = "shared" if self._scope is None else found(self._scope)
        wanted = self._compare
        if wanted is None:
            wanted = [name for name in values if name not in (self._tx, self._key, self._scope)]
        compared = {name: member(values, name, self.operation) for name in wanted}
        digest = fingerprint_of(compared, self.operation)
        name = Name(scope_name(who), self.operation, key)
        asked = Asked(name, digest, self.policy)
        if self._tx is None:
            return None, asked
        if values[self._tx] is None:
            raise WrongCall(
                f"{self.operation} was called with {self._tx}=None: give the session or connection "
                "of your transaction"
            )
        return values[self._tx], asked


async def _closed(
    asked: Asked, mine: Mine, answer: Answer, engines: Engines
) -> Replay | Doubtful | None:
    try:
        return await drive_async(closing(asked, mine, answer), engines)
    except PostroomError as error:
        tell_unprotected(asked, error)
        return None


def _not_begun(result: Any) -> bool:
    """Whether no line of it has run; a task or a future has begun."""
    return inspect.iscoroutine(result) or inspect.isgenerator(result) or inspect.isasyncgen(result)


def _giving_back(mine: Mine) -> Steps[bool]:
    """Nothing was carried out: the key is free again."""
    return bool((yield Do(lambda: store.fail(mine.claim, "it was never begun", keep_seconds=0))))


def _give_back(name: Name, owner: str) -> Flow[None]:
    """Nothing of it is left: whoever commits, the key is free again."""
    record = yield from store.look(name)
    if record is not None and record.owner == owner:
        mine = Claim(name, owner, record.epoch)
        yield from store.fail(mine, "it raised an error, and was undone", keep_seconds=0)


def key_of_call(given: object, operation: str) -> str:
    """The key that a function was called with: text, or what names something as text does."""
    try:
        return checked_key(str(given) if _names(given) else given)
    except BadKey as error:
        raise BadKey(f"the key of {operation}: {error}.") from None


def _names(given: object) -> bool:
    """Whether it names something as text does; what is missing, None before all, does not."""
    return isinstance(given, int | uuid.UUID) and not isinstance(given, bool)


def _answer(value: Any) -> Answer:
    try:
        return Answer(200, JSON, json.dumps(value).encode())
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"the result must be JSON: {error}.") from None


def _answer_or_none(value: Any) -> tuple[Answer, ConfigurationError | None]:
    """It was carried out, whatever it returned: a tombstone stands for what is no JSON."""
    try:
        return _answer(value), None
    except ConfigurationError as error:
        return Answer(200, JSON).without_body("not_json"), error


def result_of(verdict: Verdict, asked: Asked) -> Any:
    """What was carried out before gave this; else why nothing was carried out."""
    if not isinstance(verdict, Replay):
        return refuse(verdict, asked.name)
    what, answer = f"{asked.name.operation} with key {asked.name.key!r}", verdict.answer
    if answer.absent is not None:
        why = "was no JSON" if answer.absent == "not_json" else "was too large to be kept"
        raise ResultNotKept(f"{what} was carried out; its result {why}")
    try:
        return json.loads(answer.body) if answer.body else None
    except ValueError:  # as a person has resolved it, or an `Answer` of its own
        raise ResultNotKept(
            f"{what} was carried out; what is kept of it is no JSON: look at it with "
            "`postroom keys show --body`"
        ) from None


def _in_progress(name: Name) -> KeyInProgress:
    what = f"{name.operation} with key {name.key!r}"
    return KeyInProgress(f"{what} is being carried out: try again in a while")


def refuse(verdict: Verdict, name: Name) -> NoReturn:
    """Raise what says why nothing was carried out."""
    what = f"{name.operation} with key {name.key!r}"
    if isinstance(verdict, Other):
        raise KeyReused(f"{what} was called before with other arguments: use a new key")
    if isinstance(verdict, Running):
        raise _in_progress(name)
    raise KeyInDoubt(
        f"whether {what} was carried out is not known: decide it with `postroom keys resolve`"
    )
