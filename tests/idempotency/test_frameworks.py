"""`external` keys over HTTP with every framework: one request, one effect, and doubt where due."""

import logging
import re
import socket
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Literal

import pytest
from frameworks import FRAMEWORKS, PATH, Opener, Service
from serving import CLIENT

from helpers import eventually
from postroom import signals
from postroom.idempotency import Answer, NotDone, Policy
from servers import free_port
from stages import Stage, Stages

# Every framework on a file, and one of each kind on every server.
PLACES = [(name, "sqlite") for name in FRAMEWORKS] + [
    (name, database) for database in ("postgresql", "mariadb") for name in ("starlette", "flask")
]
CANARY = "canary-s3cr3t"
POLICY = Policy(required=True, most_stored_bytes=1000, lease_seconds=30)


class Place:
    """A framework and a database; services are opened on them with a policy."""

    def __init__(self, opener: Opener, stage: Stage, stack: ExitStack, name: str) -> None:
        self._opener, self.stage, self._stack, self.name = opener, stage, stack, name

    def open(self, policy: Policy = POLICY, url: str | None = None) -> Service:
        return self._stack.enter_context(self._opener(url or self.stage.url, policy))

    def status(self) -> list[str]:
        return [row[0] for row in self.stage.query("SELECT status FROM {p}idempotency_key")]

    def hide(self, table: str, name: str) -> None:
        """Give a table of ours another name, so that nothing can be asked of it."""
        prefix = "" if self.stage.database == "postgresql" else self.stage.prefix
        self.stage.query(f"ALTER TABLE {{p}}{table} RENAME TO {prefix}{name}")

    def lose_the_owner(self) -> None:
        """Its process died, and the lease is over."""
        past = {"sqlite": "0"}.get(self.stage.database, "'2020-01-01'")
        self.stage.query(
            f"UPDATE {{p}}idempotency_key SET status = 'pending', locked_until = {past}"
        )


@pytest.fixture(params=PLACES, ids="-".join)
def place(request: pytest.FixtureRequest, stages: Stages) -> Iterator[Place]:
    name, database = request.param
    with ExitStack() as stack:
        yield Place(FRAMEWORKS[name], stages[database], stack, name)


def kind(answer: Any) -> str:
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    return str(answer.json()["type"]).removeprefix("urn:postroom:problem:")


def test_one_effect_and_one_answer(place: Place) -> None:
    service = place.open()
    first, again = service.post("k"), service.post('"k"')
    assert first.status_code == again.status_code == 201, first.text
    assert first.content == again.content
    assert "idempotent-replayed" not in first.headers
    assert again.headers["idempotent-replayed"] == "true"
    assert again.headers["location"] == "/1"
    assert "set-cookie" in first.headers
    assert "set-cookie" not in again.headers
    assert first.json()["key"] == f"ada:POST%20{PATH}:k:card"
    assert kind(service.post("k", "b")) == "key-reused"
    assert kind(service.post(None)) == "key-missing"
    assert kind(service.post('"k')) == "key-invalid"
    assert service.charged == {"a": 1}
    # Another user's key is another key.
    eve = service.post("k", **{"X-User": "eve"})
    assert eve.json()["n"] == 2


def test_refusals_that_last_and_that_pass(place: Place) -> None:
    service = place.open()
    assert [service.post("x", do="404").json()["n"] for _ in range(2)] == [1, 1]
    assert [service.post("y", "b", do="409").json()["n"] for _ in range(2)] == [1, 2]
    assert [service.post("z", "c", do="429").status_code for _ in range(2)] == [429, 429]
    assert service.charged == {"a": 1, "b": 2, "c": 2}


@pytest.mark.parametrize("do", ["fail", "503"])
def test_an_error_leaves_a_doubt_and_is_not_run_again(place: Place, do: str) -> None:
    service = place.open()
    assert service.post("k", do=do).status_code == (500 if do == "fail" else 503)
    for _ in range(2):
        again = service.post("k", do=do)
        assert (again.status_code, kind(again)) == (409, "key-indeterminate")
    assert service.charged == {"a": 1}
    assert place.status() == ["indeterminate"]


def test_a_policy_may_try_again_after_an_error(place: Place) -> None:
    service = place.open(Policy(on_error="retry"))
    assert [service.post("k", do="503").json()["n"] for _ in range(2)] == [1, 2]


def test_who_comes_meanwhile_is_told_so(place: Place) -> None:
    service = place.open()
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(service.post, "k", do="wait")
        assert service.begun.wait(60)
        second = service.post("k", do="wait")
        assert (second.status_code, kind(second)) == (409, "key-in-progress")
        assert int(second.headers["retry-after"]) >= 1
        service.gate.set()
        assert first.result().status_code == 201
    assert service.charged == {"a": 1}


def test_who_comes_meanwhile_may_wait(place: Place) -> None:
    service = place.open(Policy(wait_seconds=30))
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(service.post, "k", do="wait")
        assert service.begun.wait(60)
        second = threads.submit(service.post, "k", do="wait")
        service.gate.set()
        assert first.result().content == second.result().content
    assert service.charged == {"a": 1}


def test_a_lost_owner_leaves_a_doubt(place: Place) -> None:
    service = place.open()
    service.post("k")
    place.lose_the_owner()
    assert kind(service.post("k")) == "key-indeterminate"
    assert kind(service.post("k", "b")) == "key-reused", "compared before all else"
    assert (service.charged, place.status()) == ({"a": 1}, ["indeterminate"])


def test_verify_ends_a_doubt(place: Place) -> None:
    found: list[Any] = [None]
    asked = []

    def verify(name: Any) -> Any:
        asked.append(name.key)
        return found[0]

    service = place.open(Policy(verify=verify))
    service.post("k", do="fail")
    assert kind(service.post("k", do="fail")) == "key-indeterminate"
    found[0] = Answer(201, (("content-type", "text/plain"), ("set-cookie", "no")), b"charged")
    for _ in range(2):
        again = service.post("k", do="fail")
        assert (again.status_code, again.content) == (201, b"charged")
        assert "set-cookie" not in again.headers
    assert (service.charged["a"], asked) == (1, ["k", "k"])
    service.post("j", "b", do="503")
    found[0] = NotDone
    assert service.post("j", "b", do="503").status_code == 503
    assert service.charged["b"] == 2


def test_a_verify_that_says_something_else_leaves_the_doubt(place: Place) -> None:
    parts: list[tuple[Any, ...]] = [("200",), (200, {"a": "b"}), (200, [("a", 1)]), (200, (), "b")]
    parts += [(204, (), b"b"), (304, (), b"b"), (100,), (600,), (True,), (200, [("a", "b", "c")])]
    parts += [(200, [pair]) for pair in (("a\n", "b"), ("a", "b\r\nc: d"), ("a", "→"), ("", "b"))]
    said = [True, {"status": 200}, *(Answer(*each) for each in parts)]
    told: list[str] = []
    stop = signals.listen(lambda _, fields: told.append(fields["error"]), ["key.unverified"])
    left = iter(said)
    service = place.open(Policy(verify=lambda name: next(left)))
    service.post("k", do="fail")
    for _ in said:
        again = service.post("k", do="fail")
        assert (again.status_code, kind(again)) == (409, "key-indeterminate")
    assert (service.charged, place.status()) == ({"a": 1}, ["indeterminate"])
    stop()
    assert told[0] == "verify returned bool; it may return an Answer, NotDone or None"
    assert len(told) == len(said)


def test_a_lease_is_kept_while_the_work_lasts(place: Place) -> None:
    service = place.open(Policy(lease_seconds=0.6))
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(service.post, "k", do="wait")
        assert service.begun.wait(60)
        before = place.stage.query("SELECT locked_until FROM {p}idempotency_key")
        eventually(
            lambda: place.stage.query("SELECT locked_until FROM {p}idempotency_key") > before, 60
        )
        service.gate.set()
        assert first.result().status_code == 201


def test_whoever_comes_back_late_with_the_answer_ends_the_doubt(place: Place) -> None:
    service = place.open()
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(service.post, "k", do="wait")
        assert service.begun.wait(60)
        place.lose_the_owner()
        assert kind(service.post("k", do="wait")) == "key-indeterminate"
        service.gate.set()
        assert first.result().status_code == 201
    assert service.post("k", do="wait").content == first.result().content
    assert service.charged == {"a": 1}


def test_whoever_was_overruled_writes_nothing(place: Place) -> None:
    """An operator decided meanwhile: the late answer is dropped, and theirs is given."""
    service = place.open()
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(service.post, "k", do="wait")
        assert service.begun.wait(60)
        body = "decode('6279', 'hex')" if place.stage.database == "postgresql" else "x'6279'"
        place.stage.query(
            "UPDATE {p}idempotency_key SET status = 'completed', epoch = epoch + 1,"
            f" response_status = 202, response_headers = '[]', response_body = {body}"
        )
        service.gate.set()
        late = first.result()
        assert (late.status_code, late.content) == (202, b"by")
        assert late.headers["idempotent-replayed"] == "true"


def test_large_and_streamed_answers_leave_a_tombstone(place: Place) -> None:
    service = place.open()
    wishes = {"large": b"x" * 5000}
    if place.name in ("starlette", "flask"):
        wishes["stream"] = b"abc"
    for do, content in wishes.items():
        assert service.post(do, do=do).content == content
        again = service.post(do, do=do)
        assert (again.status_code, kind(again)) == (409, "response-not-kept")
    assert service.charged == {"a": len(wishes)}


def test_a_body_above_the_limit_is_refused(place: Place) -> None:
    service = place.open(Policy(most_request_bytes=100))
    answer = service.post("k", "a" * 200)
    assert (answer.status_code, kind(answer)) == (413, "request-too-large")
    assert not service.charged


def test_a_client_that_hangs_up_tears_nothing(place: Place) -> None:
    service = place.open()
    host, port = service.address.removeprefix("http://").split(":")
    body = b'{"name": "a", "do": "wait"}'
    with socket.create_connection((host, int(port))) as client:
        client.sendall(
            f"POST {PATH} HTTP/1.1\r\nHost: x\r\nIdempotency-Key: k\r\nContent-Length: {len(body)}"
            "\r\nContent-Type: application/json\r\n\r\n".encode()
            + body
        )
        assert service.begun.wait(60)
    service.gate.set()
    eventually(lambda: place.status() == ["completed"], 60)
    assert service.post("k", do="wait").headers["idempotent-replayed"] == "true"
    assert service.charged == {"a": 1}


@pytest.mark.parametrize("on_unreachable", ["refuse", "run"])
def test_without_its_table_nothing_is_carried_out(
    place: Place, on_unreachable: Literal["refuse", "run"]
) -> None:
    """That is a mistake in the installation, which no policy makes up for."""
    service = place.open(Policy(on_unreachable=on_unreachable))
    place.hide("idempotency_key", "hidden")
    try:
        answer = service.post("k")
    finally:
        place.hide("hidden", "idempotency_key")
    assert (answer.status_code, kind(answer)) == (503, "keys-unreachable")
    assert not service.charged


# A file is always there.
@pytest.mark.parametrize("place", [one for one in PLACES if one[1] != "sqlite"], indirect=True)
def test_an_unreachable_store_refuses_or_lets_run(place: Place) -> None:
    nobody = re.sub(r":\d+/", f":{free_port()}/", place.stage.url)
    service = place.open(POLICY, nobody)
    answer = service.post("k")
    assert (answer.status_code, kind(answer)) == (503, "keys-unreachable")
    assert not service.charged
    service = place.open(Policy(on_unreachable="run"), nobody)
    assert service.post("k").json()["n"] == 1


def test_many_at_once_with_one_key(place: Place) -> None:
    service = place.open(Policy(wait_seconds=60))
    with ThreadPoolExecutor(40) as threads:
        answers = list(threads.map(lambda _: service.post("k"), range(40)))
    assert Counter(answer.status_code for answer in answers) == {201: 40}
    assert len({answer.content for answer in answers}) == 1
    assert service.charged == {"a": 1}


def test_a_key_in_the_body(place: Place) -> None:
    service = place.open(replace(POLICY, body_field="name"))
    first, again = service.post(None, "k"), service.post("k", "k")
    assert first.status_code == 201, first.text
    assert first.content == again.content
    assert again.headers["idempotent-replayed"] == "true"
    assert kind(service.post(None, "k", "202")) == "key-reused"
    assert kind(service.post("j", "k")) == "key-invalid"
    assert kind(service.post(None, "")) == "key-invalid"
    without = CLIENT.post(f"{service.address}{PATH}", json={"do": ""}, timeout=120)
    assert kind(without) == "key-missing"
    assert service.charged == {"k": 1}


def test_secrets_of_a_request_are_kept_nowhere(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither what authenticates it, nor what stands in its body, nor a cookie it is given."""
    caplog.set_level(logging.DEBUG)
    heard: list[Any] = []
    unlisten = signals.listen(lambda name, fields: heard.append((name, fields)))
    told = {"fingerprint_headers": ("authorization",), "stored_headers": ("Set-Cookie",)}
    service = place.open(replace(POLICY, **told))
    secrets = {"Authorization": f"Bearer {CANARY}-token", "Cookie": f"session={CANARY}-cookie"}

    def post(key: str, do: str = "", user: str = "ada", **headers: str) -> Any:
        body = {"name": "a", "do": do, "card": f"{CANARY}-card", "cookie": f"{CANARY}-given"}
        named = {"Idempotency-Key": key, "X-User": user, **secrets, **headers}
        return CLIENT.post(f"{service.address}{PATH}", json=body, headers=named, timeout=120)

    try:
        first, again = post("k"), post("k")
        others = [
            again,
            service.post("k", **{"X-User": "ada"}),  # other content, and nobody's token
            service.post("k", **{"X-User": "bob"}),
            post("k", Authorization="Bearer none"),
            post("failing", "fail"),
            post("failing", "fail"),
            post("x" * 300),
        ]
    finally:
        unlisten()
    assert first.headers["set-cookie"] == f"s={CANARY}-given", "the first has its cookie"
    assert [answer.status_code for answer in others] == [201, 422, 201, 422, 500, 409, 400]
    for answer in others:
        assert CANARY not in f"{answer.headers} {answer.text}"
    rows = place.stage.query("SELECT * FROM {p}idempotency_key")
    assert (len(rows), len(heard) > 0) == (3, True)
    # The client that the test itself is logs what it is given.
    ours = [each for each in caplog.records if not each.name.startswith(("httpcore", "httpx"))]
    logged = [caplog.handler.format(each) for each in ours]
    assert CANARY not in f"{rows} {heard} {logged}"
