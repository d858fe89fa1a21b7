"""Mistakes in how an application is put together are said where they are made."""

import sys
import types
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Annotated, Any

import flask
import httpx
import pytest
from fastapi import APIRouter, Depends, FastAPI
from serving import SYNC_DRIVERS, with_driver
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker
from starlette.applications import Starlette
from starlette.routing import Host, Mount

from postroom import signals
from postroom.errors import ConfigurationError
from postroom.idempotency import SHARED, Keys, Policies, Policy, resumable
from postroom.idempotency.fastapi import keyed_connection, keyed_session, keyed_turn, protect
from postroom.idempotency.flask import keyed_session as session_of_flask
from postroom.idempotency.turn import Turn
from postroom.idempotency.wsgi import IdempotencyMiddleware as Wsgi
from postroom.idempotency.wsgi import turn_of
from stages import Stage, Stages

K = {"Idempotency-Key": "k"}
WORK = text("INSERT INTO thing VALUES ('a')")


@pytest.fixture
def stage(stages: Stages) -> Stage:
    return stages["sqlite"]


def status_of_key(stage: Stage) -> list[Any]:
    return [row[0] for row in stage.query("SELECT status FROM postroom_idempotency_key")]


@asynccontextmanager
async def client_of(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
        yield client


@contextmanager
def keys_of(stage: Stage, policy: Policy) -> Iterator[Keys]:
    keys = Keys(stage.url, scope=SHARED, policies={"POST /o": policy})
    yield keys
    keys.close()


@pytest.mark.parametrize("headers", [K, {}], ids=["key", "none"])
@pytest.mark.parametrize("mode", ["external", "resume"])
async def test_a_session_under_another_mode(stage: Stage, mode: Any, headers: Any) -> None:
    engine = create_async_engine(with_driver(stage.url))
    with keys_of(stage, Policy(mode=mode)) as keys:
        app = FastAPI()
        protect(app, keys)

        @app.post("/o")
        async def place(session: Annotated[AsyncSession, Depends(keyed_session(engine))]) -> None:
            await session.execute(WORK)

        async with client_of(app) as client:
            for _ in range(2):
                with pytest.raises(ConfigurationError, match='mode="same_transaction"'):
                    await client.post("/o", headers=headers)
        await keys.close_async()
    assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]
    await engine.dispose()
    assert status_of_key(stage) in ([], ["failed"]), "no dependency ran, so nothing is in doubt"


@pytest.mark.parametrize("headers", [{"HTTP_IDEMPOTENCY_KEY": "k"}, {}], ids=["key", "none"])
def test_a_session_under_another_mode_in_wsgi(stage: Stage, headers: Any) -> None:
    engine = create_engine(with_driver(stage.url, SYNC_DRIVERS))

    def app(environ: Any, start: Any) -> Any:
        turn_of(environ).session(engine).execute(WORK)

    with keys_of(stage, Policy()) as keys:
        environ = {"REQUEST_METHOD": "POST", "PATH_INFO": "/o", "CONTENT_LENGTH": "0"}
        with pytest.raises(ConfigurationError, match='mode="same_transaction"'):
            Wsgi(app, keys)({**environ, **headers, "wsgi.input": Empty()}, lambda *_: None)
    engine.dispose()
    assert stage.things() == []


@pytest.mark.parametrize("headers", [K, {}], ids=["key", "none"])
@pytest.mark.parametrize("mode", ["external", "same_transaction"])
async def test_a_resumable_run_under_another_mode(stage: Stage, mode: Any, headers: Any) -> None:
    """Nobody would go on with the one, and the other would claim its key a second time."""
    runs = []
    with keys_of(stage, Policy(mode=mode)) as keys:
        app = FastAPI()
        protect(app, keys)

        @resumable(keys, "ride")
        async def ride(run: Any, wish: Any) -> None:
            runs.append(wish)

        @app.post("/o")
        async def place(turn: Annotated[Turn, Depends(keyed_turn)]) -> None:
            await ride.serve(turn, {})

        async with client_of(app) as client:
            for _ in range(2):
                with pytest.raises(ConfigurationError, match=f'mode="resume".*"{mode}"'):
                    await client.post("/o", headers=headers)
        await keys.close_async()
    assert runs == []
    assert status_of_key(stage) in ([], ["failed"]), "nothing ran, so nothing is in doubt"


@pytest.mark.parametrize("headers", [{"HTTP_IDEMPOTENCY_KEY": "k"}, {}], ids=["key", "none"])
@pytest.mark.parametrize("mode", ["external", "same_transaction"])
def test_a_resumable_run_under_another_mode_in_wsgi(stage: Stage, mode: Any, headers: Any) -> None:
    runs = []
    with keys_of(stage, Policy(mode=mode)) as keys:

        @resumable(keys, "ride")
        def ride(run: Any, wish: Any) -> None:
            runs.append(wish)

        def app(environ: Any, start: Any) -> Any:
            ride.serve(turn_of(environ), {})

        environ = {"REQUEST_METHOD": "POST", "PATH_INFO": "/o", "CONTENT_LENGTH": "0"}
        for _ in range(2):
            with pytest.raises(ConfigurationError, match=f'mode="resume".*"{mode}"'):
                Wsgi(app, keys)({**environ, **headers, "wsgi.input": Empty()}, lambda *_: None)
    assert runs == []
    assert status_of_key(stage) in ([], ["failed"])


class Empty:
    def read(self, size: int) -> bytes:
        return b""


@pytest.mark.parametrize("mode", ["external", "same_transaction"])
async def test_a_middleware_that_stands_there_twice(stage: Stage, mode: Any) -> None:
    with keys_of(stage, Policy(mode=mode)) as keys:
        app = FastAPI()
        protect(app, keys)
        protect(app, keys)

        @app.post("/o")
        async def place() -> None: ...

        async with client_of(app) as client:
            with pytest.raises(ConfigurationError, match="twice"):
                await client.post("/o", headers=K)
            assert (await client.post("/o")).status_code == 200
        await keys.close_async()
    assert status_of_key(stage) in ([], ["failed"])


def test_a_middleware_that_stands_there_twice_in_wsgi(stage: Stage) -> None:
    with keys_of(stage, Policy()) as keys:
        app = Wsgi(Wsgi(lambda *_: [], keys), keys)  # type: ignore[arg-type]
        environ = {"REQUEST_METHOD": "POST", "PATH_INFO": "/o", "CONTENT_LENGTH": "0"}
        with pytest.raises(ConfigurationError, match="twice"):
            app({**environ, "HTTP_IDEMPOTENCY_KEY": "k", "wsgi.input": Empty()}, print)
    assert status_of_key(stage) == ["failed"]


@pytest.mark.parametrize("raised", [True, False])
def test_a_middleware_that_stands_there_twice_in_django(stage: Stage, raised: bool) -> None:
    from django.core.handlers.exception import convert_exception_to_response
    from django.test import RequestFactory
    from django.test.utils import override_settings

    import django_doors  # noqa: F401
    from postroom.idempotency.django import IdempotencyMiddleware

    urls = types.ModuleType("no_urls")
    urls.urlpatterns = []  # type: ignore[attr-defined]
    sys.modules["no_urls"] = urls
    with (
        keys_of(stage, Policy()) as keys,
        override_settings(ROOT_URLCONF="no_urls", POSTROOM={"keys": keys}, ALLOWED_HOSTS=["*"]),
    ):
        inner = IdempotencyMiddleware(lambda request: None)
        outer = IdempotencyMiddleware(inner if raised else convert_exception_to_response(inner))
        request = RequestFactory(raise_request_exception=False).post("/o", headers=K)
        if raised:
            with pytest.raises(ConfigurationError, match="twice"):
                outer(request)
        else:
            assert outer(request).status_code == 500
    assert status_of_key(stage) == ["failed"]


async def test_an_application_under_another_may_have_keys_of_its_own(stage: Stage) -> None:
    with keys_of(stage, Policy()) as inner, keys_of(stage, Policy()) as outer:
        app, whole = FastAPI(), FastAPI()
        protect(app, inner)

        @app.post("/o")
        async def place() -> str:
            return "made"

        whole.mount("/o", Starlette(routes=[Mount("/", app)]))
        protect(whole, outer)
        async with client_of(whole) as client:
            assert (await client.post("/o/o", headers=K)).status_code == 200
        await inner.close_async()
        await outer.close_async()


@pytest.mark.parametrize("wrong", ["external", None, {"mode": "external"}, Policy])
def test_what_is_no_policy_is_refused_at_once(stage: Stage, wrong: Any) -> None:
    for policies in ({"POST /o": wrong}, Policies({"POST /o": wrong}), Policies(default=wrong)):
        if policies == Policies():
            continue  # None is no default
        with pytest.raises(ConfigurationError, match=r"no Policy: write Policy\(mode="):
            Keys(stage.url, scope=SHARED, policies=policies)


def routed(app: FastAPI) -> None:
    """Routes of every sort, some of them added late."""

    async def done(request: Any = None) -> str:
        return "done"

    router, inner = APIRouter(prefix="/shops"), APIRouter(prefix="/{shop}")
    inner.add_api_route("/pay", done, methods=["POST"])
    app.include_router(router, prefix="/api")
    router.include_router(inner)
    app.add_api_route("/o", done, methods=["POST"])
    app.add_api_route("/slash/", done, methods=["POST"])
    app.add_api_route("/o/{id:int}", done, methods=["POST"])
    app.add_api_route("/u/{id:uuid}", done, methods=["PUT"])
    app.add_api_route("/hooks/stripe", done, methods=["POST"])
    app.add_api_route("/files/{name:path}", done, methods=["POST"])
    app.add_route("/plain", done, methods=["POST"])
    app.mount("/below", Starlette())
    app.router.routes.append(Host("other.example", Starlette(), name="other"))


SERVED = [
    *("POST /o", "POST /slash", "POST /o/{id}", "PUT /u/{id}", "POST /plain"),
    *("POST /api/shops/{shop}/pay", "POST /api/shops/mine/pay", "POST /hooks/{name}"),
    *("POST /files/a/b", "POST /files/{rest:path}", "POST /below/anything", "POST /{all:path}"),
]
UNSERVED = ["POST /order", "GET /o", "POST /o/new", "POST /shops/{shop}/pay", "POST /u/{id}"]


@pytest.mark.parametrize("hosted", [False, True])
async def test_a_policy_that_no_route_has_is_told_of(stage: Stage, hosted: bool) -> None:
    told: list[dict[str, Any]] = []
    policies = dict.fromkeys([*SERVED, *UNSERVED], Policy())
    keys = Keys(stage.url, scope=SHARED, policies=policies)
    app = FastAPI()
    protect(app, keys)
    routed(app)
    if not hosted:
        app.router.routes.pop()
    stop = signals.listen(lambda _, fields: told.append(fields), only=["key.unserved"])
    try:
        async with client_of(app) as client:
            for _ in range(2):
                assert (await client.post("/o", headers=K)).status_code == 200
    finally:
        stop()
    # What a host of its own serves cannot be known.
    assert [fields["operation"] for fields in told] == ([] if hosted else UNSERVED)
    await keys.close_async()


def test_a_session_is_made_of_an_engine_alone(stage: Stage) -> None:
    engine, async_engine = create_engine("sqlite://"), create_async_engine("sqlite+aiosqlite://")
    wrong = (sessionmaker(engine), async_sessionmaker(async_engine), stage.url, None, Session())
    for each in wrong:
        for door in (keyed_session, keyed_connection):
            with pytest.raises(ConfigurationError, match="give the Engine or AsyncEngine itself"):
                door(each)
        with pytest.raises(ConfigurationError, match="give the Engine or AsyncEngine itself"):
            Turn(None, Policy(mode="same_transaction")).session(each)
    with flask.Flask(__name__).test_request_context("/o"):
        for each in (*wrong, async_engine):
            with pytest.raises(ConfigurationError, match="give the Engine itself"):
                session_of_flask(each)
    for right in (engine, async_engine):
        assert callable(keyed_session(right))
        assert callable(keyed_connection(right))
