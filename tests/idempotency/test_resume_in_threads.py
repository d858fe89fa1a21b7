"""`resume` for functions that are not async: the same points, the same worker, a route of Flask."""

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import flask
import httpx
import pytest
from serving import CLIENT, serve_wsgi
from sqlalchemy import text

from helpers import eventually_async
from postroom import Outbox
from postroom.errors import ConfigurationError, KeyLost, KeyReused
from postroom.idempotency import SHARED, Finisher, Keys, Policy, resumable
from postroom.idempotency.wsgi import IdempotencyMiddleware, turn_of
from stages import Stage


class Rides:
    """A service that books a ride, charges for it elsewhere, and sends a receipt."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.keys = Keys(stage.url, scope=SHARED)
        self.charges: Counter[str] = Counter()  # by the key it was called with
        self.attempts: list[int] = []
        self.fail_at = ""
        self.hangs, self.gate, self.woken = threading.Event(), threading.Event(), list[str]()
        self.outbox = Outbox()

        @resumable(self.keys, "rides.create")
        def create(run: Any, ride: Any) -> Any:
            self.attempts.append(run.attempt)
            run.point("created", lambda tx: self.insert(tx, ride["name"]))
            self.break_at("created")
            charge = run.call("charged", lambda: self.charge(run.key_for("charged")))
            self.break_at("charged")
            run.point("receipt", lambda tx: self.publish(tx, ride))
            assert run.recovery_point == "receipt"
            return 201, {"name": ride["name"], "charge": charge}

        self.create = create

    def break_at(self, point: str) -> None:
        if self.fail_at == point:
            raise RuntimeError(f"broken after {point}")

    def insert(self, tx: Any, name: str) -> str:
        tx.execute(text("INSERT INTO thing VALUES (:name)"), {"name": name})
        self.break_at("inserted")
        return name

    def publish(self, tx: Any, ride: Any) -> str:
        return self.outbox.publish(tx, ride, type="ridden", topic="rides").id

    def charge(self, key: str) -> int:
        self.charges[key] += 1
        self.break_at("called")
        if self.fail_at == "hangs":
            self.hangs.set()
            assert self.gate.wait(60)
            self.woken.append(key)
        if self.fail_at == "taken over":
            self.stage.query("UPDATE {p}idempotency_key SET epoch = epoch + 1, owner = 'another'")
        return 5

    def orphan(self) -> None:
        """Its next attempt has come."""
        past = {"sqlite": "0"}.get(self.stage.database, "'2020-01-01'")
        self.stage.query(f"UPDATE {{p}}idempotency_key SET locked_until = {past}")

    def record(self) -> tuple[Any, ...]:
        columns = "status, recovery_point, attempts, request"
        (row,) = self.stage.query(f"SELECT {columns} FROM {{p}}idempotency_key")
        return row


@pytest.fixture
def rides(stage: Stage) -> Iterator[Rides]:
    rides = Rides(stage)
    yield rides
    rides.keys.close()


def test_from_point_to_point(rides: Rides) -> None:
    told = {"name": "a", "charge": 5}
    assert [rides.create("k", {"name": "a"}) for _ in range(2)] == [told, told]
    with pytest.raises(KeyReused):
        rides.create("k", {"name": "b"})
    assert rides.stage.things() == ["a"]
    assert rides.charges == {"shared:rides.create:k:charged": 1}
    assert rides.record() == ("completed", "receipt", 1, None), "its input is needed no more"


@pytest.mark.parametrize(
    ("fail_at", "point", "charged"),
    [("inserted", None, 1), ("called", "created", 2), ("charged", "charged", 1)],
)
async def test_a_run_that_broke_goes_on_behind_its_last_point(
    rides: Rides, fail_at: str, point: str | None, charged: int
) -> None:
    rides.fail_at = fail_at
    with pytest.raises(RuntimeError):
        rides.create("k", {"name": "a"})
    assert rides.record()[:3] == ("failed", point, 1)
    rides.fail_at = ""
    rides.orphan()
    assert await Finisher(rides.create).once() == 1
    assert rides.record()[:3] == ("completed", "receipt", 2)
    assert rides.create("k", {"name": "a"}) == {"name": "a", "charge": 5}
    assert (rides.stage.things(), rides.attempts) == (["a"], [1, 2])
    assert len(rides.stage.messages()) == 1
    assert rides.charges == {"shared:rides.create:k:charged": charged}
    await rides.keys.close_async()


async def test_a_thread_that_hangs_is_left_behind(rides: Rides) -> None:
    """Its place is free again, and the thread reaches no point when it wakes up."""
    rides.fail_at = "created"
    with pytest.raises(RuntimeError):
        rides.create("k", {"name": "a"})
    rides.fail_at = "hangs"
    rides.create.policy = replace(rides.create.policy, longest_seconds=0.2)
    rides.orphan()
    assert await asyncio.wait_for(Finisher(rides.create).once(), 20) == 1
    await eventually_async(rides.hangs.is_set, 60)
    rides.create.policy = replace(rides.create.policy, longest_seconds=900)
    rides.fail_at = ""
    rides.orphan()
    assert await Finisher(rides.create).once() == 1
    before = rides.record()
    assert before[:3] == ("completed", "receipt", 3)
    rides.gate.set()
    await eventually_async(lambda: rides.woken, 60)
    assert rides.record() == before
    assert len(rides.stage.messages()) == 1
    await rides.keys.close_async()


def test_calls_side_by_side_forget_none_and_a_name_stands_for_one_thing(rides: Rides) -> None:
    did, broken = list[str](), True

    @resumable(rides.keys, "many")
    def many(run: Any, wish: Any) -> list[str]:
        with ThreadPoolExecutor(4) as threads:
            done = threads.map(lambda name: run.call(name, lambda: did.append(name)), "abcd")
            assert len(list(done)) == 4
        if broken:
            raise RuntimeError("broken")
        with pytest.raises(ConfigurationError, match="a was reached already"):
            run.call("a", lambda: did.append("a"))
        with pytest.raises(ConfigurationError, match="inside another"):
            run.point("outer", lambda tx: run.point("inner", lambda tx: 1))
        return sorted(did)

    with pytest.raises(RuntimeError):
        many("k", None)
    broken = False
    assert many("k", None) == ["a", "b", "c", "d"]


def test_who_was_taken_over_reaches_no_point(rides: Rides) -> None:
    rides.fail_at = "taken over"
    with pytest.raises(KeyLost):
        rides.create("k", {"name": "a"})
    assert rides.record()[:2] == ("pending", "created")


def test_a_route_that_resumes(rides: Rides) -> None:
    policies = {"POST /rides": Policy(mode="resume")}
    front = Keys(rides.stage.url, scope=SHARED, policies=policies)
    app = flask.Flask(__name__)
    app.wsgi_app = IdempotencyMiddleware(app.wsgi_app, front)  # type: ignore[method-assign]

    @app.post("/rides")
    def book() -> Any:
        return {"booked": rides.create.serve(turn_of(flask.request), flask.request.get_json())}

    with serve_wsgi(app) as address:

        def post(name: str, key: str | None = "k") -> httpx.Response:
            headers = {"Idempotency-Key": key} if key else {}
            return CLIENT.post(f"{address}/rides", json={"name": name}, headers=headers, timeout=60)

        rides.fail_at = "charged"
        assert post("a").status_code == 500
        rides.fail_at = ""
        first, again = post("a"), post("a")
        assert (first.status_code, again.status_code) == (201, 201)
        assert first.content == again.content == b'{"name": "a", "charge": 5}'
        assert again.headers["idempotent-replayed"] == "true"
        assert post("b").status_code == 422
        assert post("c", key=None).status_code == 400
    assert rides.stage.things() == ["a"]
    assert set(rides.charges.values()) == {1}


def test_whatever_is_answered_the_route_may_return_what_it_was_given(
    rides: Rides, caplog: pytest.LogCaptureFixture
) -> None:
    """Flask would log an error for None, though the client is told the right thing."""
    policies = {"POST /rides": Policy(mode="resume"), "POST /gone": Policy(mode="resume")}
    front = Keys(rides.stage.url, scope=SHARED, policies=policies)
    app = flask.Flask(__name__)
    app.wsgi_app = IdempotencyMiddleware(app.wsgi_app, front)  # type: ignore[method-assign]
    given: list[Any] = []

    @resumable(rides.keys, "gone")
    def gone(run: Any, wish: Any) -> Any:
        return 204, None

    def view() -> Any:
        work = gone if flask.request.path == "/gone" else rides.create
        given.append(work.serve(turn_of(flask.request), flask.request.get_json()))
        return given[-1]

    app.add_url_rule("/<path:name>", view_func=lambda name: view(), methods=["POST"])
    client, key = app.test_client(), {"Idempotency-Key": "k"}

    def status(name: str, path: str = "/rides", headers: Any = key) -> int:
        return client.post(path, json={"name": name}, headers=headers).status_code

    assert [status("a"), status("a"), status("b")] == [201, 201, 422]
    assert status("a", headers={}) == 400
    assert [status("a", "/gone"), status("a", "/gone")] == [204, 204]
    rides.stage.query("UPDATE {p}idempotency_key SET status = 'indeterminate'")
    assert status("a") == 409
    assert given[:2] == [{"name": "a", "charge": 5}] * 2
    assert [each.levelname for each in caplog.records if each.name != "postroom"] == []
