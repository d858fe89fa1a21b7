"""Decorators of Flask and Django: a view in one transaction on the application's own session."""

import functools
import sqlite3
import sys
import threading
import types
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from typing import Any

import flask
import httpx
import psycopg
import pymysql
import pytest
from serving import CLIENT, SYNC_DRIVERS, serve_wsgi, with_driver
from sqlalchemy import create_engine, event, text
from sqlalchemy.orm import scoped_session, sessionmaker
from werkzeug.exceptions import NotFound

import django_doors
from doors import mysql_options
from postroom import Outbox, failpoints
from postroom.idempotency import Keys, Policies, Policy
from postroom.idempotency import django as django_keys
from postroom.idempotency import flask as flask_keys
from postroom.idempotency.wsgi import IdempotencyMiddleware
from stages import Stage

POLICY = Policy(required=True)
FRAMEWORKS = ["flask", "flask raw", "flask middleware", "django"]


class Shop:
    def __init__(self) -> None:
        self.address = ""
        self.runs: Counter[str] = Counter()
        self.gate, self.begun = threading.Event(), threading.Event()

    def work(self, wish: dict[str, str]) -> tuple[dict[str, Any], int]:
        """What every view does when its row and its message are written."""
        self.begun.set()
        if wish["do"] == "wait":
            assert self.gate.wait(120)
        if wish["do"] == "fail":
            raise RuntimeError("broken")
        status = int(wish["do"]) if wish["do"].isdecimal() else 201
        return {"name": wish["name"], "n": self.runs[wish["name"]]}, status

    def post(self, key: str | None, name: str, do: str = "", user: str = "ada") -> httpx.Response:
        headers = {"X-User": user} | ({} if key is None else {"Idempotency-Key": key})
        body = {"name": name, "do": do}
        return CLIENT.post(f"{self.address}/orders", json=body, headers=headers, timeout=120)


@contextmanager
def with_flask(stage: Stage, how: str, policy: Policy) -> Iterator[Shop]:
    shop, outbox = Shop(), Outbox()
    engine = create_engine(with_driver(stage.url, SYNC_DRIVERS), pool_size=20, pool_timeout=120)
    if stage.database == "sqlite":
        event.listen(engine, "connect", lambda c, _: c.execute("PRAGMA busy_timeout = 60000"))
    sessions = scoped_session(sessionmaker(engine))
    app = flask.Flask(__name__)
    app.teardown_appcontext(lambda _: close_all())

    def close_all() -> None:
        sessions.remove()
        if "connection" in flask.g:
            flask.g.connection.close()

    def own() -> Any:
        """What the view works on: a session, or the driver's own connection."""
        if how == "flask":
            return sessions
        if "connection" not in flask.g:
            flask.g.connection = connect(stage)
        return flask.g.connection

    def place() -> Any:
        wish = flask.request.get_json()
        session = flask_keys.keyed_session(engine) if how == "flask middleware" else own()
        shop.runs[wish["name"]] += 1
        if how == "flask raw":
            mark = "?" if stage.database == "sqlite" else "%s"
            session.cursor().execute(f"INSERT INTO thing VALUES ({mark})", (wish["name"],))
        else:
            session.execute(text("INSERT INTO thing VALUES (:name)"), {"name": wish["name"]})
        outbox.publish(session, wish, type="placed", topic="orders")
        if wish["do"] == "commit":
            session.commit()
        if wish["do"] == "abort":
            flask.abort(404)
        return NotFound() if wish["do"] == "not found" else shop.work(wish)

    if how == "flask middleware":
        policies = Policies({"POST /orders": replace(policy, mode="same_transaction")})
        keys = Keys(stage.url, scope=lambda environ: environ["HTTP_X_USER"], policies=policies)
        app.wsgi_app = IdempotencyMiddleware(app.wsgi_app, keys)  # type: ignore[method-assign]
        app.post("/orders")(place)
    else:
        keys = Keys(stage.url, scope=lambda request: request.headers["X-User"])
        app.post("/orders")(flask_keys.idempotent(keys, own, policy)(place))
    with serve_wsgi(app) as shop.address:
        yield shop
    engine.dispose()
    keys.close()


def connect(stage: Stage) -> Any:
    if stage.database == "sqlite":
        return sqlite3.connect(stage.url.removeprefix("sqlite:///"), timeout=120)
    if stage.database == "postgresql":
        return psycopg.connect(stage.url)
    options = mysql_options(stage.url)
    return pymysql.connect(database=options.pop("db"), **options)


@contextmanager
def with_django(stage: Stage, policy: Policy) -> Iterator[Shop]:
    import json

    from django.core.handlers.wsgi import WSGIHandler
    from django.db import connections, transaction
    from django.http import Http404, HttpResponseNotFound, JsonResponse
    from django.test.utils import override_settings
    from django.urls import path

    shop, outbox = Shop(), Outbox()
    alias = f"keys_{uuid.uuid4().hex[:8]}"
    entry = django_doors.entry(stage.url) | {"ATOMIC_REQUESTS": True}
    if stage.database == "sqlite":
        entry["OPTIONS"] = {"timeout": 60, "transaction_mode": "IMMEDIATE"}
    both = {"default": connections.settings["default"], alias: entry}
    connections.settings[alias] = connections.configure_settings(both)[alias]
    keys = Keys(stage.url, scope=lambda request: request.headers["X-User"])

    @django_keys.idempotent(keys, policy, using=alias)
    def place(request: Any) -> Any:
        wish = json.loads(request.body)
        shop.runs[wish["name"]] += 1
        with connections[alias].cursor() as cursor:
            cursor.execute("INSERT INTO thing VALUES (%s)", [wish["name"]])
        outbox.publish(connections[alias], wish, type="placed", topic="orders")
        if wish["do"] == "abort":
            raise Http404
        if wish["do"] == "not found":
            return HttpResponseNotFound("no such thing")
        hook = functools.partial(transaction.on_commit, lambda: lose(connections[alias]), alias)
        if wish["do"] == "lose":
            hook()
        if wish["do"] == "lose nested":
            with transaction.atomic(using=alias):
                hook()
        if wish["do"] == "lose robustly":
            hook(robust=True)
        document, status = shop.work(wish)
        return JsonResponse(document, status=status)

    urls = types.ModuleType("view_urls")
    urls.urlpatterns = [path("orders", place)]  # type: ignore[attr-defined]
    sys.modules["view_urls"] = urls
    with (
        override_settings(ROOT_URLCONF="view_urls", ALLOWED_HOSTS=["*"], MIDDLEWARE=[]),
        serve_wsgi(WSGIHandler()) as shop.address,
    ):
        yield shop
    del connections.settings[alias]
    keys.close()


def lose(connection: Any) -> None:
    """The database lets another transaction go first."""
    if connection.vendor == "sqlite":
        with closing(connect_to(connection)) as first, closing(connect_to(connection)) as second:
            first.execute("BEGIN IMMEDIATE")
            second.execute("BEGIN IMMEDIATE")
    words = {
        "postgresql": "DO $$ BEGIN RAISE 'lost' USING ERRCODE = 'deadlock_detected'; END $$",
        "mysql": "SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = 1213, MESSAGE_TEXT = 'lost'",
    }
    with connection.cursor() as cursor:
        cursor.execute(words[connection.vendor])


def connect_to(connection: Any) -> sqlite3.Connection:
    return sqlite3.connect(connection.settings_dict["NAME"], timeout=0)


def opened(framework: str, stage: Stage, policy: Policy) -> AbstractContextManager[Shop]:
    if framework == "django":
        return with_django(stage, policy)
    return with_flask(stage, framework, policy)


@pytest.fixture(params=FRAMEWORKS)
def shop(request: pytest.FixtureRequest, stage: Stage) -> Iterator[Shop]:
    with opened(request.param, stage, POLICY) as shop:
        yield shop


def kind(answer: httpx.Response) -> str:
    return str(answer.json()["type"]).removeprefix("urn:postroom:problem:")


def test_one_commit_holds_everything(shop: Shop, stage: Stage) -> None:
    first, again = shop.post("k", "a"), shop.post("k", "a")
    assert (first.status_code, again.status_code) == (201, 201), first.text
    assert first.content == again.content
    assert again.headers["idempotent-replayed"] == "true"
    assert again.headers["content-type"] == first.headers["content-type"]
    assert kind(shop.post("k", "b")) == "key-reused"
    assert kind(shop.post(None, "b")) == "key-missing"
    assert shop.post("k", "a", user="eve").json()["n"] == 2
    assert stage.things() == ["a", "a"]
    assert len(stage.messages()) == 2


def test_what_fails_leaves_nothing(shop: Shop, stage: Stage) -> None:
    for do, kept in (("fail", False), ("503", False), ("409", False), ("404", True)):
        answers = [shop.post(do, do, do) for _ in range(2)]
        assert {answer.status_code for answer in answers} == {500 if do == "fail" else int(do)}
        assert shop.runs[do] == (1 if kept else 2), do
    assert (stage.things(), stage.messages()) == ([], [])


def test_an_error_beside_the_commit(shop: Shop, stage: Stage) -> None:
    """Before it nothing has happened; after it all has, and the client may ask what."""

    def fail() -> None:
        raise RuntimeError("broken")

    for end, kept in (("before", []), ("after", ["after"])):
        failpoints.arm(f"key.commit.{end}", fail, at=1)
        try:
            assert shop.post(end, end).status_code == 500
        finally:
            failpoints.clear()
        found = stage.things()
        assert [thing for thing in found if thing == end] == kept
        assert len(stage.messages()) == len(found)
        answers = [shop.post(end, end).json()["n"] for _ in range(2)]
        assert answers == [1 if kept else 2] * 2
    assert sorted(stage.things()) == ["after", "before"]
    assert len(stage.messages()) == 2


@pytest.mark.parametrize("how", ["lose", "lose nested", "lose robustly"])
def test_a_hook_after_the_commit_undoes_nothing(stage: Stage, how: str) -> None:
    """Its own conflict is none of the view, which would be sent again, and done again."""
    told = 201 if how == "lose robustly" else 500
    with opened("django", stage, Policy()) as shop:
        assert shop.post("k", "a", how).status_code == told
        again = shop.post("k", "a", how)
        assert (again.status_code, again.headers["idempotent-replayed"]) == (201, "true")
        assert shop.post(None, "b", how).status_code == told
        assert shop.runs == {"a": 1, "b": 1}
    assert stage.things() == ["a", "b"]


@pytest.mark.parametrize("how", ["abort", "not found"])
def test_a_refusal_raised_or_returned_whole_is_kept_too(shop: Shop, stage: Stage, how: str) -> None:
    first, again = shop.post("k", "a", how), shop.post("k", "a", how)
    assert (first.status_code, again.status_code, shop.runs["a"]) == (404, 404, 1)
    assert first.content == again.content
    assert again.headers["idempotent-replayed"] == "true"
    assert (stage.things(), stage.messages()) == ([], [])


def test_many_at_once(shop: Shop, stage: Stage) -> None:
    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(lambda _: shop.post("k", "a"), range(32)))
    assert Counter(answer.status_code for answer in answers) == {201: 32}
    assert len({answer.content for answer in answers}) == 1
    assert stage.things() == ["a"]


@contextmanager
def deadlocks(stage: Stage, losses: int) -> Iterator[None]:
    """The server chooses whoever claims as the victim, so many times. (A sequence counts what is
    rolled back, too.)"""
    stage.query("CREATE SEQUENCE lost")
    stage.query(
        "CREATE FUNCTION lose() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        f" IF nextval('lost') <= {losses} THEN"
        " RAISE 'deadlock detected' USING ERRCODE = 'deadlock_detected'; END IF;"
        " RETURN NEW; END $$"
    )
    stage.query(
        "CREATE TRIGGER lose BEFORE INSERT ON {p}idempotency_key"
        " FOR EACH ROW EXECUTE FUNCTION lose()"
    )
    yield
    stage.query("DROP FUNCTION lose CASCADE")
    stage.query("DROP SEQUENCE lost")


@pytest.mark.parametrize("stage", ["postgresql"], indirect=True)
def test_a_claim_gives_way_as_often_as_there_may_be_others(shop: Shop, stage: Stage) -> None:
    with deadlocks(stage, 40):
        answer = shop.post("k", "a")
    assert (answer.status_code, shop.runs["a"]) == (201, 1), answer.text
    assert stage.things() == ["a"]


# SQLite waits for its file.
@pytest.mark.parametrize("stage", ["postgresql", "mariadb"], indirect=True)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_who_waits_too_long_is_told_so(framework: str, stage: Stage) -> None:
    with (
        opened(framework, stage, Policy(wait_seconds=0.2)) as shop,
        ThreadPoolExecutor(1) as thread,
    ):
        first = thread.submit(shop.post, "k", "a", "wait")
        assert shop.begun.wait(60)
        second = shop.post("k", "a", "wait")
        assert (second.status_code, kind(second)) == (409, "key-in-progress")
        shop.gate.set()
        assert first.result().status_code == 201
        assert shop.post("k", "a", "wait").content == first.result().content
    assert stage.things() == ["a"]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_without_the_store_nothing_is_carried_out(
    framework: str, stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    prefix = "" if stage.database == "postgresql" else stage.prefix
    with opened(framework, stage, POLICY) as shop:
        stage.query(f"ALTER TABLE {{p}}idempotency_key RENAME TO {prefix}hidden")
        try:
            answer = shop.post("k", "a")
        finally:
            stage.query(f"ALTER TABLE {{p}}hidden RENAME TO {prefix}idempotency_key")
        assert (answer.status_code, kind(answer)) == (503, "keys-unreachable")
        (told,) = [line for line in caplog.messages if line.startswith("key.refused")]
        assert "idempotency_key" in told, "what is missing, whatever the driver"
        assert stage.things() == []
        assert shop.post("k", "a").status_code == 201
    assert stage.things() == ["a"]
