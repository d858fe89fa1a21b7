"""Django: a middleware for views that work outside of the database, and a decorator for those whose
record, change, messages and answer are one commit.

    MIDDLEWARE = [..., "postroom.idempotency.django.IdempotencyMiddleware"]
    POSTROOM = {"keys": "shop.keys.keys"}      # a Keys, or a function that makes one

    @idempotent(keys, Policy(required=True), using="default")
    def place(request): ...
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from django.conf import settings
from django.db import connections, transaction
from django.http import HttpResponse
from django.utils.decorators import sync_and_async_middleware
from django.utils.module_loading import import_string

from postroom.databases.trouble import is_conflict
from postroom.errors import ConfigurationError, PostroomError, PublishError, WrongCall
from postroom.idempotency import problems
from postroom.idempotency.borrowed import TRIES, Borrowed
from postroom.idempotency.exchange import (
    Asked,
    closing,
    drive,
    drive_async,
    may_run_without,
    opening,
)
from postroom.idempotency.keys import Keys, Seen, asked_of
from postroom.idempotency.leases import kept_in_loop
from postroom.idempotency.policy import Policy
from postroom.idempotency.rules import Answer, Mine, Running, Verdict, storable
from postroom.idempotency.telling import (
    give_up,
    give_up_async,
    refused,
    tell_replay,
    tell_unprotected,
)
from postroom.idempotency.turn import Turn

__all__ = ["IdempotencyMiddleware", "idempotent"]

F = TypeVar("F", bound=Callable[..., Any])
STATE = "postroom_idempotency"


def keys_of_settings() -> Keys:
    """What `keys` of POSTROOM names."""
    named = getattr(settings, "POSTROOM", {}).get("keys")
    if named is None:
        raise ConfigurationError("set POSTROOM['keys'] to where your Keys are: 'shop.keys.keys'.")
    found = import_string(named) if isinstance(named, str) else named
    found = found if isinstance(found, Keys) else found()
    if not isinstance(found, Keys):
        raise ConfigurationError("POSTROOM['keys'] must name a Keys, or a function that makes one.")
    return found


@sync_and_async_middleware  # type: ignore[untyped-decorator]
def IdempotencyMiddleware(get_response: Callable[..., Any]) -> Callable[..., Any]:
    """One request, one effect; `external` policies only: a view in one transaction is decorated."""
    keys = keys_of_settings()
    if inspect.iscoroutinefunction(get_response):
        under_way: set[asyncio.Task[Any]] = set()

        async def middleware_async(request: Any) -> Any:
            asked = _asked(keys, request)
            if not isinstance(asked, Asked):
                return await get_response(request) if asked is None else _response(asked)
            try:
                verdict = await drive_async(opening(asked), keys.engines)
            except PostroomError as error:
                if may_run_without(asked, error):
                    setattr(request, STATE, Turn(asked))
                    return await get_response(request)
                return _response(refused(asked, error))
            if not isinstance(verdict, Mine):
                return _say(asked, verdict)
            # In a task of its own: a client that hangs up does not end it.
            task = asyncio.ensure_future(carry_out(request, asked, verdict))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
            return await asyncio.shield(task)

        async def carry_out(request: Any, asked: Asked, mine: Mine) -> Any:
            setattr(request, STATE, turn := Turn(asked))
            try:
                with kept_in_loop(asked, mine.claim, keys.engines):
                    response = await get_response(request)
            except BaseException as error:
                await give_up_async(asked, mine, error, keys.engines)
                raise
            try:
                steps = closing(asked, mine, _answer(response), kept=turn.kept)
                instead = await drive_async(steps, keys.engines)
            except PostroomError as error:
                tell_unprotected(asked, error)
                return response
            return response if instead is None else _say(asked, instead)

        return middleware_async

    def middleware(request: Any) -> Any:
        asked = _asked(keys, request)
        if not isinstance(asked, Asked):
            return get_response(request) if asked is None else _response(asked)
        try:
            verdict = drive(opening(asked), keys.engines)
        except PostroomError as error:
            if may_run_without(asked, error):
                setattr(request, STATE, Turn(asked))
                return get_response(request)
            return _response(refused(asked, error))
        if not isinstance(verdict, Mine):
            return _say(asked, verdict)
        setattr(request, STATE, turn := Turn(asked))
        with keys.beats.kept(asked, verdict.claim):
            try:
                response = get_response(request)
            except BaseException as error:
                give_up(asked, verdict, error, keys.engines)
                raise
            try:
                steps = closing(asked, verdict, _answer(response), kept=turn.kept)
                instead = drive(steps, keys.engines)
            except PostroomError as error:
                tell_unprotected(asked, error)
                return response
        return response if instead is None else _say(asked, instead)

    return middleware


def idempotent(
    keys: Keys, policy: Policy | None = None, *, using: str = "default"
) -> Callable[[F], F]:
    """Carry the view out once for each key, in one transaction of the database `using`."""
    chosen = replace(policy or Policy(), mode="same_transaction")

    def decorate(view: F) -> F:
        if inspect.iscoroutinefunction(view):
            raise ConfigurationError(
                "Django has no transactions in async views: decorate a sync view, which Django "
                "runs in a thread."
            )

        @functools.wraps(view)
        def wrapper(request: Any, *args: Any, **kwargs: Any) -> Any:
            if connections[using].in_atomic_block:
                raise WrongCall(
                    "a view with idempotent() has its own transaction: take it out of "
                    "ATOMIC_REQUESTS with transaction.non_atomic_requests"
                )
            match = request.resolver_match
            route = f"/{match.route}" if match is not None else request.path
            asked = _asked_by(keys, request, f"{request.method} {route}"[:255], chosen)
            if isinstance(asked, Answer):
                return _response(asked)
            lent = _Atomic(using, asked)
            return lent.around(lambda: view(request, *args, **kwargs), _answer, _response)

        # Its own transaction, whatever ATOMIC_REQUESTS says.
        return transaction.non_atomic_requests(using=using)(wrapper)  # type: ignore[no-any-return]

    return decorate


class _Atomic(Borrowed):
    """Django's connection of an alias, in a transaction that we begin and end."""

    def __init__(self, using: str, asked: Asked | None) -> None:
        super().__init__(connections[using], asked)
        self._using = using

    def around(self, view: Any, read: Any, say: Any) -> Any:
        for attempt in range(1, TRIES + 1):
            began = False
            try:
                with transaction.atomic(using=self._using):
                    mine = self.claim()
                    if mine is not None and not isinstance(mine, Mine):
                        assert self.asked is not None
                        return _say(self.asked, mine)
                    began = True
                    response = view()
                    answer = read(response)
                    if answer.status >= 400:
                        raise _Undo
                    if isinstance(mine, Mine):
                        self.finish(mine, answer)
                return response
            except _Undo:
                self._keep_refusal(answer)
                return response
            except Exception as error:
                if began or self.asked is None or isinstance(error, PublishError):
                    raise
                if not is_conflict(error):
                    return say(refused(self.asked, error))
                if self.asked.policy.wait_seconds is not None or attempt == TRIES:
                    return _say(self.asked, Running(1.0))
        raise AssertionError("unreachable")

    def claim(self) -> Verdict | None:
        """As above; a conflict ends the atomic block, and another begins."""
        return None if self.asked is None else self._run(self._claiming(self.asked))

    def _keep_refusal(self, answer: Answer) -> None:
        if self.asked is None or not storable(answer.status):
            return
        with transaction.atomic(using=self._using):
            if isinstance(mine := self.claim(), Mine):
                self.finish(mine, answer)

    def roll_back(self) -> None:
        """The atomic block does."""


class _Undo(Exception):
    """Leaves an atomic block without its changes."""


def _asked(keys: Keys, request: Any) -> Asked | Answer | None:
    setattr(request, STATE, Turn(None))
    found = keys.find(request.method, request.path_info)
    if found is None or found[1].mode != "external":
        return None
    return _asked_by(keys, request, *found)


def _asked_by(keys: Keys, request: Any, operation: str, policy: Policy) -> Asked | Answer | None:
    body = request.body
    if len(body) > policy.most_request_bytes:
        return problems.too_large(policy.most_request_bytes)
    headers = [(name.lower(), value) for name, value in request.headers.items()]
    query = request.META.get("QUERY_STRING", "")
    seen = Seen(request.method, request.path_info, query, headers, body)
    who = keys.scope(request)
    return None if who is None else asked_of(seen, operation, policy, who)


def _answer(response: Any) -> Answer:
    headers = tuple(response.headers.items())
    if getattr(response, "streaming", False):
        return Answer(response.status_code, headers).without_body("streamed")
    if hasattr(response, "render") and not response.is_rendered:
        response.render()
    return Answer(response.status_code, headers, response.content)


def _say(asked: Asked, verdict: Verdict) -> Any:
    assert not isinstance(verdict, Mine)
    tell_replay(asked, verdict)
    return _response(problems.answer_to(verdict, asked.policy))


def _response(answer: Answer) -> Any:
    response = HttpResponse(answer.body, status=answer.status)
    del response.headers["Content-Type"]
    for name, value in answer.headers:
        response.headers[name] = value
    return response
