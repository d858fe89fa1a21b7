"""What a middleware or decorator makes of a request before anybody carries it out."""

import asyncio
import io
import sqlite3
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
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from werkzeug.test import EnvironBuilder, run_wsgi_app

import django_doors
from postroom.errors import ConfigurationError, WrongCall
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
from postroom.idempotency.rules import BadKey, parse_key
from postroom.idempotency.wsgi import IdempotencyMiddleware as Wsgi
from stages import Stage, Stages

KEY = {"Idempotency-Key": "k"}
SAME = Policy(mode="same_transaction", required=True)


@pytest.fixture
def stage(stages: Stages) -> Stage:
    return stages["sqlite"]


def kind(answer: Any) -> str:
    return str(answer.json()["type"]).removeprefix("urn:postroom:problem:")


def asgi(app: Any, root: str = "") -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, root_path=root)
    return httpx.AsyncClient(transport=transport, base_url="http://shop")


async def test_others_are_served_while_a_large_body_is_compared(stage: Stage) -> None:
    async def take(request: Request) -> JSONResponse:
        return JSONResponse({"bytes": len(await request.body())})

    keys = Keys(stage.url, scope=SHARED)
    app = Starlette(routes=[Route("/import", take, methods=["POST"])])
    app.add_middleware(Asgi, keys=keys)
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0.001)

    others = asyncio.create_task(turn())
    async with asgi(app) as client:
        body = b"[" + b",".join([b"0.1"] * 700_000) + b"]"
        headers = KEY | {"Content-Type": "application/json"}
        answer = await client.post("/import", content=body, headers=headers)
        assert answer.json() == {"bytes": len(body)}
    others.cancel()
    await keys.close_async()
    assert turns > 40


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
    for nobody in ("", (), ("tenant", None), ("tenant", ""), None):
        who[0] = nobody
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


def by_flask(keys: Keys, policy: Policy | None, work: Any) -> Any:
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


def by_decorated_django(keys: Keys, work: Any) -> Any:
    from django.test import Client

    def send(headers: Any) -> Any:
        with django_site(keys, pay=django_keys.idempotent(keys)(lambda request: work())):
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


def test_what_only_looks_has_no_key(stage: Stage) -> None:
    """A preflight must not be refused for want of one, nor a list be told from memory."""
    from django.http import HttpResponse
    from django.test import Client

    keys, looked = Keys(stage.url, scope=SHARED), Counter[str]()

    def look(method: str) -> str:
        looked[method] += 1
        return str(looked[method])

    methods = ["GET", "HEAD", "OPTIONS", "TRACE"]
    app, policy = flask.Flask(__name__), Policy(required=True)
    view = flask_keys.idempotent(keys, lambda: sqlite3.connect(":memory:"), policy)
    app.add_url_rule(
        "/pay",
        view_func=view(lambda: look(flask.request.method)),
        methods=[*methods, "POST"],
        provide_automatic_options=False,
    )
    ours = django_keys.idempotent(keys, policy)
    with django_site(keys, pay=ours(lambda request: HttpResponse(look(request.method)))):
        for open in (app.test_client().open, Client().generic):
            for method in methods:
                for headers in ({}, KEY, KEY):
                    answer = open(path="/pay", method=method, headers=headers)
                    assert (answer.status_code, method) == (200, method)
                    assert "Idempotent-Replayed" not in answer.headers
            assert open(path="/pay", method="POST").status_code == 400
    assert looked == dict.fromkeys(methods, 6)
    assert stage.query("SELECT count(*) FROM {p}idempotency_key") == [(0,)]
    keys.close()


@pytest.mark.parametrize("policy", [SAME, Policy(required=True)])
def test_a_method_of_a_django_class_claims_its_key_itself(stage: Stage, policy: Policy) -> None:
    from django.db import connections
    from django.http import HttpResponse
    from django.test import Client
    from django.utils.decorators import method_decorator
    from django.views import View

    alias = f"keys_{uuid.uuid4().hex[:8]}"
    both = {"default": connections.settings["default"], alias: django_doors.entry(stage.url)}
    connections.settings[alias] = connections.configure_settings(both)[alias]
    policies = {"POST /pay": policy, "PUT /pay": Policy(), "POST /hidden": Policy()}
    keys = Keys(stage.url, scope=SHARED, policies=policies)
    ours = django_keys.idempotent(keys, using=alias)

    class Pay(View):
        @method_decorator(ours)
        def post(self, request: Any) -> Any:
            return HttpResponse(uuid.uuid4().hex)

        def put(self, request: Any) -> Any:
            return HttpResponse(uuid.uuid4().hex)

    with django_site(keys, pay=Pay.as_view(), hidden=lambda request: ours(Pay.as_view())(request)):
        client = Client()
        for send in (client.post, client.put):
            first, again = [
                send("/pay", b"", headers=KEY, content_type="text/plain") for _ in range(2)
            ]
            assert (first.status_code, again.content) == (200, first.content)
            assert again.headers["Idempotent-Replayed"] == "true"
        with pytest.raises(WrongCall, match="claimed this request already"):
            client.post("/hidden", b"", headers=KEY, content_type="text/plain")
    connections[alias].close()
    del connections.settings[alias]
    keys.close()


@pytest.mark.parametrize("root", ["", "/shop"])
async def test_a_redirect_of_the_router_is_followed_with_the_same_key(
    stage: Stage, root: str
) -> None:
    """Wherever the application stands: behind a proxy it has a root."""
    keys = Keys(stage.url, scope=SHARED, policies={"POST /pay": Policy()})

    async def pay(request: Any) -> Response:
        return Response("paid")

    app = Starlette(
        routes=[Route("/pay", pay, methods=["POST"])], middleware=[Middleware(Asgi, keys=keys)]
    )
    async with asgi(app, root) as client:
        answer = await client.post(f"{root}/pay/", headers=KEY, follow_redirects=True)
        assert answer.text == "paid"
    await keys.close_async()


@pytest.mark.parametrize("path", ["/shop-tokens", "/shop/shop-tokens"])
async def test_a_path_that_begins_with_the_letters_of_the_root(stage: Stage, path: str) -> None:
    """A proxy may have taken the root away, or not."""
    keys = Keys(stage.url, scope=SHARED, policies={"POST /shop-tokens": Policy(required=True)})

    async def make(request: Any) -> Response:
        return Response(uuid.uuid4().hex)

    app = Starlette(
        routes=[Route("/shop-tokens", make, methods=["POST"])],
        middleware=[Middleware(Asgi, keys=keys)],
    )
    async with asgi(app, "/shop") as client:
        first, again, other = [
            await client.post(one, headers=KEY, follow_redirects=True)
            for one in (f"{path}/", path, path)
        ]
        assert (first.status_code, first.text) == (200, again.text) == (200, other.text)
        assert kind(await client.post(path)) == "key-missing"
    await keys.close_async()


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("how", ["asgi", "wsgi", "django"])
def test_a_redirect_of_a_view_is_its_answer(stage: Stage, how: str, status: int) -> None:
    keys, runs = Keys(stage.url, scope=SHARED), Counter[str]()
    told = [SEND_ON[how](keys, status, runs) for _ in range(2)]
    assert told == [(status, "/receipts/17")] * 2
    assert runs["run"] == 1
    keys.close()


def _on_by_asgi(keys: Keys, status: int, runs: Counter[str]) -> Any:
    async def pay(request: Any) -> Response:
        runs.update(["run"])
        return RedirectResponse("/receipts/17", status)

    async def send() -> Any:
        app = Starlette(
            routes=[Route("/pay", pay, methods=["POST"])], middleware=[Middleware(Asgi, keys=keys)]
        )
        async with asgi(app) as client:
            answer = await client.post("/pay", headers=KEY)
        await keys.close_async()
        return answer.status_code, answer.headers["location"]

    return asyncio.run(send())


def _on_by_wsgi(keys: Keys, status: int, runs: Counter[str]) -> Any:
    app = flask.Flask(__name__)
    app.post("/pay")(lambda: runs.update(["run"]) or flask.redirect("/receipts/17", status))
    app.wsgi_app = Wsgi(app.wsgi_app, keys)  # type: ignore[method-assign]
    answer = app.test_client().post("/pay", headers=KEY)
    return answer.status_code, answer.headers["location"]


def _on_by_django(keys: Keys, status: int, runs: Counter[str]) -> Any:
    from django.http import HttpResponse
    from django.test import Client

    def pay(request: Any) -> Any:
        runs.update(["run"])
        return HttpResponse(status=status, headers={"Location": "/receipts/17"})

    with django_site(keys, pay=pay):
        answer = Client().post("/pay", b"", content_type="text/plain", headers=KEY)
    return answer.status_code, answer.headers["location"]


SEND_ON: dict[str, Any] = {"asgi": _on_by_asgi, "wsgi": _on_by_wsgi, "django": _on_by_django}


@pytest.mark.parametrize("root", ["", "/shop"])
def test_a_redirect_of_flask_s_router_is_followed_with_the_same_key(
    stage: Stage, root: str
) -> None:
    keys = Keys(stage.url, scope=SHARED, policies={"POST /pay": Policy()})
    app = flask.Flask(__name__)
    app.post("/pay/")(lambda: "paid")
    app.wsgi_app = Wsgi(app.wsgi_app, keys)  # type: ignore[method-assign]
    client, base = app.test_client(), f"http://shop{root}"
    assert client.post("/pay", base_url=base, headers=KEY).status_code == 308
    assert client.post("/pay/", base_url=base, headers=KEY).text == "paid"
    keys.close()


def test_a_decorator_keeps_to_the_policies_of_its_keys(stage: Stage) -> None:
    policies = {"POST /pay": Policy(required=True)}
    keys, runs = Keys(stage.url, scope=SHARED, policies=policies), Counter[str]()
    send = by_flask(keys, None, lambda: runs.update(["run"]))
    assert (send({})[0], send(KEY)[0], runs["run"]) == (400, 200, 1)
    refused = by_decorated_django(keys, lambda: pytest.fail("without its key"))
    assert refused({})[0] == 400
    at_claim = Keys(stage.url, scope=AT_CLAIM, policies={"POST /pay": SAME})
    for decorator in (flask_keys.idempotent(keys, lambda: None), django_keys.idempotent(keys)):
        assert callable(decorator)
    for wrong in (flask_keys.idempotent, django_keys.idempotent):
        with pytest.raises(ConfigurationError, match="a decorator needs a function"):
            wrong(at_claim, lambda: None)  # type: ignore[operator]
    keys.close()
    at_claim.close()


def test_an_async_view_is_refused_by_a_decorator(stage: Stage) -> None:
    async def pay() -> None: ...

    keys = Keys(stage.url, scope=SHARED)
    for decorator in (flask_keys.idempotent(keys, lambda: None), django_keys.idempotent(keys)):
        with pytest.raises(ConfigurationError, match="decorate a"):
            decorator(pay)
    keys.close()


def test_django_views_that_cannot_keep_their_policy_are_not_run(stage: Stage) -> None:
    from django.test import Client

    keys = Keys(stage.url, scope=SHARED, policies={"POST /pay": SAME})
    with (
        django_site(keys, pay=lambda request: pytest.fail("unprotected")),
        pytest.raises(ConfigurationError, match="put @idempotent"),
    ):
        Client().post("/pay", b"", content_type="text/plain", headers=KEY)
    keys.close()


async def test_a_resumable_route_says_whose_key_it_is(stage: Stage) -> None:
    policies = {"POST /ride": Policy(mode="resume", required=True)}
    keys = Keys(stage.url, scope=AT_CLAIM, policies=policies)

    @resumable(keys, "ride")
    async def create(run: Any, wish: Any) -> Any:
        return 201, wish

    async def ride(request: Any) -> Any:
        if user := request.headers.get("x-user"):
            turn_of(request).belongs_to(user)
        return JSONResponse(await create.serve(turn_of(request), request.headers.get("x-user")))

    app = Starlette(
        routes=[Route("/ride", ride, methods=["POST"])], middleware=[Middleware(Asgi, keys=keys)]
    )
    async with asgi(app) as client:
        told = [await client.post("/ride", headers={**KEY, "x-user": who}) for who in ("a", "b")]
        assert [answer.json() for answer in told] == ["a", "b"]
        with pytest.raises(ConfigurationError, match="whose key"):
            await client.post("/ride", headers=KEY)
    await keys.close_async()


def test_django_half_a_body_is_nobody_s_request(stage: Stage) -> None:
    from django.core.handlers.wsgi import WSGIHandler
    from django.http import HttpResponse
    from django.test import RequestFactory

    keys, told = Keys(stage.url, scope=SHARED), []

    def send(body: bytes) -> bytes:
        environ = RequestFactory().post("/pay", b"", "text/plain", headers=KEY).environ
        environ |= {"wsgi.input": io.BytesIO(body), "CONTENT_LENGTH": "8"}
        return b"".join(WSGIHandler()(environ, lambda status, headers: told.append(status)))

    with django_site(keys, pay=lambda request: HttpResponse(request.body)):
        assert b"request-incomplete" in send(b'{"a":')
        assert send(b'{"a": 1}') == b'{"a": 1}'
    assert [status[:3] for status in told] == ["400", "200"]
    keys.close()


def test_flask_reads_a_body_without_a_length_up_to_the_limit(stage: Stage) -> None:
    keys, policy = Keys(stage.url, scope=SHARED), Policy(most_request_bytes=1000)
    stream = io.BytesIO(b"x" * 50_000)
    app = flask.Flask(__name__)
    app.post("/pay")(flask_keys.idempotent(keys, lambda: None, policy)(lambda: "paid"))
    endless = {"wsgi.input_terminated": True, "wsgi.input": stream, "CONTENT_LENGTH": ""}
    answer = app.test_client().post("/pay", headers=KEY, environ_overrides=endless)
    assert (answer.status_code, stream.tell() < 50_000) == (413, True)
    keys.close()


def test_a_list_of_parts_is_a_whole_answer(stage: Stage) -> None:
    keys = Keys(stage.url, scope=SHARED)

    def app(environ: Any, start: Any) -> Any:
        start("200 OK", [("X-Run", uuid.uuid4().hex)])
        return [b"pa", b"", b"id"]

    def send() -> Any:
        told: list[Any] = []
        environ = {"REQUEST_METHOD": "POST", "PATH_INFO": "/pay", "HTTP_IDEMPOTENCY_KEY": "k"}
        body = Wsgi(app, keys)(environ, lambda status, headers: told.append(status))
        return b"".join(body), told

    assert [send(), send()] == [(b"paid", ["200 OK"])] * 2
    keys.close()


def test_a_header_that_a_server_has_joined_was_sent_twice() -> None:
    for joined in ("q,q", "q, q", "k-2, k-3", "a,b", ",", '"a", "b"', '"a","a"', 'a,"b"', '"a",b'):
        with pytest.raises(BadKey, match=r"more than once.*in quotation marks"):
            parse_key([joined])
    for quoted in ("q,q", "q, q", ","):
        assert parse_key([f'"{quoted}"']) == quoted


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
    for parts in (
        ("café", "charge"),
        ("a ", "b "),
        ("tab\t", "x"),
        ("POST /orders", 1),
        ("a, b,c",),
        ('"a"',),
    ):
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


@pytest.mark.parametrize("mode", ["external", "same_transaction"])
@pytest.mark.parametrize("where", ["async", "thread", "method", "after", "before", "json", "query"])
async def test_what_is_found_not_valid_keeps_its_key_if_its_route_has_begun(
    stage: Stage, mode: Any, where: str
) -> None:
    policy = Policy(mode=mode)
    keys = Keys(stage.url, scope=SHARED, policies={"POST /pay": policy})
    engine = create_async_engine(with_driver(stage.url))
    app, runs = FastAPI(), []
    protect(app, keys)

    def refuse() -> None:
        raise RequestValidationError([{"loc": ("body",), "msg": "no such currency"}])

    async def claimed(request: Request) -> Any:
        return await turn_of(request).session_async(engine) if mode != "external" else None

    async def around(session: Annotated[Any, Depends(claimed)]) -> Any:
        if where == "before":
            refuse()
        try:
            yield
        except ZeroDivisionError:
            refuse()

    async def pay(
        around: Annotated[Any, Depends(around)], body: Annotated[Any, Body()] = None, page: int = 0
    ) -> None:
        runs.append(where)
        if where == "async":
            refuse()
        if where == "after":
            raise ZeroDivisionError

    def pay_in_thread(around: Annotated[Any, Depends(around)]) -> None:
        runs.append(where)
        refuse()

    class Payments:
        def pay(self, around: Annotated[Any, Depends(around)]) -> None:
            pay_in_thread(around)

    app.post("/pay")({"thread": pay_in_thread, "method": Payments().pay}.get(where, pay))
    sent = {"json": {"content": b"{", "headers": KEY | {"content-type": "application/json"}}}
    path = "/pay?page=x" if where == "query" else "/pay"
    async with asgi(app) as client:
        first, again = [
            await client.post(path, **sent.get(where, {"headers": KEY}))  # type: ignore[arg-type]
            for _ in range(2)
        ]
    begun = where not in ("before", "json", "query")
    assert (first.status_code, again.status_code, first.content) == (422, 422, again.content)
    assert runs == [where] * begun
    assert ("idempotent-replayed" in again.headers) is begun
    await engine.dispose()
    await keys.close_async()


async def test_authentication_of_the_route_comes_before_an_answer_from_memory(stage: Stage) -> None:
    keys = Keys(stage.url, scope=AT_CLAIM, policies={"POST /pay": SAME, "POST /nobody": SAME})
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


@pytest.mark.parametrize("sub", [Starlette, FastAPI])
async def test_a_mounted_application_is_protected_by_the_one_around_it(
    stage: Stage, sub: Any
) -> None:
    keys = Keys(stage.url, scope=SHARED, policies={"POST /v1/pay": SAME})
    engine = create_async_engine(with_driver(stage.url))

    async def pay(request: Request) -> Response:
        await turn_of(request).session_async(engine)
        return Response(uuid.uuid4().hex)

    app, inner = FastAPI(), sub()
    inner.add_route("/pay", pay, methods=["POST"])
    app.mount("/v1", inner)
    protect(app, keys)
    async with asgi(app) as client:  # which raises what a server would log
        first, again = [await client.post("/v1/pay", headers=KEY) for _ in range(2)]
        other = await client.post("/v1/pay", headers=KEY, content=b"other")
    assert (first.status_code, again.content, kind(other)) == (200, first.content, "key-reused")
    await engine.dispose()
    await keys.close_async()


async def test_what_a_mounted_application_finds_not_valid_keeps_no_key(stage: Stage) -> None:
    keys = Keys(stage.url, scope=SHARED, policies={"POST /shop/v1/pay": SAME})
    engine = create_async_engine(with_driver(stage.url))
    app, inner = FastAPI(), FastAPI()
    protect(app, keys)
    app.router.routes.append(Mount("/shop", routes=[Mount("/v1", inner)]))

    @inner.post("/pay")
    async def pay(
        amount: Annotated[int, Body(embed=True)],
        session: Annotated[Any, Depends(keyed_session(engine))],
    ) -> int:
        return amount

    async with asgi(app) as client:
        wrong = await client.post("/shop/v1/pay", json={"amount": "x"}, headers=KEY)
        mended = await client.post("/shop/v1/pay", json={"amount": 5}, headers=KEY)
    assert (wrong.status_code, mended.text) == (422, "5")
    await engine.dispose()
    await keys.close_async()


async def test_middleware_inside_of_ours_sees_answers_and_no_exceptions(stage: Stage) -> None:
    keys = Keys(stage.url, scope=SHARED, policies={"POST /pay": SAME, "POST /v1/pay": SAME})
    engine = create_async_engine(with_driver(stage.url))
    app, inner, seen = FastAPI(), FastAPI(), []
    app.mount("/v1", inner)

    async def pay(session: Annotated[Any, Depends(keyed_session(engine))]) -> str:
        return uuid.uuid4().hex

    async def watch(request: Request, call_next: Any) -> Any:
        try:
            answer = await call_next(request)
        except Exception as error:
            seen.append(repr(error))
            raise
        seen.append((answer.status_code, answer.headers["content-type"]))
        return answer

    for each in (app, inner):
        each.post("/pay", status_code=201)(pay)
        each.middleware("http")(watch)
    protect(app, keys)
    async with asgi(app) as client:
        for path, watchers in (("/pay", 1), ("/v1/pay", 2)):
            first, again = [await client.post(path, headers=KEY) for _ in range(2)]
            other = await client.post(path, headers=KEY, content=b"other")
            assert (again.content, kind(other)) == (first.content, "key-reused")
            assert again.headers["idempotent-replayed"] == "true"
            json = (201, "application/json")
            assert seen == [json] * 2 * watchers + [(422, "application/problem+json")] * watchers
            seen.clear()
    await engine.dispose()
    await keys.close_async()


@pytest.mark.parametrize("status", [204, 304])
async def test_an_answer_without_a_body_says_nothing_of_its_length(
    stage: Stage, status: int
) -> None:
    """Said again as it was said first (RFC 9110, 8.6)."""
    keys = Keys(stage.url, scope=SHARED, policies={"POST /pay": Policy()})

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body"})

    def wsgi_app(environ: Any, start: Any) -> Any:
        start(f"{status} None", [])
        return []

    def by_wsgi(key: str) -> tuple[int, dict[str, str], bytes]:
        environ = EnvironBuilder("/pay", method="POST", headers={"Idempotency-Key": key})
        content, told, headers = run_wsgi_app(Wsgi(wsgi_app, keys), environ.get_environ())
        return int(told[:3]), {n.lower(): v for n, v in headers}, b"".join(content)

    for replayed in (None, "true"):
        answer = await asgi(Asgi(app, keys)).post("/pay", headers=KEY)
        assert (answer.status_code, answer.content) == (status, b"")
        assert "content-length" not in answer.headers
        assert answer.headers.get("idempotent-replayed") == replayed
        code, headers, content = await asyncio.to_thread(by_wsgi, "j")
        assert (code, content, "content-length" in headers) == (status, b"", False)
        assert headers.get("idempotent-replayed") == replayed
    keys.close()
    await keys.close_async()


@pytest.mark.parametrize("how", ["flask", "django"])
def test_a_body_that_is_not_sent_is_not_said_again(stage: Stage, how: str) -> None:
    """A view may give a 204 a body, which servers leave out."""
    from django.db import connections
    from django.http import HttpResponse
    from django.test import Client

    keys, app = Keys(stage.url, scope=SHARED), flask.Flask(__name__)
    connection = flask_keys.idempotent(
        keys, lambda: sqlite3.connect(stage.url[len("sqlite:///") :])
    )
    app.post("/pay")(connection(lambda: ("paid", 204)))
    alias = f"keys_{uuid.uuid4().hex[:8]}"
    both = {"default": connections.settings["default"], alias: django_doors.entry(stage.url)}
    connections.settings[alias] = connections.configure_settings(both)[alias]
    ours = django_keys.idempotent(keys, using=alias)
    with django_site(keys, pay=ours(lambda request: HttpResponse("paid", status=204))):
        post = app.test_client().post if how == "flask" else Client().post
        answers = [post("/pay", headers=KEY) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [204, 204]
    assert answers[1].headers["Idempotent-Replayed"] == "true"
    assert "Content-Length" not in answers[1].headers
    assert (answers[1].data if how == "flask" else answers[1].content) == b""
    stored = stage.query("SELECT response_body FROM {p}idempotency_key")
    assert stored == [(b"",)]
    connections[alias].close()
    del connections.settings[alias]
    keys.close()
