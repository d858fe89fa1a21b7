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
import re
import traceback
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any

from fastapi import FastAPI, Request, Response, routing
from fastapi.exception_handlers import request_validation_exception_handler
from fastapi.exceptions import RequestValidationError
from starlette.routing import BaseRoute, Host, Match, Mount

from postroom import signals
from postroom.errors import ConfigurationError
from postroom.idempotency import problems
from postroom.idempotency.asgi import (
    STATE,
    App,
    IdempotencyMiddleware,
    Receive,
    Scope,
    Send,
    turn_of,
)
from postroom.idempotency.given import checked_engine
from postroom.idempotency.keys import Keys
from postroom.idempotency.turn import Answered, Turn

__all__ = ["describe", "keyed_connection", "keyed_session", "keyed_turn", "protect"]

_HANDLER = ("fastapi.routing", "get_request_handler.<locals>.app")
_DEPENDENCIES = "fastapi.dependencies.utils"
_PLACE = re.compile(r"\{[^/{}]*\}")
_EXAMPLES = ("1", "00000000-0000-4000-8000-000000000000")  # for whatever converter


def protect(app: FastAPI, keys: Keys) -> None:
    """Add the middleware, and what it answers to the generated OpenAPI."""
    app.add_middleware(_Middleware, keys=keys, whole=app)
    _add_handlers(app)
    describe(app, keys)


class _Middleware(IdempotencyMiddleware):
    """It looks at the routes once: not before the first request, since they may be added late."""

    def __init__(self, app: App, keys: Keys, whole: FastAPI) -> None:
        super().__init__(app, keys)
        self._whole: FastAPI | None = whole

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._whole is not None and scope["type"] == "http":
            whole, self._whole = self._whole, None
            _tell_unserved(whole, self.keys)
        await super().__call__(scope, receive, send)


def _tell_unserved(app: FastAPI, keys: Keys) -> None:
    """A policy that was misspelled would leave its route without keys, and nobody would know."""
    # Newer versions keep an included router as it is; its routes are told by this function.
    routes = list(getattr(routing, "iter_route_contexts", iter)(app.routes))
    for operation in keys.policies.routes:
        method, _, path = operation.partition(" ")
        asked = [_PLACE.sub(each, path).rstrip("/") for each in _EXAMPLES]
        paths = [each + slash for each in asked for slash in ("", "/") if each + slash]
        scopes = [
            {"type": "http", "method": method, "path": each, "root_path": "", "headers": []}
            for each in paths
        ]
        if not (
            any(_written_so(each, keys, operation) for each in routes)
            or any(_serves(each, dict(scope)) for each in app.routes for scope in scopes)
        ):
            signals.emit(
                "key.unserved",
                operation=operation,
                advice="no route of this application is that: compare its method and whole path, "
                "with the prefixes of routers",
            )


def _written_so(route: Any, keys: Keys, operation: str) -> bool:
    """Whether the policy means this route, by how both are written."""
    path, methods = getattr(route, "path", None), getattr(route, "methods", None)
    if not isinstance(path, str):
        return False
    return any(keys.policies.could_be(operation, each, path) for each in methods or ())


def _serves(route: BaseRoute, scope: dict[str, Any]) -> bool:
    """Whether a route would take the request, or nobody can say without it."""
    if isinstance(route, Host):
        return True
    try:
        return route.matches(scope)[0] is Match.FULL
    except Exception:  # a route of somebody's own, which wants more of a request
        return True


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
    if hasattr(checked_engine(engine, or_async=True), "sync_engine"):
        return _dependency(scope, lambda turn: turn.session_async(engine, **options))
    return _dependency(scope, lambda turn: turn.session_in_thread(engine, **options))


def keyed_connection(engine: Any, *, scope: Any = None) -> Callable[..., Any]:
    """The same for those who work without the ORM."""
    if hasattr(checked_engine(engine, or_async=True), "sync_engine"):
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
