"""`@idempotent` for plain functions: on every kind of connection, and on connections of ours."""

import asyncio
import functools
import sqlite3
import sys
import threading
import time
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from serving import SYNC_DRIVERS, with_driver
from somebody import somebody_at
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine

from doors import DOORS, Door, Open
from helpers import eventually_async
from postroom import failpoints
from postroom.errors import (
    ConfigurationError,
    KeyInDoubt,
    KeyInProgress,
    KeyReused,
    ResultNotKept,
    UnknownConnection,
    WouldCommitAlone,
    WrongCall,
)
from postroom.idempotency import (
    SHARED,
    Answer,
    Finisher,
    Keys,
    Name,
    NotDone,
    Policy,
    idempotent,
    resumable,
)
from postroom.ops.keys import keys_resolve
from stages import Stage, Stages

each_door = pytest.mark.parametrize("door", DOORS, ids=str)


async def place(opened: Open, key: str, name: str, runs: Counter[str]) -> Any:
    """Write a thing once for each key, in the caller's transaction."""

    @idempotent("place", key="key", tx="tx", compare=["name"])
    async def place_async(tx: Any, key: str, name: str) -> Any:
        runs[name] += 1
        await opened.execute(f"INSERT INTO thing VALUES ('{name}')")
        return {"name": name, "n": runs[name]}

    @idempotent("place", key="key", tx="tx", compare=["name"])
    def place_sync(tx: Any, key: str, name: str) -> Any:
        runs[name] += 1
        return {"name": name, "n": runs[name]}

    if opened.is_async:
        return await place_async(opened.tx, key, name)
    before = runs[name]
    result = await opened.call(place_sync, opened.tx, key, name)
    if runs[name] > before:
        await opened.execute(f"INSERT INTO thing VALUES ('{name}')")
    return result


@each_door
async def test_once_for_each_key_in_the_caller_s_transaction(door: Door, stages: Stages) -> None:
    stage, runs = stages[door.database], Counter[str]()
    async with door.open(stage.url) as opened:
        assert await place(opened, "k", "a", runs) == {"name": "a", "n": 1}
        assert stage.query("SELECT 1 FROM {p}idempotency_key") == [], "the caller commits"
        await opened.rollback()
        assert await place(opened, "k", "a", runs) == {"name": "a", "n": 2}, "it was forgotten"
        await opened.commit()
        assert await place(opened, "k", "a", runs) == {"name": "a", "n": 2}
        with pytest.raises(KeyReused, match="other arguments"):
            await place(opened, "k", "b", runs)
        await opened.rollback()
        assert await place(opened, "j", "b", runs) == {"name": "b", "n": 1}
        await opened.commit()
    assert stage.things() == ["a", "b"]
    assert runs == {"a": 2, "b": 1}


@each_door
async def test_a_connection_that_commits_by_itself_is_refused(door: Door, stages: Stages) -> None:
    stage = stages[door.database]
    async with door.open(stage.url, alone=True) as opened:
        with pytest.raises(WouldCommitAlone, match="record of this request"):
            await place(opened, "k", "a", Counter())
    assert stage.query("SELECT 1 FROM {p}idempotency_key") == []


@pytest.mark.parametrize("how", ["sync", "async"])
async def test_outside_of_the_database(stage: Stage, how: str) -> None:
    keys = Keys(stage.url, scope=SHARED)
    runs: Counter[str] = Counter()
    broken = True

    def work(order: str, amount: int) -> dict[str, int]:
        runs[order] += 1
        if order == "doubt" and broken:
            raise ConnectionError("no answer")
        return {"charged": amount}

    async def work_async(order: str, amount: int) -> dict[str, int]:
        return work(order, amount)

    found: list[Any] = [None]
    policy = Policy(verify=lambda name: found[0])
    decorate = idempotent("charge", key="order", keys=keys, policy=policy)
    function: Any = decorate(work_async if how == "async" else work)

    async def charge(order: str, amount: int) -> Any:
        if how == "async":
            return await function(order, amount)
        return await asyncio.to_thread(function, order, amount)

    assert [await charge("17", 5) for _ in range(3)] == [{"charged": 5}] * 3
    with pytest.raises(KeyReused):
        await charge("17", 6)
    with pytest.raises(ConnectionError):
        await charge("doubt", 1)
    with pytest.raises(KeyInDoubt, match="postroom keys resolve"):
        await charge("doubt", 1)
    broken, found[0] = False, NotDone
    assert await charge("doubt", 1) == {"charged": 1}
    assert runs == {"17": 1, "doubt": 2}
    await keys.close_async()


@pytest.mark.parametrize("how", ["sync", "async"])
async def test_a_verify_that_says_something_else_leaves_the_doubt_of_a_function(
    stage: Stage, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    keys, runs = Keys(stage.url, scope=SHARED), 0

    def work(key: str) -> None:
        nonlocal runs
        runs += 1
        raise ConnectionError

    async def work_async(key: str) -> None:
        work(key)

    async def verify(name: Any) -> Any:
        return True

    policy = Policy(verify=verify if how == "async" else lambda name: True)
    decorate = idempotent("pay", key="key", keys=keys, policy=policy)
    pay: Any = decorate(work_async if how == "async" else work)

    async def ask() -> None:
        await (pay("k") if how == "async" else asyncio.to_thread(pay, "k"))

    with pytest.raises(ConnectionError):
        await ask()
    with pytest.raises(KeyInDoubt):
        await ask()
    assert (runs, stage.query("SELECT status FROM {p}idempotency_key")) == (1, [("indeterminate",)])
    told = 'key.unverified operation=pay idempotency_key=k error="verify returned bool'
    assert told in caplog.text
    await keys.close_async()


def test_of_many_threads_one_carries_it_out(stage: Stage) -> None:
    keys = Keys(stage.url, scope=SHARED)
    runs, barrier = Counter[str](), threading.Barrier(20)

    @idempotent("charge", key="order", keys=keys, policy=Policy(wait_seconds=60))
    def charge(order: str) -> int:
        runs[order] += 1
        return runs[order]

    def one(_: int) -> list[int]:
        barrier.wait()
        return [charge(f"o{n}") for n in range(5)]

    with ThreadPoolExecutor(20) as threads:
        assert set(map(tuple, threads.map(one, range(20)))) == {(1,) * 5}
    assert set(runs.values()) == {1}
    keys.close()


def test_who_comes_meanwhile_is_refused(stages: Stages) -> None:
    keys = Keys(stages["sqlite"].url, scope=SHARED)
    begun, gate = threading.Event(), threading.Event()

    @idempotent("slow", key="order", keys=keys)
    def slow(order: str) -> str:
        begun.set()
        assert gate.wait(120)
        return order

    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(slow, "1")
        assert begun.wait(60)
        with pytest.raises(KeyInProgress):
            slow("1")
        gate.set()
        assert first.result() == "1"
    keys.close()


def turns_of(thread: threading.Thread) -> int:
    """How often it has slept and was woken, as the system counts."""
    status = Path(f"/proc/self/task/{thread.native_id}/status").read_text("utf-8")
    return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])


@pytest.mark.skipif(sys.platform != "linux", reason="counts what Linux counts")
def test_a_lease_that_is_kept_no_longer_wakes_nobody(stages: Stages) -> None:
    keys = Keys(stages["sqlite"].url, scope=SHARED)
    woken: list[int] = []

    @idempotent("slow", key="k", keys=keys, policy=Policy(lease_seconds=3, longest_seconds=1))
    def slow(k: str) -> None:
        keeper = keys.beats._thread
        assert keeper is not None
        time.sleep(1.3)  # until it is past its end, and would be due
        before = turns_of(keeper)
        time.sleep(1)
        woken.append(turns_of(keeper) - before)

    slow("1")
    assert woken[0] < 30
    keys.close()


def test_a_short_lease_is_kept_by_whoever_sleeps(stages: Stages) -> None:
    keys, others = (Keys(stages["sqlite"].url, scope=SHARED) for _ in range(2))
    short = Policy(lease_seconds=0.9)

    @idempotent("slow", key="k", keys=keys, policy=short)
    def slow(k: str, seconds: float) -> int:
        time.sleep(seconds)
        return 1

    @idempotent("slow", key="k", keys=others, policy=short)
    def again(k: str, seconds: float) -> int:
        raise AssertionError("it is under way")

    slow("1", 0)
    time.sleep(0.35)  # there is a thread, which sleeps for a second now
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(slow, "2", 1.5)
        time.sleep(0.85)
        with pytest.raises(KeyInProgress):
            again("2", 1.5)
        assert first.result() == 1
    keys.close()
    others.close()


def test_wishes_that_cannot_be(stages: Stages) -> None:
    keys = Keys(stages["sqlite"].url, scope=SHARED)
    with pytest.raises(ConfigurationError, match="tx= "):
        idempotent("x", key="k")
    with pytest.raises(ConfigurationError, match="external"):
        idempotent("x", key="k", keys=keys, policy=Policy(mode="resume"))
    with pytest.raises(ConfigurationError, match="no argument 'k'"):
        idempotent("x", key="k", keys=keys)(lambda order: None)
    with pytest.raises(ConfigurationError, match="compare"):
        idempotent("x", key="order", keys=keys)(lambda order, thing: None)("1", object())
    with pytest.raises(ConfigurationError, match="1 to 255"):
        idempotent("x", key="order", keys=keys)(lambda order: None)("")
    with pytest.raises(ConfigurationError, match="must be JSON"):
        idempotent("x", key="order", keys=keys)(lambda order: object())("1")
    with pytest.raises(ConfigurationError, match="scope"):
        Keys("sqlite:///x.db", scope="ada")  # type: ignore[arg-type]
    inside = idempotent("x", key="order", tx="tx")
    with pytest.raises(WrongCall, match="x was called with tx=None: give the session or conn"):
        inside(lambda tx, order: None)(None, "1")
    with pytest.raises(UnknownConnection, match="a session or connection of your own is needed"):
        inside(lambda tx, order: None)(create_engine("sqlite://"), "1")
    with pytest.raises(ConfigurationError, match="a Finisher goes on with what @resumable"):
        Finisher(inside)  # type: ignore[arg-type]
    named = idempotent("y", key="order", keys=keys)(lambda order, at: str(order))
    assert named(uuid.UUID(int=1), uuid.UUID(int=2)) == str(uuid.UUID(int=1))
    keys.close()


@pytest.mark.parametrize("how", ["sync", "async"])
async def test_a_lease_is_kept_while_the_work_lasts(stages: Stages, how: str) -> None:
    stage = stages["sqlite"]
    keys = Keys(stage.url, scope=SHARED)
    gate, begun = threading.Event(), threading.Event()
    decorate = idempotent("slow", key="order", keys=keys, policy=Policy(lease_seconds=0.6))

    def slow(order: str) -> str:
        begun.set()
        assert gate.wait(120)
        return order

    async def slow_async(order: str) -> str:
        return await asyncio.to_thread(slow, order)

    if how == "async":
        work = asyncio.ensure_future(decorate(slow_async)("1"))
    else:
        work = asyncio.ensure_future(asyncio.to_thread(decorate(slow), "1"))

    def lease() -> Any:
        return stage.query("SELECT locked_until FROM {p}idempotency_key")

    await eventually_async(begun.is_set, 60)
    before = lease()
    await eventually_async(lambda: lease() > before, 60)
    gate.set()
    assert await work == "1"
    await keys.close_async()


@pytest.mark.parametrize("where", ["tx", "keys"])
async def test_a_result_too_large_to_be_kept(stages: Stages, where: str) -> None:
    stage = stages["sqlite"]
    keys = Keys(stage.url, scope=SHARED)
    policy, runs = Policy(most_stored_bytes=10), Counter[str]()
    options: Any = {"tx": "tx"} if where == "tx" else {"keys": keys}

    @idempotent("large", key="order", policy=policy, compare=[], **options)
    def large(tx: Any, order: str) -> str:
        runs[order] += 1
        return "x" * 20

    connection = sqlite3.connect(stage.url.removeprefix("sqlite:///"))
    with connection:
        assert large(connection, "1") == "x" * 20
    with connection, pytest.raises(ResultNotKept, match="was carried out"):
        large(connection, "1")
    connection.close()
    assert runs == {"1": 1}
    keys.close()


class Charges:
    def __init__(self) -> None:
        self.done: list[str] = []

    async def __call__(self, order: str, tx: Any = None) -> str:
        self.done.append(order)
        return order


@pytest.mark.parametrize("where", ["tx", "keys"])
async def test_what_is_asynchronous_is_awaited(stages: Stages, where: str) -> None:
    stage = stages["sqlite"]
    keys, charge = Keys(stage.url, scope=SHARED), Charges()
    named: dict[str, Any] = {"object": charge, "partial": functools.partial(charge, tx=None)}
    engine = create_async_engine(with_driver(stage.url))
    async with engine.begin() as tx:
        for operation, function in named.items():
            options: Any = {"tx": "tx"} if where == "tx" else {"keys": keys}
            once: Any = idempotent(operation, key="order", compare=[], **options)(function)
            assert [await once("1", tx=tx) for _ in range(2)] == ["1", "1"]

    assert charge.done == ["1", "1"], "once for each operation"

    class Ride:
        async def __call__(self, run: Any, wish: Any) -> Any:
            return wish

    assert await resumable(keys, "ride")(Ride())("1", "a") == "a"
    await engine.dispose()
    await keys.close_async()


@pytest.mark.parametrize("where", ["tx", "keys"])
async def test_what_only_described_its_work_has_not_done_it(stages: Stages, where: str) -> None:
    """A plain wrapper that hands a coroutine on: the key is free for whoever mends it."""
    stage = stages["sqlite"]
    keys, charge = Keys(stage.url, scope=SHARED), Charges()
    options: Any = {"tx": "tx"} if where == "tx" else {"keys": keys}
    decorate = idempotent("charge", key="order", compare=[], **options)

    def coroutine(order: str, tx: Any) -> Any:
        return charge(order)

    def generator(order: str, tx: Any) -> Any:
        charge.done.append(order)
        yield order

    def mended(order: str, tx: Any) -> str:
        return order

    connection = sqlite3.connect(stage.url.removeprefix("sqlite:///"))
    for broken in (coroutine, generator):
        with connection, pytest.raises(WrongCall, match="what wraps it with `async def`"):
            decorate(broken)("1", connection)
    assert charge.done == []
    with connection:
        assert decorate(mended)("1", connection) == "1"
    connection.close()
    await keys.close_async()


async def test_what_a_task_does_nobody_knows(stages: Stages) -> None:
    keys, charge = Keys(stages["sqlite"].url, scope=SHARED), Charges()

    @idempotent("charge", key="order", keys=keys)
    def begins(order: str) -> Any:
        return asyncio.ensure_future(charge(order))

    with pytest.raises(WrongCall):
        begins("1")
    with pytest.raises(KeyInDoubt):
        begins("1")
    await eventually_async(lambda: charge.done == ["1"])
    await keys.close_async()


async def test_what_a_person_has_told_that_is_no_json(stages: Stages) -> None:
    stage = stages["sqlite"]
    keys = Keys(stage.url, scope=SHARED)

    @idempotent("charge", key="order", keys=keys)
    async def charge(order: str) -> None:
        raise ConnectionError

    with pytest.raises(ConnectionError):
        await charge("1")
    told = Answer(200, body=b"paid, receipt 17")
    await keys_resolve(stage.url, "charge", "1", answer=told, why="asked the bank")
    with pytest.raises(ResultNotKept, match="carried out; what is kept of it is no JSON"):
        await charge("1")
    await keys.close_async()


def test_an_answer_expires_and_a_lost_lease_does_not_wait_for_it(stage: Stage) -> None:
    """Retention and lease are apart: what is over is new again, what is in doubt stays so."""
    keys, runs = Keys(stage.url, scope=SHARED), Counter[str]()

    @idempotent("charge", key="order", keys=keys)
    def charge(order: str, amount: int) -> int:
        runs[order] += 1
        if amount < 0:
            raise ConnectionError
        return runs[order]

    assert [charge("a", 1), charge("a", 1)] == [1, 1]
    with pytest.raises(ConnectionError):
        charge("b", -1)
    past = {"sqlite": "0"}.get(stage.database, "'2020-01-01'")
    stage.query(f"UPDATE {{p}}idempotency_key SET expires_at = {past}")
    assert charge("a", 2) == 2, "another request too, since nothing is known any more"
    with pytest.raises(KeyInDoubt):
        charge("b", -1)
    rows = stage.query("SELECT epoch, attempts FROM {p}idempotency_key WHERE status = 'completed'")
    assert rows == [(2, 1)]
    keys.close()


def test_an_error_of_the_function_is_not_hidden_by_a_database_that_is_away(
    stages: Stages, caplog: pytest.LogCaptureFixture
) -> None:
    stage = stages["sqlite"]
    keys = Keys(stage.url, scope=SHARED)

    def work(order: str) -> str:
        stage.query("ALTER TABLE {p}idempotency_key RENAME TO hidden")
        if order == "fails":
            raise ConnectionError("no answer")
        return order

    charge = idempotent("charge", key="order", keys=keys)(work)
    for order in ("fails", "works"):
        try:
            if order == "fails":
                with pytest.raises(ConnectionError):
                    charge(order)
            else:
                assert charge(order) == order, "it was carried out"
        finally:
            stage.query("ALTER TABLE hidden RENAME TO {p}idempotency_key")
    assert caplog.text.count("key.unprotected") == 2
    keys.close()


def test_an_event_loop_after_another(stage: Stage) -> None:
    """As in a task of Celery's, which has one for each call; and one beside another."""
    keys, charged = Keys(stage.url, scope=SHARED), Counter[str]()

    @idempotent("charge", key="order", keys=keys)
    async def charge(order: str) -> str:
        charged[order] += 1
        return f"charged {order}"

    for order in ("a", "b", "a"):
        assert asyncio.run(charge(order)) == f"charged {order}"
    with asyncio.Runner() as one, asyncio.Runner() as other:
        for runner, order in ((one, "c"), (other, "d"), (one, "d"), (other, "c"), (one, "e")):
            assert runner.run(charge(order)) == f"charged {order}"
        for runner in (one, other):
            runner.run(keys.close_async())
    assert charged == dict.fromkeys("abcde", 1)


@pytest.mark.parametrize("how", ["idempotent", "resumable"])
@pytest.mark.parametrize("ends", ["returns", "raises"])
async def test_what_has_ended_is_written_down_though_its_caller_is_cancelled(
    stage: Stage, how: str, ends: str
) -> None:
    keys, runs = Keys(stage.url, scope=SHARED), Counter[str]()
    engine = create_engine(with_driver(stage.url, SYNC_DRIVERS))
    table = f"{stage.prefix}idempotency_key"
    with engine.connect() as connection:

        def work(order: str) -> int:
            runs[order] += 1
            if runs[order] == 1:  # the database is slow to write what comes
                connection.execute(text(f"UPDATE {table} SET attempts = attempts"))
                if ends == "raises":
                    raise ConnectionError
            return 17

        @idempotent("pay", key="order", keys=keys, policy=Policy(on_error="retry"))
        async def once(order: str) -> int:
            return work(order)

        @resumable(keys, "pay")
        async def from_points(run: Any, order: str) -> int:
            return work(order)

        async def pay(order: str) -> Any:
            return await (once(order) if how == "idempotent" else from_points(order, order))

        call = asyncio.ensure_future(pay("k"))
        await eventually_async(lambda: runs["k"] == 1)
        await asyncio.sleep(0.2)  # what became of it is on its way
        call.cancel()
        asyncio.get_running_loop().call_later(0.3, connection.rollback)
        with pytest.raises(asyncio.CancelledError):
            await call
    engine.dispose()
    assert await asyncio.gather(pay("k"), return_exceptions=True) == [17]
    assert runs == {"k": 1 if ends == "returns" else 2}
    await keys.close_async()


@each_door
async def test_who_has_waited_long_enough_is_told_so(door: Door, stages: Stages) -> None:
    stage, ran = stages[door.database], list[str]()

    @idempotent("place", key="key", tx="tx", policy=Policy(wait_seconds=0.2))
    async def place_async(tx: Any, key: str) -> str:
        ran.append(key)
        return key

    @idempotent("place", key="key", tx="tx", policy=Policy(wait_seconds=0.2))
    def place(tx: Any, key: str) -> str:
        ran.append(key)
        return key

    async def call(key: str) -> Any:
        if opened.is_async:
            return await place_async(opened.tx, key)
        return await opened.call(place, opened.tx, key)

    async with door.open(stage.url) as opened:
        if door.database == "sqlite":  # which has one lock for all, and its own patience
            await opened.execute("PRAGMA busy_timeout = 200")
        with somebody_at(stage, Name("shared", "place", "k")), pytest.raises(KeyInProgress) as told:
            await call("k")
        assert told.value.__cause__ is not None, "what the database said"
        await opened.rollback()
        assert await call("k") == "k"
        await opened.commit()
    assert ran == ["k"]


@pytest.mark.parametrize("how", ["sync", "async"])
async def test_a_slow_database_makes_nobody_wait_longer(stages: Stages, how: str) -> None:
    """`wait_seconds` is what a caller waits, and not what it sleeps."""
    stage, begun, gate = stages["sqlite"], threading.Event(), threading.Event()
    keys = Keys(stage.url, scope=SHARED)
    decorate = idempotent("pay", key="order", keys=keys, policy=Policy(wait_seconds=1))

    def pay(order: str) -> None:
        begun.set()
        assert gate.wait(60)

    async def pay_async(order: str) -> None:
        await asyncio.to_thread(pay, order)

    async def call() -> None:
        if how == "async":
            await decorate(pay_async)("k")
        else:
            await asyncio.to_thread(decorate(pay), "k")

    first = asyncio.ensure_future(call())
    await eventually_async(begun.is_set)
    claims = 0

    def slow() -> None:
        nonlocal claims
        claims += 1
        time.sleep(0.4)

    failpoints.arm("sql.claim.before", slow)
    try:
        with pytest.raises(KeyInProgress):
            await call()
    finally:
        failpoints.clear()
        gate.set()
    assert claims <= 4, "three of them take longer than a second"
    await first
    await keys.close_async()
