"""Forms under the decorators: compared by fields and files, whoever has parsed them before."""

import io
import json
import sqlite3
import sys
import types
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import flask
import pytest

import django_doors
from postroom.errors import WrongCall
from postroom.idempotency import SHARED, Keys, Policy
from postroom.idempotency import django as django_keys
from postroom.idempotency import flask as flask_keys
from stages import Stage, Stages

URLENCODED = "application/x-www-form-urlencoded"
TEA, GOLD = b"name=tea&n=1", b"name=gold&n=1"
# Looks at a request before its view does: nothing, or as loggers and checks against CSRF do.
Look = Callable[[Any], Any]


@pytest.fixture
def stage(stages: Stages) -> Stage:
    return stages["sqlite"]


@pytest.fixture
def keys(stage: Stage) -> Iterator[Keys]:
    keys = Keys(stage.url, scope=SHARED)
    yield keys
    keys.close()


def parts(*fields: tuple[str, bytes], boundary: str = "b1") -> tuple[bytes, str]:
    """A form with files (`name; filename="…"`) and its content type."""
    lines = b"".join(
        f'--{boundary}\r\nContent-Disposition: form-data; name="{name.partition(";")[0]}"'
        f"{name[len(name.partition(';')[0]) :]}\r\n\r\n".encode()
        + content
        + b"\r\n"
        for name, content in fields
    )
    whole = lines + f"--{boundary}--\r\n".encode()
    return whole, f"multipart/form-data; boundary={boundary}"


FILE = 'f; filename="x.txt"'
FIRST = parts(("name", b"tea"), (FILE, b"one"))
SAME = parts(("name", b"tea"), (FILE, b"one"), boundary="another")
OTHERS = [
    parts(("name", b"gold"), (FILE, b"one")),
    parts(("name", b"tea"), (FILE, b"two")),
    parts(("name", b"tea"), ('f; filename="y.txt"', b"one")),
    parts(("name", b"tea"), ('g; filename="x.txt"', b"one")),
    parts(("name", b"tea"), ("f", b"one")),
    parts(("name", b"tea")),
    parts((FILE, b"one")),
]


class Shop:
    """A view that says what it was sent, and how often it was called."""

    def __init__(self, send: Callable[..., Any]) -> None:
        self.send = send
        self.runs = 0

    def post(self, body: bytes, content_type: str, key: str = "k", **how: Any) -> tuple[int, Any]:
        status, text = self.send(body, content_type, {"Idempotency-Key": key}, **how)
        return status, json.loads(text)


@contextmanager
def with_flask(keys: Keys, policy: Policy) -> Iterator[Shop]:
    app = flask.Flask(__name__)
    app.testing = True
    look: list[Look] = []

    @app.before_request
    def before() -> None:
        for each in look:
            each(flask.request)

    def connection() -> Any:
        return sqlite3.connect(keys.engines.url.removeprefix("sqlite:///"))

    @app.route("/pay", methods=["POST", "PUT"])
    @flask_keys.idempotent(keys, connection, policy)
    def pay() -> Any:
        shop.runs += 1
        request = flask.request
        files = {name: each.read().decode() for name, each in request.files.items()}
        return {**request.form.to_dict(), **files, "bytes": len(request.get_data())}

    def send(body: bytes, kind: str, headers: Any, before: Any = None, method: str = "POST") -> Any:
        look[:] = [before] if before else []
        answer = app.test_client().open(
            "/pay", method=method, data=body, content_type=kind, headers=headers
        )
        return answer.status_code, answer.get_data(as_text=True)

    shop = Shop(send)
    yield shop


@contextmanager
def with_django(keys: Keys, policy: Policy) -> Iterator[Shop]:
    from django.db import connections
    from django.http import JsonResponse
    from django.test import Client
    from django.test.utils import override_settings
    from django.urls import clear_url_caches, path

    alias = f"forms_{uuid.uuid4().hex[:8]}"
    here = django_doors.entry(keys.engines.url)
    both = {"default": connections.settings["default"], alias: here}
    connections.settings[alias] = connections.configure_settings(both)[alias]
    look: list[Look] = []

    def middleware(get_response: Any) -> Any:
        def respond(request: Any) -> Any:
            for each in look:
                each(request)
            return get_response(request)

        return respond

    @django_keys.idempotent(keys, policy, using=alias)
    def pay(request: Any) -> Any:
        shop.runs += 1
        if not look:  # as a view may that has its own way with files
            request.upload_handlers = list(request.upload_handlers)
        files = {name: each.read().decode() for name, each in request.FILES.items()}
        return JsonResponse({**request.POST.dict(), **files})

    def send(body: bytes, kind: str, headers: Any, before: Any = None, method: str = "POST") -> Any:
        look[:] = [before] if before else []
        client = Client()
        answer = client.generic(method, "/pay", body, content_type=kind, headers=headers)
        return answer.status_code, answer.content.decode()

    urls = types.ModuleType("form_urls")
    urls.urlpatterns = [path("pay", pay)]  # type: ignore[attr-defined]
    urls.look = middleware  # type: ignore[attr-defined]
    sys.modules["form_urls"] = urls
    clear_url_caches()
    shop = Shop(send)
    with override_settings(
        ROOT_URLCONF="form_urls", ALLOWED_HOSTS=["*"], MIDDLEWARE=["form_urls.look"]
    ):
        yield shop
    connections[alias].close()
    del connections.settings[alias]


DOORS = {"flask": with_flask, "django": with_django}
FORM: dict[str, Look] = {
    "flask": lambda request: request.form.get("csrf_token"),
    "django": lambda request: request.POST.get("csrfmiddlewaretoken"),
}
STREAM: dict[str, Look] = {
    "flask": lambda request: request.stream.read(),
    "django": lambda request: request.read(),
}


@pytest.fixture(params=DOORS)
def door(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("parsed", [False, True], ids=["fresh", "parsed"])
def test_another_form_is_another_request(keys: Keys, door: str, parsed: bool) -> None:
    before = FORM[door] if parsed else None
    with DOORS[door](keys, Policy(required=True)) as shop:
        for body, other in ((TEA, GOLD), (b"a=1&a=2", b"a=2&a=1"), (b"a=&b=1", b"a=1&b=")):
            first = shop.post(body, URLENCODED, body.decode(), before=before)
            assert first[0] == 200, first
            assert shop.post(body, URLENCODED, body.decode(), before=before) == first
            assert shop.post(other, URLENCODED, body.decode(), before=before)[0] == 422
        assert shop.runs == 3
        first = shop.post(*FIRST, before=before)
        assert (first[0], first[1]["name"], first[1]["f"]) == (200, "tea", "one"), first
        for again in (FIRST, SAME):
            assert shop.post(*again, before=before) == first
        for another in OTHERS:
            assert shop.post(*another, before=before)[0] == 422, another
        assert shop.runs == 4


@pytest.mark.parametrize("form", [(TEA, URLENCODED), FIRST], ids=["fields", "files"])
def test_it_is_the_same_form_whoever_has_parsed_it(keys: Keys, door: str, form: Any) -> None:
    with DOORS[door](keys, Policy(required=True)) as shop:
        first = shop.post(*form)
        assert first[0] == 200
        assert shop.post(*form, before=FORM[door]) == first
        other = shop.post(*form, "j", before=FORM[door])
        assert other[0] == 200
        assert shop.post(*form, "j") == other
        assert shop.runs == 2


def test_a_body_that_somebody_else_has_taken_is_not_claimed_for(keys: Keys, door: str) -> None:
    def both(request: Any) -> None:
        STREAM[door](request)
        FORM[door](request)

    with DOORS[door](keys, Policy(required=True)) as shop:
        for before in (STREAM[door], both):
            for form in (FIRST, (TEA, URLENCODED), (b'{"a": 1}', "application/json")):
                with pytest.raises(WrongCall, match="has read the body of this request"):
                    shop.post(*form, before=before)
        assert shop.runs == 0


def test_a_form_with_nothing_in_it(keys: Keys, door: str) -> None:
    with DOORS[door](keys, Policy(required=True)) as shop:
        for form in (parts(), (b"", URLENCODED)):
            assert shop.post(*form, form[1], before=FORM[door])[0] == 200
            assert shop.post(*FIRST, form[1], before=FORM[door])[0] == 422


def test_what_is_no_form_is_compared_byte_by_byte(keys: Keys, door: str) -> None:
    with DOORS[door](keys, Policy(required=True)) as shop:
        for method in ("POST", "PUT"):
            first = shop.post(b"no form " * 20, FIRST[1], method, method=method)
            assert (first[0], "name" in first[1]) == (200, False)
            assert shop.post(b"no form " * 20, FIRST[1], method, method=method) == first
            assert shop.post(b"no farm " * 20, FIRST[1], method, method=method)[0] == 422
        assert shop.runs == 2


def test_a_json_body_is_whole_though_somebody_asked_for_a_form(keys: Keys, door: str) -> None:
    with DOORS[door](keys, Policy(required=True, body_field="key")) as shop:
        for before in (None, FORM[door]):
            assert shop.post(b'{"a": 1}', "application/json", before=before)[0] == 200
            assert shop.post(b'{"a": 2}', "application/json", before=before)[0] == 422
        assert shop.runs == 1


def test_flask_bodies_without_a_length(keys: Keys) -> None:
    def chunked(request: Any, body: bytes) -> None:
        request.environ |= {"wsgi.input": io.BytesIO(body), "wsgi.input_terminated": True}
        request.environ |= {"HTTP_TRANSFER_ENCODING": "chunked"}

    def taken(request: Any) -> None:
        chunked(request, b"all of it")
        request.get_json(silent=True, cache=False, force=True)

    with with_flask(keys, Policy(required=True)) as shop:
        assert shop.post(b"", "text/plain", before=lambda r: chunked(r, b"one"))[0] == 200
        assert shop.post(b"", "text/plain", before=lambda r: chunked(r, b"two"))[0] == 422
        with pytest.raises(WrongCall, match="has read the body of this request"):
            shop.post(b"", "text/plain", "j", before=taken)


def test_django_says_whose_limit_it_is(keys: Keys) -> None:
    with with_django(keys, Policy(required=True)) as shop:
        status, problem = shop.post(b"a" * 3_000_000, "text/plain")
        assert (status, problem["type"]) == (413, "urn:postroom:problem:request-too-large")
        assert "DATA_UPLOAD_MAX_MEMORY_SIZE, which is 2621440" in problem["detail"]
        status, problem = shop.post(b"a" * 5_000_000, "text/plain")
        assert (status, "4194304 bytes" in problem["detail"]) == (413, True)
