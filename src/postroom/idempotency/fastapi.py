"""FastAPI: a session that shares the fate of its request's key, and problems in the OpenAPI.

    protect(app, keys)
    KeyedSession = Annotated[AsyncSession, Depends(keyed_session(engine))]

    @app.post("/orders", status_code=201)
    async def place(order: NewOrder, session: KeyedSession): ...

The dependency opens the session, claims the key as its first statement, and is committed by the
middleware together with the answer. For a request without a key it does the same without a record.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exception_handlers import request_validation_exception_handler
from fastapi.exceptions import RequestValidationError
from starlette.routing import BaseRoute, Mount

from postroom.errors import ConfigurationError
from postroom.idempotency import problems
from postroom.idempotency.asgi import STATE, IdempotencyMiddleware, turn_of
from postroom.idempotency.keys import Keys
from postroom.idempotency.turn import Answered, Turn

__all__ = ["describe", "keyed_connection", "keyed_session", "keyed_turn", "protect"]

_HANDLER = ("fastapi.routing", "get_request_handler.<locals>.app")
_DEPENDENCIES = "fastapi.dependencies.utils"


def protect(app: FastAPI, keys: Keys) -> None:
    """Add the middleware, and what it answers to the generated OpenAPI."""
    app.add_middleware(IdempotencyMiddleware, keys=keys)
    _add_handlers(app)
    describe(app, keys)


def _add_handlers(app: FastAPI) -> None:
    """As late as may be: until the first request others add theirs, and mount applications, which
    have handlers of their own."""
    make = app.build_middleware_stack

    def build() -> Any:
        _forget_what_is_not_valid(app)
        app.add_exception_handler(Answered, _say)
        for inner in _mounted(app.routes):
            _add_handlers(inner)
        return make()

    app.build_middleware_stack = build  # type: ignore[method-assign]


def _mounted(routes: Iterable[BaseRoute]) -> Iterator[FastAPI]:
    for mount in routes:
        if isinstance(mount, Mount):
            if isinstance(mount.app, FastAPI):
                yield mount.app
            else:
                yield from _mounted(mount.routes)


async def _say(request: Request, answered: Any) -> Response:
    """An answer from memory, so that whatever is between us and the route sees no exception."""
    return Response(answered.answer.body, answered.status_code, answered.headers)


def _forget_what_is_not_valid(app: FastAPI) -> None:
    """FastAPI solves dependencies before it looks at the body: a request that is not valid has
    claimed its key by then, and gives it back. A route that has begun keeps it, whatever it raises:
    it may have paid before."""
    usual: Any = app.exception_handlers.get(
        RequestValidationError, request_validation_exception_handler
    )

    async def refuse(request: Request, error: Exception) -> Any:
        if isinstance(turn := request.scope.get(STATE), Turn) and not _has_begun(error):
            turn.kept = False
        answer = usual(request, error)
        return await answer if inspect.isawaitable(answer) else answer

    app.add_exception_handler(RequestValidationError, refuse)


def _has_begun(error: Exception) -> bool:
    """Whether the route was entered before this: told by where FastAPI's handler was at that time.
    What cannot be told has."""
    places = [
        (frame.f_globals.get("__name__"), frame.f_code.co_qualname)
        for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    if _HANDLER not in places:
        return True
    within = places[places.index(_HANDLER) + 1 :]
    # It raises by itself what it found in the request, or stood at a dependency.
    return bool(within) and within[0][0] != _DEPENDENCIES


def keyed_turn(request: Request) -> Turn:
    """A dependency: the turn of this request, for `turn.key_for("charge")`."""
    return turn_of(request)


def keyed_session(engine: Any, *, scope: Any = None, **options: Any) -> Callable[..., Any]:
    """A dependency: a session on the transaction of this request, of an engine or an async one.

    `scope=Depends(current_user)` says whose key it is after the route's own authentication; the
    `Keys` have `scope=AT_CLAIM` then.
    """
    if hasattr(engine, "sync_engine"):
        return _dependency(scope, lambda turn: turn.session_async(engine, **options))
    return _dependency(scope, lambda turn: turn.session_in_thread(engine, **options))


def keyed_connection(engine: Any, *, scope: Any = None) -> Callable[..., Any]:
    """The same for those who work without the ORM."""
    if hasattr(engine, "sync_engine"):
        return _dependency(scope, lambda turn: turn.connection_async(engine))
    return _dependency(scope, lambda turn: turn.connection_in_thread(engine))


def _dependency(scope: Any, claim: Callable[[Turn], Awaitable[Any]]) -> Callable[..., Any]:
    async def of_anybody(request: Request) -> Any:
        turn = turn_of(request)
        try:
            return await claim(turn)
        except ConfigurationError:
            turn.kept = False  # no route has begun
            raise

    async def of_somebody(request: Request, who: Any = scope) -> Any:
        turn_of(request).belongs_to(who)
        return await of_anybody(request)

    return of_anybody if scope is None else of_somebody


def describe(app: FastAPI, keys: Keys) -> None:
    """Have the header and the problems of keys shown in `app.openapi()`."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = make()
            for path, operations in schema.get("paths", {}).items():
                for method, operation in operations.items():
                    _describe(operation, keys, method.upper(), path)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _describe(operation: dict[str, Any], keys: Keys, method: str, path: str) -> None:
    found = keys.find(method, path)
    if found is None:
        return
    parameters = operation.setdefault("parameters", [])
    if not any(each.get("name", "").lower() == "idempotency-key" for each in parameters):
        parameters.append(problems.openapi_header(found[1]))
    responses = operation.setdefault("responses", {})
    for code, response in problems.openapi_responses(found[1]).items():
        theirs = responses.setdefault(code, {"description": response["description"]})
        theirs.setdefault("content", {}).update(response["content"])
        theirs.setdefault("headers", {}).update(response.get("headers", {}))
