"""`resume`: recovery points, and a worker that finishes what others began."""

import asyncio
import itertools
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest
from serving import CLIENT, serve_asgi
from sqlalchemy import text
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import JSONResponse
from starlette.routing import Route

from helpers import eventually_async
from postroom import Outbox, failpoints, signals
from postroom.errors import BadKey, ConfigurationError, KeyLost, KeyReused, PostroomError
from postroom.idempotency import SHARED, Answer, Finisher, Keys, Policy, idempotent, resumable
from postroom.idempotency.asgi import IdempotencyMiddleware, turn_of
from postroom.idempotency.problems import PROBLEMS
from stages import Stage


class Rides:
    """A service that books a ride, charges for it elsewhere, and sends a receipt."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.keys = Keys(stage.url, scope=SHARED)
        self.charges: Counter[str] = Counter()  # by the key it was called with
        self.runs = 0
        self.fail_at = ""
        self.stay = asyncio.Event()
        self.stay.set()
        self.outbox = Outbox()

        @resumable(self.keys, "rides.create")
        async def create(run: Any, ride: Any) -> Any:
            self.runs += 1
            await run.point("created", lambda tx: self.insert(tx, ride["name"]))
            self.break_at("created")
            charge = await run.call("charged", lambda: self.charge(run.key_for("charged")))
            self.break_at("charged")
            await run.point("receipt", lambda tx: self.publish(tx, ride))
            return 201, {"name": ride["name"], "charge": charge}

        self.create = create

    def break_at(self, point: str) -> None:
        if self.fail_at == point:
            raise RuntimeError(f"broken after {point}")

    async def insert(self, tx: Any, name: str) -> str:
        await tx.execute(text("INSERT INTO thing VALUES (:name)"), {"name": name})
        self.break_at("inserted")
        return name

    async def publish(self, tx: Any, ride: Any) -> str:
        return self.outbox.publish(tx, ride, type="ridden", topic="rides").id

    async def charge(self, key: str) -> int:
        await self.stay.wait()
        self.charges[key] += 1
        self.break_at("called")
        return 5

    def orphan(self, key: str = "") -> None:
        """Its next attempt has come; leases are long, so that none ends by itself."""
        self.lease_until("0", "'2020-01-01'", key)

    def lease_until(self, sqlite: str, others: str, key: str = "") -> None:
        moment = sqlite if self.stage.database == "sqlite" else others
        column = "`key`" if self.stage.database == "mariadb" else "key"
        where = f" WHERE {column} = '{key}'" if key else ""
        self.stage.query(f"UPDATE {{p}}idempotency_key SET locked_until = {moment}{where}")

    def record(self) -> tuple[Any, ...]:
        (row,) = self.stage.query("SELECT status, recovery_point, attempts FROM {p}idempotency_key")
        return row


@pytest.fixture
async def rides(stage: Stage) -> AsyncIterator[Rides]:
    rides = Rides(stage)
    yield rides
    await rides.keys.close_async()


async def test_from_point_to_point(rides: Rides) -> None:
    told = {"name": "a", "charge": 5}
    assert await rides.create("k", {"name": "a"}) == told
    assert await rides.create("k", {"name": "a"}) == told
    with pytest.raises(KeyReused):
        await rides.create("k", {"name": "b"})
    assert rides.stage.things() == ["a"]
    assert rides.charges == {"shared:rides.create:k:charged": 1}
    assert rides.record() == ("completed", "receipt", 1)


@pytest.mark.parametrize(
    ("fail_at", "point", "charged"),
    [
        ("inserted", None, 1),
        ("created", "created", 1),
        ("called", "created", 2),
        ("charged", "charged", 1),
    ],
)
@pytest.mark.parametrize("by", ["client", "worker"])
async def test_a_run_that_broke_goes_on_behind_its_last_point(
    rides: Rides, fail_at: str, point: str | None, charged: int, by: str
) -> None:
    rides.fail_at = fail_at
    with pytest.raises(RuntimeError):
        await rides.create("k", {"name": "a"})
    assert rides.record() == ("failed", point, 1)
    rides.fail_at = ""
    if by == "worker":
        finisher = Finisher(rides.create)
        rides.lease_until("4102444800000000", "'2100-01-01'")
        assert await finisher.once() == 0, "its next attempt has not come"
        rides.orphan()
        assert await finisher.once() == 1
        assert rides.record() == ("completed", "receipt", 2)
    assert await rides.create("k", {"name": "a"}) == {"name": "a", "charge": 5}
    assert rides.stage.things() == ["a"]
    assert len(rides.stage.messages()) == 1
    # A call that was made before the crash is made again, with the same key.
    assert rides.charges == {"shared:rides.create:k:charged": charged}


async def test_calls_and_points_side_by_side_forget_none(rides: Rides) -> None:
    did, broken = [], True

    async def effect(name: str) -> str:
        did.append(name)
        await asyncio.sleep(0)
        return name

    async def row(tx: Any, name: str) -> None:
        await tx.execute(text("INSERT INTO thing VALUES (:name)"), {"name": name})

    @resumable(rides.keys, "many")
    async def many(run: Any, wish: Any) -> list[str]:
        calls = [run.call(name, lambda name=name: effect(name)) for name in "abc"]
        points = [run.point(name, lambda tx, name=name: row(tx, name)) for name in "xyz"]
        done = await asyncio.gather(*calls, *points)
        if broken:
            raise RuntimeError("broken")
        return done[:3]

    with pytest.raises(RuntimeError):
        await many("k", None)
    broken = False
    rides.orphan()
    assert await many("k", None) == ["a", "b", "c"]
    assert (did, rides.stage.things()) == (["a", "b", "c"], ["x", "y", "z"])


async def test_a_name_stands_for_one_thing(rides: Rides) -> None:
    tried = []

    async def fail_once(item: int) -> int:
        tried.append(item)
        if len(tried) == 1:
            raise ConnectionError
        return item

    @resumable(rides.keys, "loop")
    async def loop(run: Any, items: list[int]) -> Any:
        for item in items:
            await run.call("item", lambda item=item: fail_once(item))

    @resumable(rides.keys, "again")
    async def again(run: Any, item: int) -> Any:
        try:
            return await run.call("item", lambda: fail_once(item))
        except ConnectionError:
            return await run.call("item", lambda: fail_once(item))

    @resumable(rides.keys, "nested")
    async def nested(run: Any, _: Any) -> Any:
        return await run.point("outer", lambda tx: run.call("inner", lambda: 1))

    assert await again("k", 7) == 7, "what failed may be tried again"
    with pytest.raises(ConfigurationError, match="item was reached already"):
        await loop("k", [1, 2, 3])
    assert tried == [7, 7, 1]
    with pytest.raises(ConfigurationError, match="inside another"):
        async with asyncio.timeout(30):  # or it would wait for itself
            await nested("k", None)


async def test_who_was_taken_over_reaches_no_point(rides: Rides) -> None:
    """It was frozen longer than its lease, and somebody else goes on with it."""
    rides.stay.clear()
    first = asyncio.ensure_future(rides.create("k", {"name": "a"}))
    reached = "SELECT 1 FROM {p}idempotency_key WHERE recovery_point = 'created'"
    await eventually_async(lambda: rides.stage.query(reached), 60)
    rides.stage.query("UPDATE {p}idempotency_key SET epoch = epoch + 1, owner = 'another'")
    rides.stay.set()
    with pytest.raises(KeyLost):
        await first
    status, point, _ = rides.record()
    assert (status, point) == ("pending", "created")
    assert rides.stage.things() == ["a"]


async def test_two_workers_share_orphans(rides: Rides) -> None:
    rides.fail_at = "created"
    for n in range(10):
        with pytest.raises(RuntimeError):
            await rides.create(f"k{n}", {"name": f"n{n}"})
    rides.fail_at, rides.runs = "", 0
    rides.orphan()
    one, two = Finisher(rides.create), Finisher(rides.create)
    assert sum(await asyncio.gather(one.once(), two.once())) == 10
    assert rides.runs == 10
    assert set(rides.charges.values()) == {1}


async def test_a_worker_runs_until_it_is_stopped(rides: Rides) -> None:
    rides.fail_at = "created"
    with pytest.raises(RuntimeError):
        await rides.create("k", {"name": "a"})
    rides.fail_at = ""
    rides.orphan()
    finisher = Finisher(rides.create, poll_seconds=0.05)
    task = asyncio.ensure_future(finisher.run())
    await eventually_async(lambda: rides.record()[0] == "completed", 60)
    finisher.stop()
    await asyncio.wait_for(task, 60)


@pytest.mark.parametrize("trouble", ["failed", "refused"])
async def test_what_cannot_be_adopted_is_not_tried_at_once_again(
    rides: Rides, trouble: str
) -> None:
    """As in a database that is only read, or where others are always first."""
    rides.fail_at = "created"
    for n in range(2):
        with pytest.raises(RuntimeError):
            await rides.create(f"k{n}", {"name": f"n{n}"})
    rides.fail_at = ""
    rides.orphan()
    looks: list[float] = []
    loop = asyncio.get_running_loop()

    def adopt() -> None:
        looks.append(loop.time())
        if trouble == "failed":
            raise ConnectionError("cannot execute UPDATE in a read-only transaction")
        rides.stage.query("UPDATE {p}idempotency_key SET epoch = epoch + 1")

    failpoints.arm("sql.adopt.before", adopt)
    finisher = Finisher(rides.create, poll_seconds=0.5, at_once=1)
    task = asyncio.ensure_future(finisher.run())
    try:
        await eventually_async(lambda: len(looks) >= 3, 60)
        assert min(b - a for a, b in itertools.pairwise(looks)) > 0.4
        failpoints.clear()
        await eventually_async(lambda: len(rides.charges) == 2, 60)
    finally:
        failpoints.clear()
        finisher.stop()
        await asyncio.wait_for(task, 60)


async def test_who_has_ended_one_run_looks_for_the_next_at_once(rides: Rides) -> None:
    rides.fail_at = "created"
    for n in range(6):
        with pytest.raises(RuntimeError):
            await rides.create(f"k{n}", {"name": f"n{n}"})
    rides.fail_at = ""
    rides.orphan()
    finisher = Finisher(rides.create, poll_seconds=2, at_once=1)
    task = asyncio.ensure_future(finisher.run())
    await eventually_async(lambda: len(rides.charges) == 6, 6)
    finisher.stop()
    await asyncio.wait_for(task, 60)


async def test_a_run_that_hangs_holds_up_no_other(
    rides: Rides, caplog: pytest.LogCaptureFixture
) -> None:
    rides.fail_at = "created"
    for key in ("hangs", "goes on"):
        with pytest.raises(RuntimeError):
            await rides.create(key, {"name": key})
    rides.fail_at = ""
    rides.stay.clear()  # a call without a timeout
    rides.orphan("hangs")
    finisher = Finisher(rides.create, poll_seconds=0.05, grace_seconds=0.1)
    task = asyncio.ensure_future(finisher.run())
    await eventually_async(lambda: rides.runs == 3, 60)
    rides.stay = asyncio.Event()
    rides.stay.set()
    rides.orphan("goes on")
    done = "SELECT 1 FROM {p}idempotency_key WHERE status = 'completed'"
    await eventually_async(lambda: rides.stage.query(done), 20)
    finisher.stop()
    await asyncio.wait_for(task, 20)

    # Its lease ends, and somebody goes on with it; no longer than it may take.
    rides.create.policy = replace(rides.create.policy, longest_seconds=0.2)
    rides.stay.clear()
    rides.orphan("hangs")
    assert await asyncio.wait_for(Finisher(rides.create).once(), 20) == 1
    assert "with key 'hangs' did not end within 0.2 s" in caplog.text
    rides.create.policy = replace(rides.create.policy, longest_seconds=900)
    rides.stay.set()
    rides.orphan("hangs")
    assert await Finisher(rides.create).once() == 1
    assert await rides.create("hangs", {"name": "hangs"}) == {"name": "hangs", "charge": 5}
    assert rides.stage.things() == ["goes on", "hangs"]
    assert set(rides.charges.values()) == {1}


async def test_attempts_that_are_spent_need_a_person(rides: Rides) -> None:
    rides.fail_at = "created"
    for _ in range(6):
        with pytest.raises(RuntimeError):
            await rides.create("k", {"name": "a"})
    assert rides.record() == ("indeterminate", "created", 6)


@pytest.mark.parametrize("first", [17, 199, 600, True])
async def test_a_number_that_is_no_status_is_not_sent_as_one(rides: Rides, first: Any) -> None:
    """It is a mistake in the program: told to each who asks, and to a person in the end."""
    told, runs = [], 0

    @resumable(rides.keys, "sum")
    async def total(run: Any, wish: Any) -> Any:
        nonlocal runs
        runs += 1
        await run.point("counted", lambda tx: count(tx))
        return first, "total"

    async def count(tx: Any) -> None:
        await tx.execute(text("INSERT INTO thing VALUES ('counted')"))

    stop = signals.listen(lambda _, fields: told.append(fields), only=["key.indeterminate"])
    try:
        with pytest.raises(ConfigurationError, match=r"a status from 200 to 599.*\[17, …\]"):
            await total("k", None)
        assert rides.record() == ("failed", "counted", 1)
        for _ in range(10):
            rides.orphan()
            await Finisher(total).once()
    finally:
        stop()
    assert (rides.record(), runs) == (("indeterminate", "counted", 6), 6)
    assert rides.stage.things() == ["counted"]
    (doubt,) = told
    assert "a status from 200 to 599" in doubt["error"]


@pytest.mark.parametrize("first", [200, 404, 599])
async def test_a_pair_with_a_status_is_a_status_and_a_body(rides: Rides, first: int) -> None:
    @resumable(rides.keys, "sum")
    async def total(run: Any, wish: Any) -> Any:
        return wish

    @resumable(rides.keys, "told")
    async def told(run: Any, wish: Any) -> Any:
        return first, wish

    assert await total("k", [17, "total"]) == [17, "total"]
    assert await told("k", "total") == "total"


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ((204, {"a": 1}), "204 has no body"),
        (Answer(304, (), b"a"), "304 has no body"),
        (Answer(99), "from 200 to 599"),
        (Answer(200, (("link", "a\r\nb: c"),)), "'link'"),
        (Answer(200, (("link", "→"),)), "'link'"),
        (Answer(200, (), "text"), "no bytes"),  # type: ignore[arg-type]
    ],
)
async def test_what_cannot_be_sent_is_not_kept(rides: Rides, said: Any, why: str) -> None:
    @resumable(rides.keys, "told")
    async def told(run: Any, wish: Any) -> Any:
        return said

    with pytest.raises(ConfigurationError, match=why):
        await told("k", None)
    assert rides.record()[0] == "failed"


async def test_a_run_may_end_without_a_body(rides: Rides) -> None:
    @resumable(rides.keys, "told")
    async def told(run: Any, wish: Any) -> Any:
        return 204, None

    assert [await told("k", None) for _ in range(2)] == [None, None]
    query = "SELECT response_status, response_body FROM {p}idempotency_key"
    assert [(status, bytes(body)) for status, body in rides.stage.query(query)] == [(204, b"")]


async def test_keys_of_a_run_are_those_of_any_function(rides: Rides) -> None:
    @resumable(rides.keys, "told")
    async def told(run: Any, wish: Any) -> Any:
        return wish

    @idempotent("told too", key="key", keys=rides.keys)
    async def told_too(key: Any) -> Any:
        return str(key)

    id = uuid.UUID(int=7)
    for key in (17, "17", id, str(id)):
        assert await told(key, "a") == "a"
        await told_too(key)
    stored = rides.stage.query("SELECT count(*) FROM {p}idempotency_key")
    assert stored == [(4,)]
    for wrong in ("", "x" * 256, "a\nb", None, True, 1.5):
        for call in (lambda: told(wrong, "a"), lambda: told_too(wrong)):  # noqa: B023
            with pytest.raises(BadKey, match="the key of told") as caught:
                await call()
            assert isinstance(caught.value, PostroomError)
            assert isinstance(caught.value, ValueError)


async def test_values_of_a_statement_that_failed_are_written_nowhere(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    keys = Keys(stage.url, scope=SHARED)

    @resumable(keys, "break")
    async def broken(run: Any, wish: Any) -> None:
        secret = {"value": "canary-secret"}
        await run.point(
            "x", lambda tx: tx.execute(text("INSERT INTO nowhere VALUES (:value)"), secret)
        )

    with pytest.raises(Exception, match="canary-secret"):  # it is the caller's own
        await broken("k", {})
    ((error,),) = stage.query("SELECT error FROM {p}idempotency_key")
    assert "nowhere" in error
    assert "canary-secret" not in error + caplog.text
    await keys.close_async()


async def test_a_run_that_fails_is_told_of_with_the_place_of_its_error(
    rides: Rides, caplog: pytest.LogCaptureFixture
) -> None:
    """A Finisher raises it to nobody."""
    told: list[dict[str, Any]] = []
    stop = signals.listen(lambda _, fields: told.append(fields), only=["key.failed"])
    try:
        rides.fail_at = "created"
        with pytest.raises(RuntimeError):
            await rides.create("k", {"name": "a"})
        for _ in range(5):
            rides.orphan()
            assert await Finisher(rides.create).once() == 1
    finally:
        stop()
    assert [fields.pop("attempts") for fields in told] == [1, 2, 3, 4, 5, 6]
    assert [fields.pop("retry_in_seconds") for fields in told] == [5, 10, 20, 40, 80, None]
    same = {"operation": "rides.create", "idempotency_key": "k", "error": "RuntimeError"}
    assert told == [same] * 6
    failed = [each for each in caplog.records if each.getMessage().startswith("key.failed ")]
    assert {each.levelname for each in failed} == {"WARNING"}
    assert all(str(each.exc_text).endswith(", in break_at") for each in failed)
    assert "broken after created" not in caplog.text, "nobody knows what its text holds"


@contextmanager
def open_rides(stage: Stage, policy: Policy) -> Iterator[tuple[Rides, str]]:
    """Rides behind a route, and the address of their service."""
    rides = Rides(stage)
    front = Keys(stage.url, scope=SHARED, policies={"POST /rides": policy})

    async def book(request: Any) -> Any:
        return JSONResponse(await rides.create.serve(turn_of(request), await request.json()))

    app = Starlette(
        routes=[Route("/rides", book, methods=["POST"])],
        middleware=[Middleware(IdempotencyMiddleware, keys=front)],
    )
    with serve_asgi(app) as address:
        yield rides, address


def test_a_route_that_resumes(stage: Stage) -> None:
    with open_rides(stage, Policy(mode="resume", required=True)) as (rides, address):

        def post(name: str) -> httpx.Response:
            headers = {"Idempotency-Key": "k"}
            return CLIENT.post(f"{address}/rides", json={"name": name}, headers=headers, timeout=60)

        rides.fail_at = "charged"
        assert post("a").status_code == 500
        rides.fail_at = ""
        first, again = post("a"), post("a")
        assert (first.status_code, again.status_code) == (201, 201)
        assert first.content == again.content == b'{"name": "a", "charge": 5}'
        assert "idempotent-replayed" not in first.headers
        assert again.headers["idempotent-replayed"] == "true"
        assert post("b").status_code == 422
    assert stage.things() == ["a"]
    assert set(rides.charges.values()) == {1}


def test_a_route_that_resumes_by_a_key_in_the_body(stage: Stage) -> None:
    rides = Rides(stage)
    policies = {"POST /rides": Policy(mode="resume", required=True, body_field="ride")}
    front = Keys(stage.url, scope=SHARED, policies=policies)

    async def book(request: Any) -> Any:
        return JSONResponse(await rides.create.serve(turn_of(request), await request.json()))

    app = Starlette(
        routes=[Route("/rides", book, methods=["POST"])],
        middleware=[Middleware(IdempotencyMiddleware, keys=front)],
    )
    with serve_asgi(app) as address:

        def post(body: Any, **headers: str) -> httpx.Response:
            return CLIENT.post(f"{address}/rides", json=body, headers=headers, timeout=60)

        wish, header = {"ride": "k", "name": "a"}, "Idempotency-Key"
        rides.fail_at = "charged"
        assert post(wish).status_code == 500
        rides.fail_at = ""
        first, again = post(wish), post(wish, **{header: "k"})
        assert (first.status_code, first.content) == (again.status_code, again.content)
        assert (first.status_code, again.headers["idempotent-replayed"]) == (201, "true")
        assert post(wish | {"name": "b"}).status_code == 422
        assert post(wish, **{header: "j"}).status_code == 400
        assert post({"name": "a"}).status_code == 400
    assert stage.things() == ["a"]
    assert rides.charges == {"shared:rides.create:k:charged": 1}


@pytest.mark.parametrize("mode", ["resume", "external"])
def test_without_a_key_there_is_nothing_to_go_on_from(stage: Stage, mode: Any) -> None:
    """Its client is told so; where the policy is no such one, nobody is told that it was done."""
    with open_rides(stage, Policy(mode=mode, body_field="ride")) as (rides, address):
        answer = CLIENT.post(f"{address}/rides", json={"name": "a"}, timeout=60)
        if mode == "resume":
            assert (answer.status_code, answer.json()["title"]) == (400, PROBLEMS["key-missing"][1])
            assert "the member 'ride' of the body" in answer.json()["detail"]
        else:
            assert answer.status_code == 500
    assert (rides.runs, stage.things()) == (0, [])
