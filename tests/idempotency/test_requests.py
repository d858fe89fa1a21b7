"""What a middleware or decorator makes of a request before anybody carries it out."""

import asyncio
import io
import sys
import types
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import flask
import httpx
import pytest
from fastapi import Body, Depends, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from serving import with_driver
from sqlalchemy.ext.asyncio import create_async_engine
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import django_doors  # noqa: F401
from postroom.errors import ConfigurationError
from postroom.idempotency import (
    AT_CLAIM,
    SHARED,
    UNKEYED,
    Keys,
    Policies,
    Policy,
    derive_key,
    resumable,
)
from postroom.idempotency import django as django_keys
from postroom.idempotency import flask as flask_keys
from postroom.idempotency.asgi import IdempotencyMiddleware as Asgi
from postroom.idempotency.asgi import turn_of
from postroom.idempotency.fastapi import keyed_session, protect
from postroom.idempotency.rules import parse_key
from postroom.idempotency.wsgi import IdempotencyMiddleware as Wsgi
from stages import Stage, Stages

KEY = {"Idempotency-Key": "k"}


@pytest.fixture
def stage(stages: Stages) -> Stage:
    return stages["sqlite"]


def kind(answer: Any) -> str:
    return str(answer.json()["type"]).removeprefix("urn:postroom:problem:")


def asgi(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop")


def test_half_a_body_is_nobody_s_request(stage: Stage) -> None:
    keys, seen, told = Keys(stage.url, scope=SHARED), [], []

    def app(environ: Any, start: Any) -> Any:
        seen.append(environ["wsgi.input"].read())
        start("200 OK", [])
        return [b"imported"]

    def send(body: bytes) -> bytes:
        environ = {
            "REQUEST_METHOD": "POST",
            "PATH_INFO": "/import",
            "HTTP_IDEMPOTENCY_KEY": "k",
            "CONTENT_LENGTH": "15",
            "CONTENT_TYPE": "text/csv",
            "wsgi.input": io.BytesIO(body),
        }
        return b"".join(Wsgi(app, keys)(environ, lambda status, headers: told.append(status)))

    assert b"request-incomplete" in send(b"ada,10\nbob,")
    assert send(b"ada,10\nbob,200\n") == b"imported"
    assert (seen, [status[:3] for status in told]) == ([b"ada,10\nbob,200\n"], ["400", "200"])
    keys.close()


@pytest.mark.parametrize("how", ["asgi", "wsgi", "flask", "django"])
def test_a_key_without_a_principal_is_refused(stage: Stage, how: str) -> None:
    """To carry it out would leave it unprotected; a scope that means that says so."""
    who: list[Any] = [None]
    runs = Counter[str]()
    policy = Policy(required=True)
    keys = Keys(stage.url, scope=lambda _: who[0], policies=Policies({"POST /pay": policy}))
    send = SENDERS[how](keys, policy, lambda: runs.update(["run"]))
    status, body = send(KEY)
    assert (status, "key-unowned" in body) == (401, True)
    assert (send({})[0], runs["run"]) == (400, 0)
    who[0] = UNKEYED
    assert (send({})[0], send(KEY)[0], runs["run"]) == (200, 200, 2)
    keys.close()


def by_asgi(keys: Keys, policy: Policy, work: Any) -> Any:
    async def pay(request: Any) -> Response:
        work()
        return Response("paid")

    app = Starlette(
        routes=[Route("/pay", pay, methods=["POST"])], middleware=[Middleware(Asgi, keys=keys)]
    )

    async def send(headers: Any) -> Any:
        async with asgi(app) as client:
            answer = await client.post("/pay", headers=headers)
        return answer.status_code, answer.text

    return lambda headers: asyncio.run(send(headers))


def by_wsgi(keys: Keys, policy: Policy, work: Any) -> Any:
    app = flask.Flask(__name__)
    app.post("/pay")(lambda: work() or "paid")
    app.wsgi_app = Wsgi(app.wsgi_app, keys)  # type: ignore[method-assign]
    return lambda headers: _flask(app, headers)


def by_flask(keys: Keys, policy: Policy, work: Any) -> Any:
    import sqlite3

    app = flask.Flask(__name__)

    def connection() -> Any:
        return sqlite3.connect(keys.engines.url.removeprefix("sqlite:///"))

    app.post("/pay")(flask_keys.idempotent(keys, connection, policy)(lambda: work() or "paid"))
    return lambda headers: _flask(app, headers)


def _flask(app: flask.Flask, headers: Any, **more: Any) -> tuple[int, str]:
    answer = app.test_client().post("/pay", headers=headers, **more)
    return answer.status_code, answer.get_data(as_text=True)


def by_django(keys: Keys, policy: Policy, work: Any) -> Any:
    from django.http import HttpResponse

    def send(headers: Any) -> Any:
        from django.test import Client

        with django_site(keys, pay=lambda request: work() or HttpResponse("paid")):
            answer = Client().post("/pay", b"", content_type="text/plain", headers=headers)
        return answer.status_code, answer.content.decode()

    return send


SENDERS: dict[str, Any] = {"asgi": by_asgi, "wsgi": by_wsgi, "flask": by_flask, "django": by_django}


@contextmanager
def django_site(keys: Keys, **views: Any) -> Iterator[None]:
    from django.test.utils import override_settings
    from django.urls import path

    urls = types.ModuleType("request_urls")
    urls.urlpatterns = [path(name, view) for name, view in views.items()]  # type: ignore[attr-defined]
    sys.modules["request_urls"] = urls
    from django.urls import clear_url_caches

    clear_url_caches()
    with override_settings(
        ROOT_URLCONF="request_urls",
        ALLOWED_HOSTS=["*"],
        MIDDLEWARE=["postroom.idempotency.django.IdempotencyMiddleware"],
        POSTROOM={"keys": lambda: keys},
    ):
        yield


def test_django_uploads_without_a_key_are_not_read(stage: Stage) -> None:
    from django.core.files.uploadedfile import SimpleUploadedFile
    from django.http import HttpResponse
    from django.test import Client

    keys = Keys(stage.url, scope=SHARED)

    def upload(request: Any) -> Any:
        return HttpResponse(str(len(request.FILES["f"].read())))

    with django_site(keys, up=upload):
        wish = {"f": SimpleUploadedFile("x", b"a" * 3_000_000)}
        assert Client().post("/up", wish).content == b"3000000"
        big = Client().post("/up", b"a" * 3_000_000, content_type="text/plain", headers=KEY)
        assert (big.status_code, kind(big)) == (413, "request-too-large")
    keys.close()


def test_flask_bodies_without_a_key_are_not_read(stage: Stage) -> None:
    keys, policy = Keys(stage.url, scope=SHARED), Policy(most_request_bytes=100)
    send = by_flask_body(keys, policy)
    assert send({})[0] == 200
    assert send(KEY)[0] == 413
    keys.close()


def by_flask_body(keys: Keys, policy: Policy) -> Any:
    app = flask.Flask(__name__)
    import sqlite3

    def connection() -> Any:
        return sqlite3.connect(keys.engines.url.removeprefix("sqlite:///"))

    app.post("/pay")(flask_keys.idempotent(keys, connection, policy)(lambda: "paid"))
    return lambda headers: _flask(app, headers, data=b"x" * 1000)


def test_middleware_and_decorator_together(stage: Stage) -> None:
    from django.http import HttpResponse
    from django.test import Client

    keys = Keys(stage.url, scope=SHARED)

    @django_keys.idempotent(keys)
    def pay(request: Any) -> Any:
        return HttpResponse("paid")

    with django_site(keys, pay=pay):
        answer = Client().post("/pay", b"{}", content_type="application/json", headers=KEY)
    assert "key-in-progress" not in answer.content.decode()

    app = flask.Flask(__name__)
    app.testing = True
    app.post("/pay")(flask_keys.idempotent(keys, lambda: None)(lambda: "paid"))
    app.wsgi_app = Wsgi(app.wsgi_app, keys)  # type: ignore[method-assign]
    with pytest.raises(Exception, match="claimed this request already"):
        _flask(app, {"Idempotency-Key": "j"})
    keys.close()


async def test_a_redirect_of_the_router_is_followed_with_the_same_key(stage: Stage) -> None:
    keys = Keys(stage.url, scope=SHARED)

    async def pay(request: Any) -> Response:
        return Response("paid")

    app = Starlette(
        routes=[Route("/pay", pay, methods=["POST"])], middleware=[Middleware(Asgi, keys=keys)]
    )
    async with asgi(app) as client:
        answer = await client.post("/pay/", headers=KEY, follow_redirects=True)
        assert answer.text == "paid"
    await keys.close_async()


async def test_strangers_leave_nothing(stage: Stage) -> None:
    keys, status = Keys(stage.url, scope=SHARED), 401

    async def pay(request: Any) -> Response:
        return Response("", status)

    app = Starlette(
        routes=[Route("/pay", pay, methods=["POST"])], middleware=[Middleware(Asgi, keys=keys)]
    )
    async with asgi(app) as client:
        await client.post("/pay", headers=KEY)
        status = 200
        assert (await client.post("/pay?other=1", headers=KEY)).status_code == 200
    await keys.close_async()


async def test_a_route_s_policy_is_the_one_that_counts(stage: Stage) -> None:
    policies = {"POST /ride": Policy(mode="resume", required=True, mismatch_status=409)}
    keys = Keys(stage.url, scope=SHARED, policies=policies)

    @resumable(keys, "ride")
    async def create(run: Any, wish: Any) -> Any:
        return 201, wish

    async def ride(request: Any) -> Any:
        return JSONResponse(await create.serve(turn_of(request), await request.json()))

    app = Starlette(
        routes=[Route("/ride", ride, methods=["POST"])], middleware=[Middleware(Asgi, keys=keys)]
    )
    async with asgi(app) as client:
        assert (await client.post("/ride", json=1, headers=KEY)).status_code == 201
        other = await client.post("/ride", json=2, headers=KEY)
        assert (other.status_code, kind(other)) == (409, "key-reused")
    await keys.close_async()


@pytest.mark.parametrize("how", ["async", "of a user"])
def test_a_scope_of_an_async_django_may_ask_for_its_user(stage: Stage, how: str) -> None:
    from django.http import HttpResponse
    from django.test import AsyncClient

    async def who_async(request: Any) -> str:
        return "ada"

    def who(request: Any) -> str:
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()  # Django would refuse to look its user up
        return "ada"

    keys = Keys(stage.url, scope=who_async if how == "async" else who)

    async def pay(request: Any) -> Any:
        return HttpResponse("paid")

    async def send() -> Any:
        return await AsyncClient().post("/pay", b"", content_type="text/plain", headers=KEY)

    with django_site(keys, pay=pay):
        assert asyncio.run(send()).content == b"paid"
    keys.close()


def test_a_derived_key_can_be_sent_in_our_own_header() -> None:
    for parts in (("café", "charge"), ("a ", "b "), ("tab\t", "x"), ("POST /orders", 1)):
        key = derive_key(*parts)
        assert parse_key([key]) == key


async def test_a_handler_that_is_added_later_keeps_no_key(stage: Stage) -> None:
    keys = Keys(stage.url, scope=SHARED)
    app = FastAPI()
    protect(app, keys)

    @app.exception_handler(RequestValidationError)
    async def told(request: Any, error: Exception) -> Response:
        return Response("their own", 422)

    @app.post("/pay")
    async def pay(amount: Annotated[int, Body(embed=True)]) -> int:
        return amount

    async with asgi(app) as client:
        wrong = await client.post("/pay", json={"amount": "x"}, headers=KEY)
        assert (wrong.status_code, wrong.text) == (422, "their own")
        assert (await client.post("/pay", json={"amount": 5}, headers=KEY)).json() == 5
    await keys.close_async()


async def test_authentication_of_the_route_comes_before_an_answer_from_memory(stage: Stage) -> None:
    same = Policy(mode="same_transaction", required=True)
    keys = Keys(stage.url, scope=AT_CLAIM, policies={"POST /pay": same, "POST /nobody": same})
    engine = create_async_engine(with_driver(stage.url))
    app = FastAPI()
    protect(app, keys)

    async def user(request: Request) -> str:
        token = request.headers["x-token"]
        if not token.endswith("signed"):
            raise HTTPException(401)
        return token.split()[0]

    @app.post("/pay")
    async def pay(
        session: Annotated[Any, Depends(keyed_session(engine, scope=Depends(user)))],
    ) -> str:
        return uuid.uuid4().hex

    @app.post("/nobody")
    async def nobody(session: Annotated[Any, Depends(keyed_session(engine))]) -> None: ...

    async with asgi(app) as client:
        ada, again, forged, bob = [
            await client.post("/pay", headers={**KEY, "x-token": token})
            for token in ("ada signed", "ada signed", "ada", "bob signed")
        ]
        assert (ada.status_code, again.content, forged.status_code) == (200, ada.content, 401)
        assert bob.content != ada.content
        with pytest.raises(ConfigurationError, match="whose key"):
            await client.post("/nobody", headers=KEY)
    with pytest.raises(ConfigurationError, match="external"):
        Keys(stage.url, scope=AT_CLAIM)
    await engine.dispose()
    await keys.close_async()
