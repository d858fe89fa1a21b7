"""One small service written with each framework: it charges cards, outside of the database.

What a request is to do stands in its body; what was done stands in `Service.charged`, which no
rollback undoes.
"""

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from serving import CLIENT, serve_asgi, serve_wsgi

from postroom.idempotency import Keys, Policies, Policy
from postroom.idempotency.asgi import IdempotencyMiddleware as Asgi
from postroom.idempotency.asgi import turn_of as asgi_turn
from postroom.idempotency.wsgi import IdempotencyMiddleware as Wsgi
from postroom.idempotency.wsgi import turn_of as wsgi_turn

PATH = "/charges"


@dataclass
class Service:
    """What a client and the outside world see."""

    address: str = ""
    charged: Counter[str] = field(default_factory=Counter)
    gate: threading.Event = field(default_factory=threading.Event)
    begun: threading.Event = field(default_factory=threading.Event)

    def post(self, key: str | None, name: str = "a", do: str = "", **headers: str) -> Any:
        named = {} if key is None else {"Idempotency-Key": key}
        return CLIENT.post(
            f"{self.address}{PATH}",
            json={"name": name, "do": do},
            headers={**named, **headers},
            timeout=120,
        )

    def work(self, body: bytes, key_for: Callable[..., str]) -> tuple[int, dict[str, str], bytes]:
        """What every framework's route does."""
        wish = json.loads(body)
        self.charged[wish["name"]] += 1
        self.begun.set()
        if wish["do"] == "fail":
            raise RuntimeError("the card reader broke")
        if wish["do"] == "wait":
            assert self.gate.wait(120)
        status = int(wish["do"]) if wish["do"].isdecimal() else 201
        if wish["do"] == "large":
            return 200, {}, b"x" * 5000
        told = {"name": wish["name"], "n": self.charged[wish["name"]], "key": key_for("card")}
        headers = {"Content-Type": "application/json", "Location": "/1"}
        headers["Set-Cookie"] = f"s={wish.get('cookie', 1)}"
        return status, headers, json.dumps(told).encode()


def user_of_asgi(scope: Any) -> str:
    return dict(scope["headers"]).get(b"x-user", b"ada").decode()


def user_of_wsgi(environ: Any) -> str:
    return environ.get("HTTP_X_USER", "ada")  # type: ignore[no-any-return]


def _keys(url: str, scope: Any, policy: Policy) -> Keys:
    return Keys(url, scope=scope, policies=Policies({f"POST {PATH}": policy}))


@contextmanager
def _asgi(service: Service, app: Any, keys: Keys) -> Iterator[Service]:
    with serve_asgi(app) as service.address:
        yield service
    keys.close()


@contextmanager
def starlette(url: str, policy: Policy) -> Iterator[Service]:
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.responses import Response, StreamingResponse
    from starlette.routing import Route

    service, keys = Service(), _keys(url, user_of_asgi, policy)

    async def charge(request: Any) -> Any:
        body = await request.body()
        turn = asgi_turn(request)
        done = await asyncio.to_thread(service.work, body, turn.key_for)
        if b"stream" in body:
            return StreamingResponse(iter([b"a", b"b", b"c"]))
        return Response(done[2], done[0], done[1])

    app = Starlette(
        routes=[Route(PATH, charge, methods=["POST"])], middleware=[Middleware(Asgi, keys=keys)]
    )
    with _asgi(service, app, keys):
        yield service


@contextmanager
def fastapi(url: str, policy: Policy) -> Iterator[Service]:
    from fastapi import FastAPI, Request, Response

    from postroom.idempotency.fastapi import protect

    service, keys = Service(), _keys(url, user_of_asgi, policy)
    app = FastAPI()
    protect(app, keys)

    @app.post(PATH)
    async def charge(request: Request, wish: dict[str, str]) -> Response:
        turn = asgi_turn(request)
        done = await asyncio.to_thread(service.work, await request.body(), turn.key_for)
        return Response(done[2], done[0], done[1])

    with _asgi(service, app, keys):
        yield service


@contextmanager
def litestar(url: str, policy: Policy) -> Iterator[Service]:
    from litestar import Litestar, Request, Response, post
    from litestar.middleware import DefineMiddleware

    service, keys = Service(), _keys(url, user_of_asgi, policy)

    async def charge(request: Any) -> Any:
        turn = asgi_turn(request)
        done = await asyncio.to_thread(service.work, await request.body(), turn.key_for)
        headers = dict(done[1])
        kind = headers.pop("Content-Type", "application/octet-stream")
        return Response(done[2], status_code=done[0], headers=headers, media_type=kind)

    charge.__annotations__ = {"request": Request, "return": Response}
    app = Litestar([post(PATH)(charge)], middleware=[DefineMiddleware(Asgi, keys=keys)])
    with _asgi(service, app, keys):
        yield service


@contextmanager
def flask(url: str, policy: Policy) -> Iterator[Service]:
    import flask as library

    service, keys = Service(), _keys(url, user_of_wsgi, policy)
    app = library.Flask(__name__)
    app.wsgi_app = Wsgi(app.wsgi_app, keys)  # type: ignore[method-assign]

    @app.post(PATH)
    def charge() -> Any:
        turn = wsgi_turn(library.request)
        done = service.work(library.request.get_data(), turn.key_for)
        if b"stream" in library.request.get_data():
            return library.Response(iter([b"a", b"b", b"c"]))
        return library.Response(done[2], done[0], done[1])

    with serve_wsgi(app) as service.address:
        yield service
    keys.close()


@contextmanager
def plain_wsgi(url: str, policy: Policy) -> Iterator[Service]:
    service, keys = Service(), _keys(url, user_of_wsgi, policy)

    def charge(environ: Any, start: Any) -> Any:
        body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
        status, headers, content = service.work(body, wsgi_turn(environ).key_for)
        start(f"{status} OK", list(headers.items()))
        return [content]

    with serve_wsgi(Wsgi(charge, keys)) as service.address:
        yield service
    keys.close()


@contextmanager
def django(url: str, policy: Policy) -> Iterator[Service]:
    from django.core.handlers.wsgi import WSGIHandler
    from django.http import HttpResponse

    service = Service()

    def charge(request: Any) -> Any:
        turn = request.postroom_idempotency
        status, headers, content = service.work(request.body, turn.key_for)
        return HttpResponse(content, status=status, headers=headers)

    with (
        _django(url, policy, charge),
        serve_wsgi(WSGIHandler()) as service.address,
    ):
        yield service


@contextmanager
def django_async(url: str, policy: Policy) -> Iterator[Service]:
    from django.core.handlers.asgi import ASGIHandler
    from django.http import HttpResponse

    service = Service()

    async def charge(request: Any) -> Any:
        turn = request.postroom_idempotency
        work = asyncio.to_thread(service.work, request.body, turn.key_for)
        status, headers, content = await work
        return HttpResponse(content, status=status, headers=headers)

    with (
        _django(url, policy, charge),
        serve_asgi(ASGIHandler()) as service.address,
    ):
        yield service


@contextmanager
def _django(url: str, policy: Policy, charge: Any) -> Iterator[None]:
    import sys
    import types

    from django.test.utils import override_settings
    from django.urls import path

    import django_doors  # noqa: F401

    keys = _keys(url, lambda request: request.headers.get("X-User", "ada"), policy)
    urls = types.ModuleType("keys_urls")
    urls.urlpatterns = [path(PATH[1:], charge)]  # type: ignore[attr-defined]
    sys.modules["keys_urls"] = urls
    with override_settings(
        ROOT_URLCONF="keys_urls",
        ALLOWED_HOSTS=["*"],
        MIDDLEWARE=["postroom.idempotency.django.IdempotencyMiddleware"],
        POSTROOM={"keys": lambda: keys},
    ):
        yield
    keys.close()


Opener = Callable[[str, Policy], AbstractContextManager[Service]]
FRAMEWORKS: dict[str, Opener] = {
    each.__name__: each  # type: ignore[attr-defined]
    for each in (starlette, fastapi, litestar, flask, plain_wsgi, django, django_async)
}
