"""Flask: a view whose record, change, messages and answer are one commit of its own session.

    @app.post("/orders")
    @idempotent(keys, lambda: db.session, Policy(required=True))
    def place(): ...

The decorator claims on your session, and commits it with the answer; the view itself neither
commits nor rolls back. With the WSGI middleware, `keyed_session(engine)` gives a session instead.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import flask
from werkzeug.exceptions import HTTPException
from werkzeug.wsgi import LimitedStream

from postroom.errors import ConfigurationError, WrongCall
from postroom.idempotency import problems
from postroom.idempotency.borrowed import Borrowed
from postroom.idempotency.exchange import Asked
from postroom.idempotency.forms import FILES, FORMS, comparable, held_by
from postroom.idempotency.given import checked_engine
from postroom.idempotency.keys import Keys, Seen, asked_of, needs_body
from postroom.idempotency.policy import SAFE_METHODS, Policy
from postroom.idempotency.rules import Answer
from postroom.idempotency.turn import Answered, Turn
from postroom.idempotency.wsgi import STATE, turn_of

__all__ = ["idempotent", "keyed_session"]

F = TypeVar("F", bound=Callable[..., Any])


def keyed_session(engine: Any, **options: Any) -> Any:
    """In a view under the WSGI middleware: a session on the transaction of this request."""
    try:
        engine = checked_engine(engine, or_async=False)
        return turn_of(flask.request).session(engine, **options)
    except Answered as answered:  # an exception that Flask does not log
        flask.abort(_response(answered.answer))


def idempotent(
    keys: Keys, session: Callable[[], Any], policy: Policy | None = None
) -> Callable[[F], F]:
    """Carry the view out once for each key, in the transaction of your own session.

    `session` gives the session, scoped session or connection that the view works on.
    """
    keys.for_decorator()

    def decorate(view: F) -> F:
        if inspect.iscoroutinefunction(view):
            raise ConfigurationError(
                "Flask runs an async view in a thread of its own, where your session is another: "
                "decorate a view that is not async."
            )

        @functools.wraps(view)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if isinstance(turn := flask.request.environ.get(STATE), Turn) and turn.asked:
                raise WrongCall(
                    "the middleware has claimed this request already: take its route out of the "
                    "policies of the middleware, or the decorator off the view"
                )
            asked = _asked(keys, policy)
            if isinstance(asked, Answer):
                return _response(asked)
            borrowed = Borrowed(session(), asked)
            return borrowed.around(lambda: _called(view, args, kwargs), _answer, _response)

        return wrapper  # type: ignore[return-value]

    return decorate


def _asked(keys: Keys, policy: Policy | None) -> Asked | Answer | None:
    """The request with its key, or what is wrong with it; what only looks has none."""
    request = flask.request
    if request.method in SAFE_METHODS:
        return None
    chosen = keys.policy_in(request.method, request.path, policy)
    seen = _seen(request, chosen)
    if seen is None:
        return problems.too_large(chosen.most_request_bytes)
    rule = request.url_rule
    operation = f"{seen.method} {rule.rule if rule is not None else seen.path}"[:255]
    return asked_of(seen, operation, chosen, keys.whose(request))


def _called(view: Callable[..., Any], args: Any, kwargs: Any) -> flask.Response:
    """What the view answers; `abort(404)` is an answer too, as the application would give it."""
    try:
        return flask.make_response(_whole(view(*args, **kwargs)))
    except HTTPException as refusal:
        told = flask.current_app.handle_user_exception(refusal)
        response = flask.make_response(_whole(told))
        if response.status_code < 400:
            raise
        return response


def _whole(told: Any) -> Any:
    """An exception's own response is whole; what Flask would make of the exception is a stream."""
    return told.get_response() if isinstance(told, HTTPException) else told


def _seen(request: flask.Request, policy: Policy) -> Seen | None:
    """None: it is too large. A body is read only where a key may be, and only up to the limit."""
    headers = [(name.lower(), value) for name, value in request.headers.items()]
    query = request.query_string.decode("latin-1")
    seen = Seen(request.method, request.path, query, headers)
    if not needs_body(policy, seen):
        return seen
    limit, environ = policy.most_request_bytes, request.environ
    if (request.content_length or 0) > limit:
        return None
    if environ.get("wsgi.input_terminated"):  # Flask would read whatever comes
        environ["wsgi.input"] = LimitedStream(environ["wsgi.input"], limit + 1, is_max=True)
    # A stream that somebody has asked for may be at its end; who has kept its bytes is asked first.
    taken = "stream" in vars(request) and getattr(request, "_cached_data", None) is None
    body = request.get_data(cache=True)
    if len(body) > limit:
        return None
    kind = request.content_type or "" if request.mimetype == FILES else ""
    length = request.content_length or int(taken and "Transfer-Encoding" in request.headers)
    form = _form(request) if request.mimetype in FORMS else b""
    return replace(seen, body=comparable(body, form, length, kind))


def _form(request: flask.Request) -> bytes:
    try:
        return held_by(request.form, request.files)
    except HTTPException:  # too large for a form; the view may think otherwise
        return b""


def _answer(response: Any) -> Answer:
    headers = tuple(response.headers.items())
    if response.is_streamed:
        return Answer(response.status_code, headers).without_body("streamed")
    return Answer(response.status_code, headers, response.get_data())


def _response(answer: Answer) -> flask.Response:
    return flask.Response(answer.body, answer.status, list(answer.headers))
