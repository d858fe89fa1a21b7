"""Django: a middleware for views that work outside of the database, and a decorator for those whose
record, change, messages and answer are one commit.

    MIDDLEWARE = [..., "postroom.idempotency.django.IdempotencyMiddleware"]
    POSTROOM = {"keys": "shop.keys.keys"}      # a Keys, or a function that makes one

    @idempotent(keys, Policy(required=True), using="default")
    def place(request): ...
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from asgiref.sync import sync_to_async
from django.conf import settings
from django.core.exceptions import BadRequest, RequestDataTooBig, SuspiciousOperation
from django.core.files.uploadhandler import MemoryFileUploadHandler, TemporaryFileUploadHandler
from django.core.handlers.exception import response_for_exception
from django.db import connections, transaction
from django.http import Http404, HttpResponse
from django.http.multipartparser import MultiPartParserError
from django.http.request import RawPostDataException
from django.urls import Resolver404, resolve
from django.utils.decorators import sync_and_async_middleware
from django.utils.module_loading import import_string

from postroom import failpoints
from postroom.databases.trouble import is_conflict, waited_too_long
from postroom.errors import ConfigurationError, PostroomError, PublishError, WrongCall
from postroom.idempotency import problems
from postroom.idempotency.borrowed import Borrowed
from postroom.idempotency.exchange import (
    Asked,
    closing,
    drive,
    drive_async,
    may_run_without,
    opening,
)
from postroom.idempotency.forms import FILES, comparable, held_by
from postroom.idempotency.keys import Keys, Seen, asked_of, needs_body
from postroom.idempotency.leases import kept_in_loop
from postroom.idempotency.policy import SAFE_METHODS, Policy
from postroom.idempotency.rules import TRIES, Answer, Mine, Running, Verdict
from postroom.idempotency.telling import (
    give_up,
    give_up_async,
    refused,
    tell_replay,
    tell_unprotected,
)
from postroom.idempotency.turn import Turn, refuse_twice

__all__ = ["IdempotencyMiddleware", "idempotent"]

F = TypeVar("F", bound=Callable[..., Any])
STATE = "postroom_idempotency"
_DECORATED = "postroom_has_its_key"
_THEIR_LIMIT = "DATA_UPLOAD_MAX_MEMORY_SIZE"


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
            asked = await _asked_async(keys, request)
            if not isinstance(asked, Asked):
                return await get_response(request) if asked is None else _response(asked)
            # In a task of its own, from the claim on: a client that hangs up does not end it.
            task = asyncio.ensure_future(claim(request, asked))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
            return await asyncio.shield(task)

        async def claim(request: Any, asked: Asked) -> Any:
            try:
                verdict = await drive_async(opening(asked), keys.engines)
            except PostroomError as error:
                if may_run_without(asked, error):
                    setattr(request, STATE, Turn(asked))
                    return await get_response(request)
                return _response(refused(asked, error))
            if isinstance(verdict, Mine):
                return await carry_out(request, asked, verdict)
            return _say(asked, verdict)

        async def carry_out(request: Any, asked: Asked, mine: Mine) -> Any:
            setattr(request, STATE, turn := Turn(asked))
            try:
                with kept_in_loop(asked, mine.claim, keys.engines):
                    response = await get_response(request)
            except BaseException as error:
                await give_up_async(asked, mine, error, keys.engines, kept=turn.kept)
                raise
            try:
                steps = closing(asked, mine, _answer(response), kept=turn.kept)
                instead = await drive_async(steps, keys.engines)
            except PostroomError as error:
                tell_unprotected(asked, error)
                return response
            return response if instead is None else _say(asked, instead)

        return middleware_async

    keys.for_threads()

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
                give_up(asked, verdict, error, keys.engines, kept=turn.kept)
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
    keys.for_decorator()

    def decorate(view: F) -> F:
        if inspect.iscoroutinefunction(view):
            raise ConfigurationError(
                "Django has no transactions in async views: decorate a sync view, which Django "
                "runs in a thread."
            )

        @functools.wraps(view)
        def wrapper(request: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(turn := getattr(request, STATE, None), Turn) and turn.asked:
                raise WrongCall(
                    "the middleware has claimed this request already: take its route out of the "
                    "policies of the middleware, or put the decorator outermost on the view"
                )
            if _in_their_transaction(connections[using]):
                raise WrongCall(
                    "a view with idempotent() has its own transaction: take it out of "
                    "ATOMIC_REQUESTS with transaction.non_atomic_requests"
                )
            asked = _asked_in_view(keys, request, policy)
            if isinstance(asked, Answer):
                return _response(asked)
            lent = _Atomic(using, asked)
            return lent.around(lambda: _called(view, request, args, kwargs), _answer, _response)

        setattr(wrapper, _DECORATED, True)
        # Its own transaction, whatever ATOMIC_REQUESTS says.
        return transaction.non_atomic_requests(using=using)(wrapper)  # type: ignore[no-any-return]

    return decorate


def _asked_in_view(keys: Keys, request: Any, policy: Policy | None) -> Asked | Answer | None:
    """The request with its key, or what is wrong with it; what only looks has none."""
    if request.method in SAFE_METHODS:
        return None
    match = request.resolver_match
    route = f"/{match.route}" if match is not None else request.path
    chosen = keys.policy_in(request.method, request.path_info, policy)
    return _asked_by(keys, request, f"{request.method} {route}"[:255], chosen)


def _called(view: Any, request: Any, args: Any, kwargs: Any) -> Any:
    """What the view answers; Http404 is an answer too, as Django would give it."""
    try:
        return view(request, *args, **kwargs)
    except (Http404, BadRequest) as refusal:
        return response_for_exception(request, refusal)


class _Atomic(Borrowed):
    """Django's connection of an alias, in a transaction that we begin and end."""

    def __init__(self, using: str, asked: Asked | None) -> None:
        super().__init__(connections[using], asked)
        self._using = using
        self._committed = False

    def around(self, view: Any, read: Any, say: Any) -> Any:
        for attempt in range(1, TRIES + 1):
            began, self._committed = False, False
            try:
                with transaction.atomic(using=self._using):
                    mine = self.claim()
                    if mine is not None and not isinstance(mine, Mine):
                        assert self.asked is not None
                        return _say(self.asked, mine)
                    began = True
                    self._note_commit()
                    response = view()
                    answer = read(response)
                    if answer.status >= 400:
                        raise _Undo
                    if isinstance(mine, Mine):
                        self.finish(mine, answer)
                    failpoints.hit("key.commit.before")
                failpoints.hit("key.commit.after")
                self.tell_executed(mine, answer)
                return response
            except _Undo:
                theirs = self._keep_refusal(answer)
                return response if theirs is None else say(problems.replayed(theirs))
            except Exception as error:
                if self._committed:  # the error is of a hook, and the record stands
                    self.tell_executed(mine, answer)
                    raise
                if began and is_conflict(error):  # nothing of it is left
                    return say(problems.conflict())
                if began or self.asked is None or isinstance(error, PublishError):
                    raise
                if waited_too_long(error):
                    return _say(self.asked, Running(1.0))
                if not is_conflict(error):
                    return say(refused(self.asked, error))
                if attempt == TRIES:
                    return _say(self.asked, Running(1.0))
        raise AssertionError("unreachable")

    def _note_commit(self) -> None:
        """Before the hooks of the view run: what they raise undoes nothing. Within a TestCase there
        is no commit, and whoever counts hooks there shall find those of the view."""

        def note() -> None:
            self._committed = True

        if len(self.tx.atomic_blocks) == 1:
            transaction.on_commit(note, using=self._using)

    def claim(self) -> Verdict | None:
        """As above; a conflict ends the atomic block, and another begins."""
        return None if self.asked is None else self._run(self._claiming(self.asked))

    def _write_refusal(self, answer: Answer) -> Verdict | None:
        with transaction.atomic(using=self._using):
            if isinstance(mine := self.claim(), Mine):
                self.finish(mine, answer)
                failpoints.hit("key.refusal.before")
        failpoints.hit("key.refusal.after")
        return mine

    def roll_back(self) -> None:
        """The atomic block does."""


def _in_their_transaction(connection: Any) -> bool:
    """As Django's own `durable` sees it: the blocks of its TestCase do not count."""
    return any(not getattr(block, "_from_testcase", False) for block in connection.atomic_blocks)


class _Undo(Exception):
    """Leaves an atomic block without its changes."""


def _asked(keys: Keys, request: Any) -> Asked | Answer | None:
    found = _found(keys, request)
    return None if found is None else _asked_by(keys, request, *found)


async def _asked_async(keys: Keys, request: Any) -> Asked | Answer | None:
    """The same where `scope` may be async; one that is not may look its user up in a thread."""
    found = _found(keys, request)
    if found is None:
        return None
    seen = _seen(request, found[1])
    if isinstance(seen, Answer):
        return seen
    if inspect.iscoroutinefunction(keys.scope):
        who = await keys.whose_async(request)
    else:
        who = await sync_to_async(keys.whose)(request)
    return asked_of(seen, *found, who)


def _found(keys: Keys, request: Any) -> tuple[str, Policy] | None:
    if (earlier := getattr(request, STATE, None)) is not None:
        refuse_twice(earlier, earlier.asked)
    setattr(request, STATE, Turn(None))
    found = keys.find(request.method, request.path_info)
    if found is None:
        return None
    try:
        view = resolve(request.path_info, getattr(request, "urlconf", None)).func
    except Resolver404:
        return found if found[1].mode == "external" else None
    if _claims_itself(view, request.method):
        return None
    if found[1].mode == "same_transaction":
        raise ConfigurationError(
            f'{found[0]} has a policy with mode="same_transaction", and its view is not decorated: '
            "put @idempotent(keys) on the view, or take another mode."
        )
    return found if found[1].mode == "external" else None


def _claims_itself(view: Any, method: str) -> bool:
    """Whether it is decorated, or the method of its class that answers the request."""
    answers = getattr(getattr(view, "view_class", None), method.lower(), None)
    return getattr(view, _DECORATED, False) or getattr(answers, _DECORATED, False)


def _asked_by(keys: Keys, request: Any, operation: str, policy: Policy) -> Asked | Answer | None:
    seen = _seen(request, policy)
    if isinstance(seen, Answer):
        return seen
    return asked_of(seen, operation, policy, keys.whose(request))


def _seen(request: Any, policy: Policy) -> Seen | Answer:
    """The request, or what is wrong with its body: that is read only where a key may be, and only
    up to the limit, and half of one is nobody's request."""
    headers = [(name.lower(), value) for name, value in request.headers.items()]
    query = request.META.get("QUERY_STRING", "")
    root = request.path[: -len(request.path_info)] if request.path_info else ""
    seen = Seen(request.method, request.path_info, query, headers, root=root)
    if not needs_body(policy, seen):
        return seen
    limit, length = policy.most_request_bytes, request.META.get("CONTENT_LENGTH") or ""
    if length.isdecimal() and int(length) > limit:
        return problems.too_large(limit)
    announced = int(length) if length.isdecimal() else 0
    request = getattr(request, "_request", request)  # Django REST framework wraps it
    try:
        body = request.body
    except RequestDataTooBig:
        return problems.too_large(settings.DATA_UPLOAD_MAX_MEMORY_SIZE, _THEIR_LIMIT)
    except RawPostDataException:  # parsed as a form, or read by somebody
        return replace(
            seen, body=comparable(b"", _form(request), announced or 1, _form_type(request))
        )
    if len(body) < announced:
        return problems.incomplete()
    if len(body) > limit:
        return problems.too_large(limit)
    return replace(seen, body=_form(request) or body)


def _form_type(request: Any) -> str:
    return request.headers.get("Content-Type", "") if request.content_type == FILES else ""


def _form(request: Any) -> bytes:
    """What a form with files holds; others keep their bytes. It is parsed on a copy, since how
    uploads are handled is the view's to say until somebody has parsed it."""
    if request.content_type != FILES:
        return b""
    if not hasattr(request, "_post"):
        request = copy.copy(request)
        request.upload_handlers = [
            MemoryFileUploadHandler(request),
            TemporaryFileUploadHandler(request),
        ]
    try:
        return held_by(request.POST, request.FILES)
    except (BadRequest, MultiPartParserError, SuspiciousOperation):  # the view will be told so
        return b""


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
