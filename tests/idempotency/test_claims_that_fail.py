"""A claim that fails leaves nothing behind: no mark on a connection, no thread, no record."""

import asyncio
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Annotated, Any

import httpx
import pytest
from anyio import to_thread
from fastapi import Depends, FastAPI, HTTPException
from serving import CLIENT, SYNC_DRIVERS, serve_asgi, with_driver
from somebody import somebody_at
from sqlalchemy import create_engine, event, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

from helpers import eventually, eventually_async
from postroom.errors import KeyInProgress
from postroom.idempotency import SHARED, Finisher, Keys, Name, Policy, idempotent, resumable
from postroom.idempotency.exchange import Asked
from postroom.idempotency.fastapi import keyed_session, protect
from postroom.idempotency.turn import Answered, Turn
from stages import Stage, Stages

SAME = Policy(mode="same_transaction")


def turn(key: str = "k", policy: Policy = SAME) -> Turn:
    return Turn(Asked(Name("ada", "POST /orders", key), "f" * 64, policy))


@contextmanager
def without_the_table(stage: Stage) -> Iterator[None]:
    there, hidden = "postroom_idempotency_key", "postroom_hidden"
    if stage.database == "postgresql":
        stage.query("ALTER TABLE postroom.idempotency_key RENAME TO hidden")
    else:
        stage.query(f"ALTER TABLE {there} RENAME TO {hidden}")
    yield
    if stage.database == "postgresql":
        stage.query("ALTER TABLE postroom.hidden RENAME TO idempotency_key")
    else:
        stage.query(f"ALTER TABLE {hidden} RENAME TO {there}")


def test_the_connection_may_be_used_by_others(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    engine = create_engine(with_driver(stage.url, SYNC_DRIVERS), pool_size=1, max_overflow=0)
    failed = turn()
    with without_the_table(stage), pytest.raises(Answered) as told:
        failed.session(engine)
    assert told.value.answer.status == 503
    assert "run `postroom db install`" in caplog.text
    failed.end()
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO thing VALUES ('a')"))
    engine.dispose()
    assert stage.things() == ["a"]


async def test_the_connection_may_be_used_by_others_async(stage: Stage) -> None:
    engine = create_async_engine(with_driver(stage.url), pool_size=1, max_overflow=0)
    failed = turn()
    with without_the_table(stage), pytest.raises(Answered):
        await failed.session_async(engine)
    await failed.end_async()
    async with engine.begin() as connection:
        await connection.execute(text("INSERT INTO thing VALUES ('a')"))
    await engine.dispose()
    assert stage.things() == ["a"]


# SQLite has no limit for a statement.
@pytest.mark.parametrize("stage", ["postgresql", "mariadb"], indirect=True)
def test_a_wait_that_the_database_ends_is_no_fault_of_the_store(stage: Stage) -> None:
    limit: dict[str, Any] = {"options": "-c statement_timeout=2000"}
    if stage.database == "mariadb":
        limit = {"init_command": "SET SESSION max_statement_time = 2"}
    url = with_driver(stage.url, SYNC_DRIVERS)
    patient, hasty = create_engine(url), create_engine(url, connect_args=limit)
    first, second = turn(), turn()
    first.session(patient)
    with pytest.raises(Answered) as told:
        second.session(hasty)
    assert told.value.answer.status == 409
    second.end()
    first.end()
    for engine in (patient, hasty):
        engine.dispose()


def test_the_file_is_waited_for_once(stages: Stages, caplog: pytest.LogCaptureFixture) -> None:
    """Its busy_timeout is the limit, and not several times that."""
    stage, statements = stages["sqlite"], list[str]()
    patience = {"timeout": 0.5}
    url = with_driver(stage.url, SYNC_DRIVERS)
    first_engine, engine = create_engine(url), create_engine(url, connect_args=patience)
    event.listen(
        engine,
        "before_cursor_execute",
        lambda _c, _cursor, statement, *_: statements.append(statement.split()[0]),
    )
    first, second = turn(), turn()
    first.session(first_engine)
    with pytest.raises(Answered) as told:
        second.session(engine)
    assert (told.value.answer.status, statements.count("INSERT")) == (409, 1)
    assert "key.refused" not in caplog.text, "the store is well"
    second.end()
    first.end()
    for each in (first_engine, engine):
        each.dispose()


@contextmanager
def in_threads(stage: Stage) -> Iterator[str]:
    """A service of `def` routes, which FastAPI runs in threads: forty, and here four."""
    engine = create_engine(with_driver(stage.url, SYNC_DRIVERS), pool_size=20, pool_timeout=60)
    if stage.database == "sqlite":
        event.listen(engine, "connect", lambda c, _: c.execute("PRAGMA busy_timeout = 60000"))
    keys = Keys(stage.url, scope=SHARED, policies={"POST /orders": SAME, "POST /refused": SAME})
    app = FastAPI()
    protect(app, keys)
    Ours = Annotated[Session, Depends(keyed_session(engine))]

    @app.get("/few")
    async def few() -> None:
        to_thread.current_default_thread_limiter().total_tokens = 4

    @app.post("/orders")
    def place(session: Ours) -> str:
        session.execute(text("INSERT INTO thing VALUES ('a')"))
        return "placed"

    @app.post("/refused")
    def refuse(session: Ours) -> str:
        session.execute(text("INSERT INTO thing VALUES ('a')"))
        raise HTTPException(404)

    with serve_asgi(app) as address:
        CLIENT.get(f"{address}/few")
        yield address
    keys.close()
    engine.dispose()


@pytest.mark.parametrize(("path", "status"), [("/orders", 200), ("/refused", 404)])
def test_those_who_wait_leave_a_thread_to_whom_they_wait_for(
    stage: Stage, path: str, status: int
) -> None:
    with in_threads(stage) as address, ThreadPoolExecutor(30) as threads:

        def one(_: int) -> httpx.Response:
            return CLIENT.post(address + path, headers={"Idempotency-Key": "k"})

        answers = list(threads.map(one, range(30)))
    assert Counter(answer.status_code for answer in answers) == {status: 30}
    assert len({answer.content for answer in answers}) == 1
    assert stage.things() == (["a"] if status == 200 else [])


@pytest.mark.parametrize("how", ["idempotent", "resumable"])
@pytest.mark.parametrize("times", [1, 3])  # anyio cancels until it is heard
async def test_a_call_cancelled_while_it_claims_leaves_its_key_free(
    stage: Stage, how: str, times: int
) -> None:
    keys, ran = Keys(stage.url, scope=SHARED), list[str]()

    @idempotent("pay", key="order", keys=keys)
    async def once(order: str) -> int:
        ran.append(order)
        return 17

    @resumable(keys, "pay")
    async def from_points(run: Any, order: str) -> int:
        ran.append(order)
        return 17

    async def pay(order: str) -> Any:
        return await (once(order) if how == "idempotent" else from_points(order, order))

    assert await pay("warm") == 17
    with somebody_at(stage, Name("shared", "pay", "k")) as let_go:
        call = asyncio.ensure_future(pay("k"))
        await asyncio.sleep(0.3)  # its claim is on its way
        for _ in range(times):
            call.cancel()
            await asyncio.sleep(0.01)
        asyncio.get_running_loop().call_later(0.3, let_go)
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.sleep(0.5 if times > 1 else 0)  # whoever is in a hurry does not wait for it
    assert ran == ["warm"]
    if times > 1 and how == "resumable":
        past = {"sqlite": "0"}.get(stage.database, "'2020-01-01'")
        stage.query(
            f"UPDATE {{p}}idempotency_key SET locked_until = {past} WHERE status = 'pending'"
        )
    elif times > 1:
        await eventually_async(lambda: not pending(stage), 30)
    assert await pay("k") == 17
    assert ran == ["warm", "k"]
    await keys.close_async()


def pending(stage: Stage) -> bool:
    return bool(stage.query("SELECT 1 FROM {p}idempotency_key WHERE status = 'pending'"))


async def test_a_run_cancelled_while_it_claims_is_gone_on_with(stage: Stage) -> None:
    """What stands behind its points is done, so it is not its client's alone."""
    keys, broken = Keys(stage.url, scope=SHARED), True

    @resumable(keys, "ride")
    async def ride(run: Any, wish: str) -> str:
        await run.call("made", lambda: None)
        if broken:
            raise RuntimeError
        return wish

    with pytest.raises(RuntimeError):
        await ride("k", "a")
    broken = False
    engine = create_engine(with_driver(stage.url, SYNC_DRIVERS))
    with engine.connect() as connection:
        table = f"{stage.prefix}idempotency_key"
        connection.execute(text(f"UPDATE {table} SET attempts = attempts"))
        call = asyncio.ensure_future(ride("k", "a"))
        await asyncio.sleep(0.3)
        call.cancel()
        asyncio.get_running_loop().call_later(0.3, connection.rollback)
        with pytest.raises(asyncio.CancelledError):
            await call
    engine.dispose()
    assert await Finisher(ride).once() == 1
    assert stage.query("SELECT status FROM {p}idempotency_key") == [("completed",)]
    await keys.close_async()


class TimeLimit(Exception):
    """As Celery's SoftTimeLimitExceeded: no error of a database's, and no BaseException."""


@contextmanager
def raised_by_a_signal(kind: type[BaseException], seconds: float) -> Iterator[None]:
    """As servers and task queues end what takes too long."""

    def raise_it(*_: Any) -> None:
        raise kind

    before = signal.signal(signal.SIGALRM, raise_it)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("kind", [SystemExit, TimeLimit])
def test_a_call_broken_off_by_a_signal_while_it_claims(
    stage: Stage, kind: type[BaseException]
) -> None:
    keys, ran = Keys(stage.url, scope=SHARED), list[str]()

    @idempotent("pay", key="order", keys=keys)
    def pay(order: str) -> int:
        ran.append(order)
        return 17

    assert pay("warm") == 17
    with somebody_at(stage, Name("shared", "pay", "k")) as let_go:
        later = threading.Timer(1, let_go)
        later.start()
        with raised_by_a_signal(kind, 0.3), pytest.raises(kind):
            pay("k")
        later.join()
    assert ran == ["warm"]
    eventually(lambda: tried(pay, "k") == 17, 30)
    assert ran == ["warm", "k"]
    assert [pay(f"after {n}") for n in range(3)] == [17] * 3, "on the same connections"
    keys.close()


def tried(function: Callable[[str], int], key: str) -> int | None:
    """None: its claim is still there, and will be given back."""
    try:
        return function(key)
    except KeyInProgress:
        return None


@pytest.mark.parametrize("kind", [SystemExit, TimeLimit])
def test_what_has_ended_is_written_down_though_a_signal_comes(
    stage: Stage, kind: type[BaseException]
) -> None:
    keys, runs = Keys(stage.url, scope=SHARED), 0
    engine = create_engine(with_driver(stage.url, SYNC_DRIVERS))
    with engine.connect() as connection:

        @idempotent("pay", key="order", keys=keys)
        def pay(order: str) -> int:
            nonlocal runs
            runs += 1
            table = f"{stage.prefix}idempotency_key"
            connection.execute(text(f"UPDATE {table} SET attempts = attempts"))
            return 17

        later = threading.Timer(1, connection.rollback)
        later.start()
        with raised_by_a_signal(kind, 0.3), pytest.raises(kind):
            pay("k")
        later.join()
    engine.dispose()
    assert (pay("k"), runs) == (17, 1)
    keys.close()
