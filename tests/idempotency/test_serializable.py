"""PostgreSQL's SERIALIZABLE lets requests with different keys fail each other: nothing of such a
request was carried out, and its client is told to send it again."""

import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Annotated, Any

import flask
import httpx
import pytest
from fastapi import Depends, FastAPI
from litestar import Litestar, Request, post
from litestar.middleware import DefineMiddleware
from serving import CLIENT, SYNC_DRIVERS, serve_asgi, serve_wsgi, with_driver
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from postroom.idempotency import SHARED, Keys, Policy
from postroom.idempotency import flask as flask_keys
from postroom.idempotency.asgi import IdempotencyMiddleware as Asgi
from postroom.idempotency.asgi import turn_of
from postroom.idempotency.fastapi import keyed_session, protect
from postroom.idempotency.wsgi import IdempotencyMiddleware as Wsgi
from postroom.idempotency.wsgi import turn_of as wsgi_turn
from stages import Stage, Stages

SAME = Policy(mode="same_transaction", required=True)
READ = "SELECT count(*) FROM thing"
WRITE = "INSERT INTO thing VALUES ('a')"
REQUESTS = 40
OPTIONS = {"isolation_level": "SERIALIZABLE", "pool_size": 20, "max_overflow": 30}
Opener = Callable[[Stage, Keys], AbstractContextManager[str]]


@contextmanager
def fastapi(stage: Stage, keys: Keys) -> Iterator[str]:
    engine = create_async_engine(with_driver(stage.url), **OPTIONS)
    app = FastAPI()
    protect(app, keys)

    @app.post("/o", status_code=201)
    async def place(session: Annotated[AsyncSession, Depends(keyed_session(engine))]) -> None:
        await session.execute(text(READ))
        await session.execute(text(WRITE))

    with serve_asgi(app) as address:
        yield address
    engine.sync_engine.dispose(close=False)


@contextmanager
def fastapi_in_threads(stage: Stage, keys: Keys) -> Iterator[str]:
    engine = create_engine(with_driver(stage.url, SYNC_DRIVERS), **OPTIONS)
    app = FastAPI()
    protect(app, keys)

    @app.post("/o", status_code=201)
    def place(session: Annotated[Session, Depends(keyed_session(engine))]) -> None:
        session.execute(text(READ))
        session.execute(text(WRITE))

    with serve_asgi(app) as address:
        yield address
    engine.dispose()


@contextmanager
def litestar(stage: Stage, keys: Keys) -> Iterator[str]:
    """It answers errors of its routes by itself, within the middleware."""
    engine = create_async_engine(with_driver(stage.url), **OPTIONS)

    @post("/o")
    async def place(request: Request[Any, Any, Any]) -> None:
        session = await turn_of(request).session_async(engine)
        await session.execute(text(READ))
        await session.execute(text(WRITE))

    app = Litestar([place], middleware=[DefineMiddleware(Asgi, keys=keys)], logging_config=None)
    with serve_asgi(app) as address:
        yield address
    engine.sync_engine.dispose(close=False)


@contextmanager
def plain_wsgi(stage: Stage, keys: Keys) -> Iterator[str]:
    engine = create_engine(with_driver(stage.url, SYNC_DRIVERS), **OPTIONS)

    def place(environ: Any, start: Any) -> Any:
        session = wsgi_turn(environ).session(engine)
        session.execute(text(READ))
        session.execute(text(WRITE))
        start("201 Created", [])
        return [b""]

    with serve_wsgi(Wsgi(place, keys)) as address:
        yield address
    engine.dispose()


@contextmanager
def flask_decorated(stage: Stage, keys: Keys) -> Iterator[str]:
    engine = create_engine(with_driver(stage.url, SYNC_DRIVERS), **OPTIONS)
    own = scoped_session(sessionmaker(engine))
    app = flask.Flask(__name__)

    @app.post("/o")
    @flask_keys.idempotent(keys, lambda: own)
    def place() -> Any:
        own.execute(text(READ))
        own.execute(text(WRITE))
        return "", 201

    app.teardown_appcontext(lambda _: own.remove())
    with serve_wsgi(app) as address:
        yield address
    engine.dispose()


@contextmanager
def django_decorated(stage: Stage, keys: Keys) -> Iterator[str]:
    import psycopg
    from django.core.handlers.wsgi import WSGIHandler
    from django.db import connections
    from django.http import HttpResponse
    from django.test.utils import override_settings
    from django.urls import path

    import django_doors
    from postroom.idempotency import django as django_keys

    alias = "serializable"
    entry = django_doors.entry(stage.url)
    entry["OPTIONS"] = {"isolation_level": psycopg.IsolationLevel.SERIALIZABLE}
    both = {"default": connections.settings["default"], alias: entry}
    connections.settings[alias] = connections.configure_settings(both)[alias]

    @django_keys.idempotent(keys, using=alias)
    def place(request: Any) -> Any:
        with connections[alias].cursor() as cursor:
            cursor.execute(READ)
            cursor.execute(WRITE)
        return HttpResponse(status=201)

    urls = types.ModuleType("serializable_urls")
    urls.urlpatterns = [path("o", place)]  # type: ignore[attr-defined]
    sys.modules["serializable_urls"] = urls
    with (
        override_settings(ROOT_URLCONF="serializable_urls", ALLOWED_HOSTS=["*"], MIDDLEWARE=[]),
        serve_wsgi(WSGIHandler()) as address,
    ):
        yield address
    del connections.settings[alias]


DOORS: list[Opener] = [
    *(fastapi, fastapi_in_threads, litestar, plain_wsgi, flask_decorated, django_decorated)
]


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__)
def test_who_gives_way_is_told_to_come_again(stages: Stages, door: Opener) -> None:
    stage = stages["postgresql"]
    keys = Keys(stage.url, scope=SHARED, policies={"POST /o": SAME})
    left, met = list(range(REQUESTS)), Counter[int]()
    with door(stage, keys) as address, ThreadPoolExecutor(20) as threads:

        def one(number: int) -> httpx.Response:
            return CLIENT.post(f"{address}/o", headers={"Idempotency-Key": f"k{number}"})

        while left:
            answers = list(threads.map(one, left))
            statuses = Counter(answer.status_code for answer in answers)
            assert set(statuses) <= {201, 503}
            met += statuses
            assert len(stage.things()) == met[201], "what was told undone has no effect"
            for answer in answers:
                if answer.status_code == 503:
                    assert answer.headers["retry-after"] == "1"
                    assert answer.json()["type"].endswith(":transaction-conflict")
            told = zip(left, answers, strict=True)
            left = [number for number, answer in told if answer.status_code == 503]
    keys.close()
    assert met[201] == len(stage.things()) == REQUESTS
    assert met[503], "they met"
