"""Whose key it is: what a scope may return and raise, and where it can be async."""

import json
import sys
import types
from typing import Any

import flask
import httpx
import pytest
from fastapi import Depends, FastAPI, HTTPException
from sqlalchemy.ext.asyncio import create_async_engine

from postroom.errors import ConfigurationError
from postroom.idempotency import AT_CLAIM, Keys, Policy
from postroom.idempotency.asgi import IdempotencyMiddleware as Asgi
from postroom.idempotency.fastapi import keyed_session, protect
from postroom.idempotency.flask import idempotent
from postroom.idempotency.wsgi import IdempotencyMiddleware as Wsgi
from stages import Stage, Stages

K = {"Idempotency-Key": "k"}


@pytest.fixture
def stage(stages: Stages) -> Stage:
    return stages["sqlite"]


def expired(_: Any) -> Any:
    raise HTTPException(401, "token expired", {"WWW-Authenticate": "Bearer"})


async def expired_async(_: Any) -> Any:
    expired(_)


def broken(_: Any) -> Any:
    raise HTTPException(503)


def check(status: int, headers: Any, document: Any) -> None:
    assert (status, headers["www-authenticate"]) == (401, "Bearer")
    assert headers["content-type"] == "application/problem+json"
    told = {"type": "about:blank", "title": "Unauthorized", "status": 401}
    assert document == {**told, "detail": "token expired"}


@pytest.mark.parametrize("scope", [expired, expired_async])
async def test_a_scope_may_refuse(stage: Stage, scope: Any) -> None:
    keys, app = Keys(stage.url, scope=scope, policies={"POST /o": Policy()}), FastAPI()
    protect(app, keys)

    @app.post("/o")
    async def place() -> str:
        return "made"

    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
        told = await client.post("/o", headers=K)
        check(told.status_code, told.headers, told.json())
        assert (await client.post("/o")).json() == "made", "without a key it is the route's matter"
        keys.scope = broken
        with pytest.raises(HTTPException):
            await client.post("/o", headers=K)
    await keys.close_async()


@pytest.mark.parametrize("how", ["middleware", "decorator"])
def test_a_scope_may_refuse_in_flask(stage: Stage, how: str) -> None:
    keys = Keys(stage.url, scope=expired, policies={"POST /o": Policy()})
    app = flask.Flask(__name__)
    app.testing = True
    view: Any = lambda: "made"  # noqa: E731
    if how == "middleware":
        app.wsgi_app = Wsgi(app.wsgi_app, keys)  # type: ignore[method-assign]
    else:
        view = idempotent(keys, lambda: None)(view)
    app.add_url_rule("/o", "o", view, methods=["POST"])
    told = app.test_client().post("/o", headers=K)
    check(told.status_code, told.headers, told.get_json(force=True))
    keys.scope = broken
    with pytest.raises(HTTPException):
        app.test_client().post("/o", headers=K)


@pytest.mark.parametrize("how", ["middleware", "async", "decorator"])
async def test_a_scope_may_refuse_in_django(stage: Stage, how: str) -> None:
    from django.http import HttpResponse
    from django.test import RequestFactory
    from django.test.utils import override_settings

    import django_doors  # noqa: F401
    from postroom.idempotency import django as django_keys

    async def view(request: Any) -> Any:
        return HttpResponse("made")

    urls = types.ModuleType("no_urls")
    urls.urlpatterns = []  # type: ignore[attr-defined]
    sys.modules["no_urls"] = urls
    keys = Keys(stage.url, scope=expired, policies={"POST /o": Policy()})
    request = RequestFactory().post("/o", headers=K)
    with override_settings(POSTROOM={"keys": keys}, ROOT_URLCONF="no_urls"):
        request.resolver_match = None
        if how == "decorator":
            told = django_keys.idempotent(keys)(lambda request: HttpResponse("made"))(request)
        elif how == "async":
            told = await django_keys.IdempotencyMiddleware(view)(request)
        else:
            told = django_keys.IdempotencyMiddleware(lambda request: HttpResponse("m"))(request)
    check(told.status_code, told.headers, json.loads(told.content))


def test_an_async_scope_is_refused_where_nothing_awaits_it(stage: Stage) -> None:
    from django.test.utils import override_settings

    import django_doors  # noqa: F401
    from postroom.idempotency import django as django_keys

    keys = Keys(stage.url, scope=expired_async)
    Asgi(lambda *_: None, keys)  # type: ignore[arg-type, return-value]
    for build in (
        lambda: Wsgi(lambda *_: [], keys),
        lambda: idempotent(keys, lambda: None),
        lambda: django_keys.idempotent(keys),
        lambda: django_keys.IdempotencyMiddleware(lambda request: None),
    ):
        with (
            override_settings(POSTROOM={"keys": keys}),
            pytest.raises(ConfigurationError, match="async"),
        ):
            build()


async def test_an_object_in_place_of_its_id_is_named_without_its_secrets(stage: Stage) -> None:
    class User:
        def __repr__(self) -> str:
            return "User(password='secret')"

    engine = create_async_engine("sqlite+aiosqlite://")
    keys = Keys(stage.url, scope=AT_CLAIM, policies={"POST /o": Policy(mode="same_transaction")})
    app = FastAPI()
    protect(app, keys)

    @app.post("/o")
    async def place(session: Any = Depends(keyed_session(engine, scope=Depends(User)))) -> None: ...  # noqa: B008

    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
        with pytest.raises(ConfigurationError, match=r"not of User.*its id") as told:
            await client.post("/o", headers=K)
    assert "secret" not in str(told.value)
    await keys.close_async()
