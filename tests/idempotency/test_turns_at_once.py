"""A turn that two providers of one request use at the same time: one claim, one transaction."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import pytest
from litestar import Litestar, Request, post
from litestar.di import Provide
from litestar.middleware import DefineMiddleware
from serving import SYNC_DRIVERS, with_driver
from sqlalchemy import create_engine, event, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import QueuePool

from helpers import eventually
from postroom.errors import WrongCall
from postroom.idempotency import SHARED, Answer, Keys, Name, Policy
from postroom.idempotency.asgi import IdempotencyMiddleware, turn_of
from postroom.idempotency.exchange import Asked
from postroom.idempotency.turn import Answered, Turn
from stages import Stage

SAME = Policy(mode="same_transaction")
WORK = text("INSERT INTO thing VALUES ('a')")
LIMIT_SECONDS = 10


def turn(key: str | None = "k") -> Turn:
    asked = Asked(Name("ada", "POST /o", key), "f" * 64, SAME) if key else None
    return Turn(asked, SAME)


async def both(one: Callable[[], Any]) -> list[Any]:
    async with asyncio.timeout(LIMIT_SECONDS):
        return await asyncio.gather(one(), one(), return_exceptions=True)


@pytest.mark.parametrize("key", ["k", None])
async def test_both_have_the_same_session(stage: Stage, key: str | None) -> None:
    engine, ours = create_async_engine(with_driver(stage.url)), turn(key)
    first, second = await both(lambda: ours.session_async(engine))
    assert first is second
    await first.execute(WORK)
    assert await ours.settle_async(Answer(201)) is None
    assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]
    await engine.dispose()
    assert stage.things() == ["a"]


@pytest.mark.parametrize("key", ["k", None])
async def test_both_have_the_same_session_in_threads(stage: Stage, key: str | None) -> None:
    engine, ours = create_engine(with_driver(stage.url, SYNC_DRIVERS)), turn(key)
    first, second = await both(lambda: ours.session_in_thread(engine))
    assert first is second
    await asyncio.to_thread(first.execute, WORK)
    assert await ours.settle_async(Answer(201)) is None
    assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]
    engine.dispose()
    assert stage.things() == ["a"]


def test_threads_have_the_same_session(stage: Stage) -> None:
    engine, ours = create_engine(with_driver(stage.url, SYNC_DRIVERS)), turn()
    with ThreadPoolExecutor(8) as threads:
        sessions = list(threads.map(lambda _: ours.session(engine), range(8), timeout=20))
    assert len(set(map(id, sessions))) == 1
    sessions[0].execute(WORK)
    assert ours.settle(Answer(201)) is None
    engine.dispose()
    assert stage.things() == ["a"]


async def test_both_are_told_the_answer_from_memory(stage: Stage) -> None:
    engine, first, again = create_async_engine(with_driver(stage.url)), turn(), turn()
    await (await first.session_async(engine)).execute(WORK)
    await first.settle_async(Answer(201, (), b"made"))
    told = await both(lambda: again.session_async(engine))
    assert [type(each) for each in told] == [Answered, Answered]
    assert [each.answer.body for each in told] == [b"made", b"made"]
    await again.end_async()
    await engine.dispose()
    assert stage.things() == ["a"]


async def test_both_are_refused_where_nothing_answers(stage: Stage) -> None:
    url = with_driver(stage.url, SYNC_DRIVERS)
    for engine, claim in (
        (create_async_engine(with_driver(stage.url)), Turn.connection_async),
        (create_engine(url), Turn.connection_in_thread),
    ):
        ours, calls = turn(), list[int]()

        def down(*_: Any, calls: list[int] = calls, **__: Any) -> None:
            calls.append(1)
            raise ConnectionRefusedError

        event.listen(getattr(engine, "sync_engine", engine), "do_connect", down)
        told = await both(lambda: claim(ours, engine))  # type: ignore[operator] # noqa: B023
        assert [type(each) for each in told] == [Answered, Answered]
        assert [each.answer.status for each in told] == [503, 503]
        assert len(calls) == 1, "asked for once"


async def test_one_that_is_cancelled_leaves_the_claim_to_the_other(stage: Stage) -> None:
    engine, holder, ours = create_async_engine(with_driver(stage.url)), turn(), turn()
    await holder.session_async(engine)
    first = asyncio.ensure_future(ours.session_async(engine))
    second = asyncio.ensure_future(ours.session_async(engine))
    await asyncio.sleep(0.3)
    first.cancel()
    await asyncio.wait({first})
    await holder.end_async()
    async with asyncio.timeout(LIMIT_SECONDS):
        session = await second
    await session.execute(WORK)
    assert await ours.settle_async(Answer(201)) is None
    await engine.dispose()
    assert stage.things() == ["a"]


@pytest.mark.parametrize("ends", ["ended", "answered"])
async def test_what_is_claimed_after_its_request_is_over_is_given_back(
    stage: Stage, ends: str
) -> None:
    """Nobody can call a thread off: one that waits for a connection has it later."""
    url = with_driver(stage.url, SYNC_DRIVERS)
    engine, ours = create_engine(url, poolclass=QueuePool, pool_size=1, max_overflow=0), turn()
    busy = await asyncio.to_thread(engine.connect)
    claims = asyncio.ensure_future(ours.session_in_thread(engine))
    await asyncio.sleep(0.3)
    claims.cancel()
    async with asyncio.timeout(LIMIT_SECONDS):
        if ends == "ended":
            await ours.end_async()
        else:
            assert await ours.settle_async(Answer(401)) is None
    busy.close()
    await asyncio.sleep(0.3)  # it has the connection now, and claims

    eventually(lambda: engine.pool.checkedout() == 0, 10)  # type: ignore[attr-defined]
    assert ours.instead is None
    again = turn()
    await again.session_in_thread(engine)  # the key is free
    await again.end_async()
    engine.dispose()


async def test_who_was_answered_is_not_told_another_answer(stage: Stage) -> None:
    url = with_driver(stage.url, SYNC_DRIVERS)
    engine, holder, ours = create_engine(url), turn(), turn()
    await holder.session_in_thread(engine)
    claims = asyncio.ensure_future(ours.session_in_thread(engine))  # waits for the holder
    await asyncio.sleep(0.3)
    async with asyncio.timeout(LIMIT_SECONDS):
        assert await ours.settle_async(Answer(401)) is None
    await holder.settle_async(Answer(201, (), b"made"))
    with pytest.raises((Answered, WrongCall)):
        await claims
    assert ours.instead is None
    assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]
    engine.dispose()


@pytest.mark.parametrize("key", ["k", None])
async def test_a_request_that_is_answered_has_no_session(stage: Stage, key: str | None) -> None:
    """What a background task did there would be undone without a word."""
    engine, ours = create_async_engine(with_driver(stage.url)), turn(key)
    await (await ours.session_async(engine)).execute(WORK)
    assert await ours.settle_async(Answer(201)) is None
    with pytest.raises(WrongCall, match="a session of your own"):
        await ours.session_async(engine)
    await engine.dispose()
    assert stage.things() == ["a"]


async def test_two_providers_of_litestar(stage: Stage) -> None:
    engine = create_async_engine(with_driver(stage.url))
    keys = Keys(stage.url, scope=SHARED, policies={"POST /o": SAME})

    async def orders_of(request: Request[Any, Any, Any]) -> dict[str, Any]:
        return {"session": await turn_of(request).session_async(engine)}

    async def customers_of(request: Request[Any, Any, Any]) -> dict[str, Any]:
        return {"session": await turn_of(request).session_async(engine)}

    @post("/o")
    async def place(orders: dict[str, Any], customers: dict[str, Any]) -> dict[str, bool]:
        await orders["session"].execute(WORK)
        await customers["session"].execute(WORK)
        return {"same": orders["session"] is customers["session"]}

    app = Litestar(
        [place],
        dependencies={"orders": Provide(orders_of), "customers": Provide(customers_of)},
        middleware=[DefineMiddleware(IdempotencyMiddleware, keys=keys)],
        logging_config=None,
    )
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
        for _ in range(2):
            async with asyncio.timeout(LIMIT_SECONDS):
                told = await client.post("/o", headers={"Idempotency-Key": "k"})
            assert (told.status_code, told.json()) == (201, {"same": True})
    await engine.dispose()
    await keys.close_async()
    assert stage.things() == ["a", "a"]


async def test_an_answer_is_kept_from_when_a_long_route_gave_it(stage: Stage) -> None:
    policy, engine = replace(SAME, keep_seconds=1), create_async_engine(with_driver(stage.url))
    turns = [Turn(Asked(Name("ada", "POST /o", "k"), "f" * 64, policy)) for _ in range(2)]
    await (await turns[0].session_async(engine)).execute(WORK)
    await asyncio.sleep(1.5)
    await turns[0].settle_async(Answer(201, (), b"made"))
    with pytest.raises(Answered) as told:
        await turns[1].session_async(engine)
    assert told.value.answer.body == b"made"
    await turns[1].end_async()
    await engine.dispose()
    assert stage.things() == ["a"]
