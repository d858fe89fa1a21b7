"""The doors at which a clerk is asked: middleware, decorators of frameworks, decorated functions.

Each gives how to ask it (mode and key; status and body come back) and the resumable function that
a `Finisher` goes on with. What is not async works in one thread, as Django's connections want it.
"""

import asyncio
import io
import json
import sys
import types
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING, Any, TypeAlias

import flask as flask_library
from django.conf import settings
from django.core.handlers.asgi import ASGIHandler
from django.core.handlers.wsgi import WSGIHandler
from django.db import connections
from django.http import JsonResponse
from django.urls import path
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import scoped_session, sessionmaker
from tables import connect

import django_doors
from postroom import failpoints
from postroom.idempotency import Policy, idempotent
from postroom.idempotency import asgi as asgi_keys
from postroom.idempotency import django as django_keys
from postroom.idempotency import flask as flask_keys
from postroom.idempotency import wsgi as wsgi_keys

if TYPE_CHECKING:
    from clerks import Desk

Asking: TypeAlias = Callable[[str, str], Awaitable[tuple[int, bytes]]]
Opened: TypeAlias = tuple[Asking, Any]


# ── applications ───────────────────────────────────────────────────────────────────────────────


def asgi(desk: "Desk") -> Opened:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        turn, wish = asgi_keys.turn_of(scope), json.loads((await receive())["body"])
        if scope["path"] in ("/same", "/refused"):
            session = await turn.session_async(desk.engine_async)
            told = await desk.insert_async(session, wish["key"])
        elif scope["path"] == "/external":
            told = desk.charge(wish["key"], turn.key_for("card"))
        else:
            told = await desk.go_on_async.serve(turn, wish)
        head = [(b"content-type", b"application/json")]
        status = desk.status(scope["path"])
        await send({"type": "http.response.start", "status": status, "headers": head})
        await send({"type": "http.response.body", "body": json.dumps(told).encode()})

    return _by_asgi(asgi_keys.IdempotencyMiddleware(app, desk.keys)), desk.go_on_async


def wsgi(desk: "Desk") -> Opened:
    def app(environ: Any, start: Any) -> Any:
        turn, wish = wsgi_keys.turn_of(environ), json.loads(environ["wsgi.input"].read())
        if environ["PATH_INFO"] in ("/same", "/refused"):
            told = desk.insert(turn.session(desk.engine), wish["key"])
        elif environ["PATH_INFO"] == "/external":
            told = desk.charge(wish["key"], turn.key_for("card"))
        else:
            told = desk.go_on.serve(turn, wish)
        start(f"{desk.status(environ['PATH_INFO'])} said", [("Content-Type", "application/json")])
        return [json.dumps(told).encode()]

    return _by_wsgi(wsgi_keys.IdempotencyMiddleware(app, desk.keys)), desk.go_on


def flask(desk: "Desk") -> Opened:
    """`same` and `refused` are decorated; the others are under the middleware."""
    desk.policies["POST /keyed"] = desk.policies.pop("POST /same")
    del desk.policies["POST /refused"]
    sessions = scoped_session(sessionmaker(desk.engine))
    app = flask_library.Flask(__name__)
    app.teardown_appcontext(lambda _: sessions.remove())

    @app.post("/same")
    @app.post("/refused")
    @flask_keys.idempotent(desk.keys, lambda: sessions, Policy(required=True))
    def same() -> Any:
        told = desk.insert(sessions(), wished()["key"])
        return told, desk.status(flask_library.request.path)

    @app.post("/keyed")
    def keyed() -> Any:
        return desk.insert(flask_keys.keyed_session(desk.engine), wished()["key"])

    @app.post("/external")
    def external() -> Any:
        turn = wsgi_keys.turn_of(flask_library.request)
        return desk.charge(wished()["key"], turn.key_for("card"))

    @app.post("/resume")
    def resume() -> Any:
        return desk.go_on.serve(wsgi_keys.turn_of(flask_library.request), wished()) or {}

    def wished() -> Any:
        return flask_library.request.get_json()

    app.wsgi_app = wsgi_keys.IdempotencyMiddleware(app.wsgi_app, desk.keys)  # type: ignore[method-assign]
    return _by_wsgi(app), desk.go_on


def django(desk: "Desk") -> Opened:
    """`same` and `refused` are decorated, `external` under the middleware; `resume` has neither."""

    @django_keys.idempotent(desk.keys, Policy(required=True))
    def same(request: Any) -> Any:
        told = desk.insert(connections["default"], json.loads(request.body)["key"])
        return JsonResponse(told, status=desk.status(request.path))

    def external(request: Any) -> Any:
        card = request.postroom_idempotency.key_for("card")
        return JsonResponse(desk.charge(json.loads(request.body)["key"], card))

    def resume(request: Any) -> Any:
        return JsonResponse(
            desk.go_on(request.headers["Idempotency-Key"], json.loads(request.body))
        )

    _set_up_django(desk, same=same, refused=same, external=external, resume=resume)
    return _by_wsgi(WSGIHandler()), desk.go_on


def django_async(desk: "Desk") -> Opened:
    async def external(request: Any) -> Any:
        card = request.postroom_idempotency.key_for("card")
        return JsonResponse(desk.charge(json.loads(request.body)["key"], card))

    async def resume(request: Any) -> Any:
        key, wish = request.headers["Idempotency-Key"], json.loads(request.body)
        return JsonResponse(await desk.go_on_async(key, wish))

    _set_up_django(desk, external=external, resume=resume)
    return _by_asgi(ASGIHandler()), desk.go_on_async


def _set_up_django(desk: "Desk", **views: Any) -> None:
    entry = django_doors.entry(desk.url)
    if desk.scheme == "sqlite":
        entry["OPTIONS"] = {"timeout": 30, "transaction_mode": "IMMEDIATE"}
    connections.settings["default"] = connections.configure_settings({"default": entry})["default"]
    urls = types.ModuleType("clerk_urls")
    urls.urlpatterns = [path(name, view) for name, view in views.items()]  # type: ignore[attr-defined]
    sys.modules["clerk_urls"] = urls
    settings.ROOT_URLCONF = "clerk_urls"
    settings.ALLOWED_HOSTS = ["*"]
    settings.MIDDLEWARE = ["postroom.idempotency.django.IdempotencyMiddleware"]
    settings.POSTROOM = {"keys": lambda: desk.keys}


# ── functions ──────────────────────────────────────────────────────────────────────────────────


def function(desk: "Desk") -> Opened:
    """On the driver's own connection, which its caller commits."""

    @idempotent("same", key="key", tx="tx")
    def insert(tx: Any, key: str) -> Any:
        return desk.insert(tx, key)

    def same(key: str) -> Any:
        with closing(connect(desk.url)) as tx:
            told = insert(tx, key)
            commit(tx)
            return told

    def caught(key: str) -> Any:
        with closing(connect(desk.url)) as tx:
            try:
                return insert(tx, key)
            finally:
                commit(tx)

    def commit(tx: Any) -> None:
        failpoints.hit("clerk.commit.before")
        tx.commit()
        failpoints.hit("clerk.commit.after")

    @idempotent("external", key="key", keys=desk.keys, policy=desk.external)
    def external(key: str) -> Any:
        return desk.charge(key, key)

    def resume(key: str) -> Any:
        return desk.go_on(key, {"key": key})

    ways = {"same": same, "caught": caught, "external": external, "resume": resume}
    return _in_thread(lambda mode, key: (200, json.dumps(ways[mode](key)).encode())), desk.go_on


def function_async(desk: "Desk") -> Opened:
    """On a session of SQLAlchemy's."""

    @idempotent("same", key="key", tx="tx")
    async def insert(tx: Any, key: str) -> Any:
        return await desk.insert_async(tx, key)

    async def same(key: str) -> Any:
        async with AsyncSession(desk.engine_async) as tx:
            told = await insert(tx, key)
            await commit(tx)
            return told

    async def caught(key: str) -> Any:
        async with AsyncSession(desk.engine_async) as tx:
            try:
                return await insert(tx, key)
            finally:
                await commit(tx)

    async def commit(tx: Any) -> None:
        failpoints.hit("clerk.commit.before")
        await tx.commit()
        failpoints.hit("clerk.commit.after")

    @idempotent("external", key="key", keys=desk.keys, policy=desk.external)
    async def external(key: str) -> Any:
        return desk.charge(key, key)

    async def resume(key: str) -> Any:
        return await desk.go_on_async(key, {"key": key})

    ways = {"same": same, "caught": caught, "external": external, "resume": resume}

    async def ask(mode: str, key: str) -> tuple[int, bytes]:
        return 200, json.dumps(await ways[mode](key)).encode()

    return ask, desk.go_on_async


# ── how they are asked ─────────────────────────────────────────────────────────────────────────


def _by_asgi(app: Any) -> Asking:
    async def ask(mode: str, key: str) -> tuple[int, bytes]:
        said: list[Any] = []
        body = [{"type": "http.request", "body": json.dumps({"key": key}).encode()}]

        async def receive() -> Any:
            return body.pop() if body else await asyncio.Event().wait()  # it does not hang up

        async def send(message: Any) -> None:
            said.append(message)

        named = {"idempotency-key": key, "content-type": "application/json", "host": "shop"}
        headers = [(name.encode(), value.encode()) for name, value in named.items()]
        scope = {"type": "http", "method": "POST", "path": f"/{mode}", "headers": headers}
        await app(scope, receive, send)
        return said[0]["status"], b"".join(message["body"] for message in said[1:])

    return ask


def _by_wsgi(app: Any) -> Asking:
    def ask(mode: str, key: str) -> tuple[int, bytes]:
        said: list[str] = []
        body = json.dumps({"key": key}).encode()
        environ = {
            "REQUEST_METHOD": "POST",
            "PATH_INFO": f"/{mode}",
            "CONTENT_LENGTH": str(len(body)),
            "CONTENT_TYPE": "application/json",
            "HTTP_IDEMPOTENCY_KEY": key,
            "SERVER_NAME": "shop",
            "SERVER_PORT": "80",
            "wsgi.input": io.BytesIO(body),
            "wsgi.errors": sys.stderr,
            "wsgi.url_scheme": "http",
        }
        parts = app(environ, lambda status, headers, *_: said.append(status))
        try:
            whole = b"".join(parts)
        finally:
            if hasattr(parts, "close"):
                parts.close()
        return int(said[-1].split()[0]), whole

    return _in_thread(ask)


def _in_thread(ask: Callable[[str, str], tuple[int, bytes]]) -> Asking:
    thread = ThreadPoolExecutor(1)

    async def asking(mode: str, key: str) -> tuple[int, bytes]:
        return await asyncio.get_running_loop().run_in_executor(thread, ask, mode, key)

    return asking


DOORS: dict[str, Callable[["Desk"], Opened]] = {
    each.__name__: each
    for each in (asgi, wsgi, flask, django, django_async, function, function_async)
}
