"""What `publish` costs beside the same driver's own statement, without commit.

The driver's statement has all its values ready: what ours takes longer is checking the message,
making its id, finding its lane and looking at the connection.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import asyncpg
import psycopg
import psycopg2
import psycopg2.extras
import stage
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from bench.figures import Figures, at_most, median
from bench.room import OURS, Room
from postroom.databases import sql
from postroom.messages import Draft, encode
from postroom.outbox.publish import Outbox

ROOM = "postroom.outbox.writing"
MANY = 100
ONES = (300, 20)  # statements of one message in a turn, and of many
BATCHES = (20, 3)
TURNS = (15, 3)

Work = Callable[[], Awaitable[object]]


def publish(room: Room) -> Figures:
    """Ours and the driver's own take turns on the same connection, in one transaction each."""
    figures = Figures("`publish` against the driver's own statement, without commit")
    with room.database() as url:
        room.run(OURS, "prepare", database=url, messages=0)
        found = asyncio.run(_measure(room, url))
    for name, (one, many) in found.items():
        for what, pair, bar in (("1 message", one, 1.2), (f"{MANY} messages", many, 1.5)):
            ours, own = pair
            figures.add(
                f"{name}, {what}",
                f"{ours * 1e6:.0f} µs",
                ours / own,
                to=f"{own * 1e6:.0f} µs",
                bar=at_most(bar),
            )
        figures.numbers[name] = {"one": one, "many": many}
    return figures


async def _measure(room: Room, url: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    turns = room.size(*TURNS)
    for name, door in DOORS.items():
        room.tick(name)
        async with AsyncExitStack() as stack:
            one, own_one, many, own_many, fresh = await door(url, stack)
            found[name] = (
                await _turns(one, own_one, fresh, turns, room.size(*ONES)),
                await _turns(many, own_many, fresh, turns, room.size(*BATCHES)),
            )
    return found


async def _turns(ours: Work, own: Work, fresh: Work, turns: int, times: int) -> tuple[float, float]:
    """Seconds for one call of each, as medians of turns that follow each other closely."""
    taken: tuple[list[float], list[float]] = ([], [])
    for turn in range(turns + 1):
        for place, work in enumerate((ours, own)):
            await fresh()
            begun = time.perf_counter()
            for _ in range(times):
                await work()
            if turn:  # the first turn prepares statements
                taken[place].append((time.perf_counter() - begun) / times)
    return median(taken[0]), median(taken[1])


# ── the message, ours and as values ready for a driver ────────────────────────────────────────

OUTBOX = Outbox()
PAYLOAD = stage.payload_of(1)
WISHES = {"type": "bench.v1", "topic": stage.SUBJECT, "key": "k1"}
VALUES = encode(Draft(payload=PAYLOAD, **WISHES))._asdict()


DRAFTS = [Draft(payload=PAYLOAD, **WISHES) for _ in range(MANY)]


def _own(name: str, style: str) -> tuple[str, tuple[Any, ...]]:
    """The driver's text for one of our inserts, and its values."""
    (part,) = sql.prepare(ROOM, "postgresql", name, style)
    return part.text, tuple(VALUES[each] for each in part.names)


def _sync(work: Callable[[], object]) -> Work:
    async def call() -> object:
        return work()

    return call


async def _asyncpg(url: str, stack: AsyncExitStack) -> tuple[Work, ...]:
    connection = await asyncpg.connect(url)
    stack.push_async_callback(connection.close)
    one, values = _own("insert_outbox", "dollar")
    arrays, lists = _own("insert_outbox_arrays", "dollar")
    columns = [[value] * MANY for value in lists]
    transaction = [connection.transaction()]
    await transaction[0].start()

    async def fresh() -> None:
        await transaction[0].rollback()
        transaction[0] = connection.transaction()
        await transaction[0].start()

    return (
        lambda: OUTBOX.publish_async(connection, PAYLOAD, **WISHES),
        lambda: connection.fetch(one, *values),
        lambda: OUTBOX.publish_many_async(connection, DRAFTS),
        lambda: connection.fetch(arrays, *columns),
        fresh,
    )


async def _psycopg(url: str, stack: AsyncExitStack) -> tuple[Work, ...]:
    connection = stack.enter_context(psycopg.connect(url))
    one, values = _own("insert_outbox", "format")
    rows = [values] * MANY

    def own_many() -> None:
        with connection.cursor() as cursor:
            cursor.executemany(one, rows)

    return (
        _sync(lambda: OUTBOX.publish(connection, PAYLOAD, **WISHES)),
        _sync(lambda: connection.execute(one, values).close()),
        _sync(lambda: OUTBOX.publish_many(connection, DRAFTS)),
        _sync(own_many),
        _sync(connection.rollback),
    )


async def _async_psycopg(url: str, stack: AsyncExitStack) -> tuple[Work, ...]:
    connection = await psycopg.AsyncConnection.connect(url)
    stack.push_async_callback(connection.close)
    one, values = _own("insert_outbox", "format")
    rows = [values] * MANY

    async def own_many() -> None:
        async with connection.cursor() as cursor:
            await cursor.executemany(one, rows)

    return (
        lambda: OUTBOX.publish_async(connection, PAYLOAD, **WISHES),
        lambda: connection.execute(one, values),
        lambda: OUTBOX.publish_many_async(connection, DRAFTS),
        own_many,
        connection.rollback,
    )


async def _psycopg2(url: str, stack: AsyncExitStack) -> tuple[Work, ...]:
    connection = psycopg2.connect(url)
    stack.callback(connection.close)
    one, values = _own("insert_outbox", "format")
    arrays, lists = _own("insert_outbox_arrays", "format")
    columns = [[value] * MANY for value in lists]

    def execute(statement: str, given: Any) -> None:
        with connection.cursor() as cursor:
            cursor.execute(statement, given)

    return (
        _sync(lambda: OUTBOX.publish(connection, PAYLOAD, **WISHES)),
        _sync(lambda: execute(one, values)),
        _sync(lambda: OUTBOX.publish_many(connection, DRAFTS)),
        _sync(lambda: execute(arrays, columns)),
        _sync(connection.rollback),
    )


async def _core(url: str, stack: AsyncExitStack) -> tuple[Work, ...]:
    engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    stack.callback(engine.dispose)
    connection = stack.enter_context(engine.connect())
    one = text(sql.query_text(ROOM, "postgresql", "insert_outbox"))
    rows = [VALUES] * MANY
    return (
        _sync(lambda: OUTBOX.publish(connection, PAYLOAD, **WISHES)),
        _sync(lambda: connection.execute(one, VALUES)),
        _sync(lambda: OUTBOX.publish_many(connection, DRAFTS)),
        _sync(lambda: connection.execute(one, rows)),
        _sync(connection.rollback),
    )


async def _session(url: str, stack: AsyncExitStack) -> tuple[Work, ...]:
    engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    stack.callback(engine.dispose)
    session = stack.enter_context(Session(engine))
    one = text(sql.query_text(ROOM, "postgresql", "insert_outbox"))
    rows = [VALUES] * MANY
    return (
        _sync(lambda: OUTBOX.publish(session, PAYLOAD, **WISHES)),
        _sync(lambda: session.execute(one, VALUES)),
        _sync(lambda: OUTBOX.publish_many(session, DRAFTS)),
        _sync(lambda: session.execute(one, rows)),
        _sync(session.rollback),
    )


async def _async_session(url: str, stack: AsyncExitStack) -> tuple[Work, ...]:
    engine = create_async_engine(url.replace("postgresql://", "postgresql+asyncpg://"))
    stack.push_async_callback(engine.dispose)
    session = await stack.enter_async_context(AsyncSession(engine))
    one = text(sql.query_text(ROOM, "postgresql", "insert_outbox"))
    # One array a column is asyncpg's fastest way, and text() takes it as well.
    arrays = text(sql.query_text(ROOM, "postgresql", "insert_outbox_arrays").split("\n", 3)[3])
    columns = {name: [value] * MANY for name, value in VALUES.items()}
    return (
        lambda: OUTBOX.publish_async(session, PAYLOAD, **WISHES),
        lambda: session.execute(one, VALUES),
        lambda: OUTBOX.publish_many_async(session, DRAFTS),
        lambda: session.execute(arrays, columns),
        session.rollback,
    )


DOORS: dict[str, Callable[[str, AsyncExitStack], Awaitable[tuple[Work, ...]]]] = {
    "asyncpg": _asyncpg,
    "psycopg": _psycopg,
    "psycopg, async": _async_psycopg,
    "psycopg2": _psycopg2,
    "SQLAlchemy Connection on psycopg": _core,
    "SQLAlchemy Session on psycopg": _session,
    "SQLAlchemy AsyncSession on asyncpg": _async_session,
}
