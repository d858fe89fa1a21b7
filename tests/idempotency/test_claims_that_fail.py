"""A claim that fails leaves nothing behind: no mark on a connection, no thread, no record."""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Annotated, Any

import httpx
import pytest
from anyio import to_thread
from fastapi import Depends, FastAPI, HTTPException
from serving import CLIENT, SYNC_DRIVERS, serve_asgi, with_driver
from sqlalchemy import create_engine, event, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

from postroom.idempotency import SHARED, Keys, Name, Policy
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
