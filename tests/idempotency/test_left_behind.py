"""What nobody came back for: it is undone, gone on with, or shown to a person. Never stuck."""

import asyncio
import uuid
from collections import Counter
from contextlib import suppress
from typing import Any

import pymysql
import pytest
from serving import SYNC_DRIVERS, with_driver
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from doors import DOORS, Door, mysql_options
from postroom import failpoints
from postroom.databases.sqlalchemy import SQLAlchemyLink
from postroom.errors import ConfigurationError, KeyInDoubt, ResultNotKept
from postroom.flow import Flow, Statement, run
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
    store,
)
from postroom.idempotency.exchange import Asked
from postroom.idempotency.turn import Turn
from postroom.ops.keys import keys_list, keys_resolve
from stages import Stage, Stages

each_door = pytest.mark.parametrize("door", DOORS, ids=str)


def past(stage: Stage) -> str:
    return {"sqlite": "0"}.get(stage.database, "'2020-01-01'")


def status(stage: Stage) -> list[str]:
    return [row[0] for row in stage.query("SELECT status FROM {p}idempotency_key")]


@each_door
async def test_a_function_that_raises_has_done_nothing(door: Door, stages: Stages) -> None:
    """Its caller handles the error and commits; the key is free, and the work is undone."""
    stage, broken = stages[door.database], True
    async with door.open(stage.url) as opened:

        @idempotent("place", key="key", tx="tx")
        async def place_async(tx: Any, key: str) -> str:
            await opened.execute("INSERT INTO thing VALUES ('a')")
            if broken:
                raise ValueError
            return "done"

        @idempotent("place", key="key", tx="tx")
        def place(tx: Any, key: str) -> str:
            if broken:
                raise ValueError
            return "done"

        async def call() -> Any:
            if opened.is_async:
                return await place_async(opened.tx, "k")
            return await opened.call(place, opened.tx, "k")

        with pytest.raises(ValueError):
            await call()
        await opened.commit()
        assert stage.things() == []
        broken = False
        assert await call() == "done"
        await opened.commit()
    assert status(stage) == ["completed"]


@each_door
async def test_a_statement_of_ours_that_fails_leaves_nothing(door: Door, stages: Stages) -> None:
    """Whichever it is: the caller may commit the rest, and the key is free."""
    stage = stages[door.database]
    points = [f"sql.{what}" for what in ("claim.after", "savepoint.before", "finish.before")]

    def fail() -> None:
        raise RuntimeError("broken")

    async with door.open(stage.url) as opened:

        @idempotent("place", key="key", tx="tx")
        async def place_async(tx: Any, key: str) -> str:
            await opened.execute("INSERT INTO thing VALUES ('a')")
            return "done"

        @idempotent("place", key="key", tx="tx")
        def place(tx: Any, key: str) -> str:
            return "done"

        async def call(key: str) -> Any:
            if opened.is_async:
                return await place_async(opened.tx, key)
            return await opened.call(place, opened.tx, key)

        for point in points:
            failpoints.arm(point, fail, at=1)
            try:
                with suppress(RuntimeError):  # SQLAlchemy sets its savepoints without us
                    await call(point)
            finally:
                failpoints.clear()
            await opened.commit()
            assert await call(point) == "done", point
            await opened.commit()
    assert status(stage) == ["completed"] * len(points)
    assert len(stage.things()) == (len(points) if opened.is_async else 0)


def test_a_session_forgets_what_a_function_that_raised_did(stage: Stage) -> None:
    engine = create_engine(with_driver(stage.url, SYNC_DRIVERS))

    @idempotent("place", key="key", tx="session")
    def place(session: Any, key: str, name: str) -> None:
        session.execute(text("INSERT INTO thing VALUES (:name)"), {"name": name})
        if name == "bad":
            session.execute(text("INSERT INTO nowhere VALUES (1)"))

    with Session(engine) as session:
        session.execute(text("INSERT INTO thing VALUES ('before')"))
        with pytest.raises(Exception, match="nowhere"):
            place(session, "k", "bad")
        place(session, "j", "good")
        session.commit()
    engine.dispose()
    assert stage.things() == ["before", "good"]


async def test_a_record_committed_without_its_answer_can_be_resolved(stage: Stage) -> None:
    """A view on a raw connection that commits and then raises, or DDL on MariaDB."""
    engine = create_engine(with_driver(stage.url, SYNC_DRIVERS))
    name = Name("shared", "place", "k")
    claim = store.claim(name, "f" * 64, "same_transaction", keep_seconds=60)
    with engine.begin() as connection:
        run(claim, SQLAlchemyLink(connection))
    engine.dispose()
    assert status(stage) == ["pending"]
    told = await keys_resolve(stage.url, "place", "k", answer=None, why="looked")
    assert told["status"] == "failed"


async def test_a_lost_owner_is_shown_though_no_client_comes_back(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    keys = Keys(stage.url, scope=SHARED)
    claims = [
        keys.engines.ask_async(
            lambda key=key: store.claim(  # type: ignore[misc]
                Name("shared", "pay", key), "f" * 64, "external", keep_seconds=60, lease_seconds=60
            )
        )
        for key in ("a", "b")
    ]
    await asyncio.gather(*claims)
    assert await keys_list(stage.url, status="indeterminate") == []
    stage.query(f"UPDATE {{p}}idempotency_key SET locked_until = {past(stage)}")

    @resumable(keys, "other")
    async def other(run: Any, wish: Any) -> None: ...

    await Finisher(other).once()
    assert caplog.text.count("key.indeterminate") == 2
    assert len(await keys_list(stage.url, status="indeterminate")) == 2
    told = await keys_resolve(stage.url, "pay", "a", answer=Answer(200), why="asked the bank")
    assert told["status"] == "completed"
    await keys.close_async()


async def test_an_operator_sees_a_lost_owner_at_once(stage: Stage) -> None:
    keys = Keys(stage.url, scope=SHARED)
    name = Name("shared", "pay", "a")
    await keys.engines.ask_async(
        lambda: store.claim(name, "f" * 64, "external", keep_seconds=60, lease_seconds=60)
    )
    stage.query(f"UPDATE {{p}}idempotency_key SET locked_until = {past(stage)}")
    (found,) = await keys_list(stage.url, status="indeterminate")
    assert found["error"] == "the process that had it was lost"
    await keys.close_async()


def _ask(name: str, values: dict[str, Any]) -> Flow[Any]:
    rows = yield Statement("postroom.outbox", name, values)
    return [tuple(row) for row in rows]


async def insert(tx: Any) -> None:
    await tx.execute(text("INSERT INTO thing VALUES ('a')"))


async def test_points_are_remembered_longer_than_answers(stage: Stage) -> None:
    keys, fails = Keys(stage.url, scope=SHARED), True

    @resumable(keys, "ride", Policy(keep_seconds=1))
    async def ride(run: Any, wish: Any) -> str:
        await run.point("made", insert)
        if fails:
            raise RuntimeError
        return "done"

    with pytest.raises(RuntimeError):
        await ride("k", 1)
    stage.query(f"UPDATE {{p}}idempotency_key SET expires_at = {past(stage)}")
    rows = {"keep_seconds": 0, "rows": 100}
    assert await keys.engines.ask_async(lambda: _ask("prune_keys", rows)) == [(0,)]
    fails = False
    assert await ride("k", 1) == "done"
    assert stage.things() == ["a"]
    await keys.close_async()


async def test_a_run_resolved_as_not_done_is_gone_on_with(stage: Stage) -> None:
    keys, fails = Keys(stage.url, scope=SHARED), True

    @resumable(keys, "ride")
    async def ride(run: Any, wish: Any) -> str:
        await run.point("made", insert)
        if fails:
            raise RuntimeError
        return "done"

    with pytest.raises(RuntimeError):
        await ride("k", 1)
    stage.query(
        "UPDATE {p}idempotency_key SET status = 'indeterminate', locked_until = NULL, attempts = 6"
    )
    await keys_resolve(stage.url, "ride", "k", answer=None, why="looked")
    fails = False
    assert await Finisher(ride).once() == 1
    assert (status(stage), stage.things()) == (["completed"], ["a"])
    await keys.close_async()


async def test_the_result_of_a_run_that_is_too_large_to_be_kept(stages: Stages) -> None:
    keys, policy = Keys(stages["sqlite"].url, scope=SHARED), Policy(most_stored_bytes=10)

    @resumable(keys, "async", policy)
    async def large(run: Any, wish: Any) -> str:
        return "x" * 20

    @resumable(keys, "sync", policy)
    def in_threads(run: Any, wish: Any) -> str:
        return "x" * 20

    assert await large("k", 1) == in_threads("k", 1) == "x" * 20
    with pytest.raises(ResultNotKept, match="its result was too large"):
        await large("k", 1)
    with pytest.raises(ResultNotKept, match="its result was too large"):
        in_threads("k", 1)
    await keys.close_async()


async def test_what_a_person_has_called_done_needs_its_points_no_more(stage: Stage) -> None:
    keys = Keys(stage.url, scope=SHARED)

    @resumable(keys, "ride")
    async def ride(run: Any, wish: Any) -> None:
        await run.point("made", insert)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        await ride("k", 1)
    stage.query("UPDATE {p}idempotency_key SET status = 'indeterminate', locked_until = NULL")
    done = Answer(200, body=b'"done"')
    await keys_resolve(stage.url, "ride", "k", answer=done, why="looked")
    assert stage.query("SELECT progress, request FROM {p}idempotency_key") == [(None, None)]
    assert await ride("k", 1) == "done"
    await keys.close_async()


async def test_what_a_run_refused_is_its_client_s_to_try_again(stage: Stage) -> None:
    keys, stock, sold = Keys(stage.url, scope=SHARED), 0, []

    @resumable(keys, "buy")
    async def buy(run: Any, wish: Any) -> Any:
        if wish["made"]:
            await run.point("made", insert)
        if not stock:
            return 409, "sold out"
        sold.append(run.attempt)
        return 201, "sold"

    for key, made in (("a", True), ("b", False)):
        for _ in range(8):  # which is more often than a run may break
            assert await buy(key, {"made": made}) == "sold out"
    assert status(stage) == ["failed", "failed"]
    assert stage.query("SELECT 1 FROM {p}idempotency_key WHERE locked_until IS NOT NULL") == []
    stock = 1
    assert await Finisher(buy).once() == 0
    assert sold == [], "its client was told that it is sold out"
    assert await buy("a", {"made": True}) == "sold"
    assert (sold, stage.things()) == ([1], ["a"])
    # What was refused before any point leaves nothing behind.
    stock, rows = 0, {"keep_seconds": 0, "rows": 100}
    assert await buy("c", {"made": True}) == "sold out"
    stage.query(f"UPDATE {{p}}idempotency_key SET expires_at = {past(stage)}")
    assert await keys.engines.ask_async(lambda: _ask("prune_keys", rows)) == [(2,)]
    assert status(stage) == ["failed"], "half done"
    await keys.close_async()


async def test_a_run_that_kills_its_process_is_not_adopted_without_end(stage: Stage) -> None:
    keys, runs = Keys(stage.url, scope=SHARED), 0

    @resumable(keys, "ride")
    async def ride(run: Any, wish: Any) -> None:
        nonlocal runs
        runs += 1
        raise asyncio.CancelledError  # as good as gone: nothing is written

    for _ in range(9):
        if runs == 0:
            with pytest.raises(asyncio.CancelledError):
                await ride("k", 1)
        else:
            await asyncio.gather(Finisher(ride).once(), return_exceptions=True)
        stage.query(
            f"UPDATE {{p}}idempotency_key SET locked_until = {past(stage)} "
            "WHERE status <> 'indeterminate'"
        )
    assert (runs, status(stage)) == (6, ["indeterminate"])
    with pytest.raises(KeyInDoubt):
        await ride("k", 1)
    await keys.close_async()


def test_a_verify_that_fails_leaves_the_doubt(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    keys, runs = Keys(stage.url, scope=SHARED), 0

    def verify(name: Name) -> Any:
        raise ConfigurationError("the bank is down")

    @idempotent("pay", key="key", keys=keys, policy=Policy(verify=verify, on_unreachable="run"))
    def pay(key: str) -> None:
        nonlocal runs
        runs += 1
        raise ConnectionError

    with pytest.raises(ConnectionError):
        pay("k")
    with pytest.raises(KeyInDoubt):
        pay("k")
    assert runs == 1
    assert "key.unverified operation=pay idempotency_key=k error=ConfigurationError" in caplog.text
    assert ", in verify\n" in caplog.text
    keys.close()


@pytest.mark.parametrize("found", [Answer(200), NotDone])
def test_a_doubt_that_ends_without_a_body_is_none(stages: Stages, found: Any) -> None:
    keys, fails = Keys(stages["sqlite"].url, scope=SHARED), True

    @idempotent("pay", key="key", keys=keys, policy=Policy(verify=lambda name: found))
    def pay(key: str) -> None:
        if fails:
            raise ConnectionError

    with pytest.raises(ConnectionError):
        pay("k")
    fails = False
    assert pay("k") is None
    keys.close()


@pytest.mark.parametrize("key", [None, True, 1.5, b"x", ""])
def test_what_names_nothing_is_no_key(stages: Stages, key: Any) -> None:
    keys = Keys(stages["sqlite"].url, scope=SHARED)

    @idempotent("pay", key="key", keys=keys)
    def pay(key: Any) -> None: ...

    with pytest.raises(ConfigurationError, match="the key of pay"):
        pay(key)
    for good in (5, uuid.uuid4(), "x"):
        pay(good)
    keys.close()


async def test_what_was_done_or_broken_off_is_not_done_again(stages: Stages) -> None:
    keys, runs = Keys(stages["sqlite"].url, scope=SHARED), Counter[str]()
    retry = Policy(on_error="retry")

    @idempotent("pay", key="key", keys=keys, policy=retry)
    async def pay(key: str) -> Any:
        runs[key] += 1
        if key == "cancelled":
            raise asyncio.CancelledError
        return object()

    with pytest.raises(asyncio.CancelledError):
        await pay("cancelled")
    with pytest.raises(KeyInDoubt):
        await pay("cancelled")
    with pytest.raises(ConfigurationError, match="must be JSON"):
        await pay("no json")
    with pytest.raises(ResultNotKept, match="no JSON"):
        await pay("no json")
    assert set(runs.values()) == {1}
    await keys.close_async()


def test_one_turn_has_one_engine(stages: Stages) -> None:
    url = with_driver(stages["sqlite"].url, SYNC_DRIVERS)
    engines = [create_engine(url) for _ in range(2)]
    turn = Turn(Asked(Name("a", "b", "c"), "f" * 64, Policy(mode="same_transaction")))
    turn.session(engines[0])
    with pytest.raises(ConfigurationError, match="another engine"):
        turn.session(engines[1])
    turn.end()
    for engine in engines:
        engine.dispose()


async def test_one_finisher_has_one_database(stages: Stages) -> None:
    url = stages["sqlite"].url

    @resumable(Keys(url, scope=SHARED), "a")
    async def a(run: Any, wish: Any) -> None: ...

    @resumable(Keys(url, scope=SHARED), "b")
    async def b(run: Any, wish: Any) -> None: ...

    with pytest.raises(ConfigurationError, match="one Keys"):
        Finisher(a, b)


async def test_secrets_of_a_failed_run_are_written_nowhere(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    keys = Keys(stage.url, scope=SHARED)
    stage.query("CREATE TABLE once (card VARCHAR(50) PRIMARY KEY)")

    async def twice(tx: Any) -> None:
        for _ in range(2):
            await tx.execute(text("INSERT INTO once VALUES ('canary-4242')"))

    @resumable(keys, "pay")
    async def pay(run: Any, wish: str) -> None:
        if wish == "twice":
            await run.point("x", twice)
        raise RuntimeError("card canary-4242 was refused")

    for wish in ("twice", "raise"):
        with pytest.raises(Exception, match="canary"):
            await pay(wish, wish)
    errors = [row[0] for row in stage.query("SELECT error FROM {p}idempotency_key")]
    stage.query("DROP TABLE once")
    assert sorted(error.partition(":")[0] for error in errors) == ["IntegrityError", "RuntimeError"]
    assert "canary" not in "".join(errors) + caplog.text
    await keys.close_async()


def test_a_savepoint_within_a_savepoint(stages: Stages) -> None:
    """MariaDB forgets an outer savepoint of the same name."""
    stage = stages["mariadb"]
    options = mysql_options(stage.url)
    connection = pymysql.connect(database=options.pop("db"), **options)

    @idempotent("place", key="key", tx="tx")
    def place(tx: Any, key: str) -> None:
        tx.cursor().execute("INSERT INTO thing VALUES (%s)", (key,))
        if key == "outer":
            with pytest.raises(ValueError):
                place(tx, "inner")
        raise ValueError

    connection.begin()
    with pytest.raises(ValueError):
        place(connection, "outer")
    connection.commit()
    connection.close()
    assert (stage.things(), status(stage)) == ([], ["failed"])
