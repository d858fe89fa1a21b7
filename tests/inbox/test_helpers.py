"""Guarded update, upsert and execute-once, on every kind of connection."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from doors import DOORS, Door, Open
from postroom import inbox
from postroom.errors import InvalidMessage, WrongCall
from postroom.inbox import Guarded
from stages import Stage, Stages

each_door = pytest.mark.parametrize("door", DOORS, ids=str)
one_door_a_database = pytest.mark.parametrize(
    "door",
    [
        next(d for d in DOORS if d.kind == kind)
        for kind in ("psycopg.Connection", "pymysql.Connection", "sqlite3.Connection")
    ],
    ids=str,
)
one_door = pytest.mark.parametrize("door", DOORS[:1], ids=str)


@pytest.fixture
def stage(door: Door, stages: Stages) -> Stage:
    stage = stages[door.database]
    stage.query("DROP TABLE IF EXISTS parcel")
    stage.query("CREATE TABLE parcel (id INT PRIMARY KEY, state VARCHAR(20), note VARCHAR(20))")
    return stage


@pytest.fixture
async def opened(door: Door, stage: Stage) -> AsyncIterator[Open]:
    async with door.open(stage.url) as opened:
        yield opened


async def do(opened: Open, name: str, *wishes: Any, **more: Any) -> Any:
    if opened.is_async:
        return await getattr(inbox, f"{name}_async")(opened.tx, *wishes, **more)
    return await opened.call(getattr(inbox, name), opened.tx, *wishes, **more)


@each_door
async def test_a_row_is_changed_only_if_it_is_what_it_must_be(opened: Open) -> None:
    await opened.execute("INSERT INTO parcel VALUES (1, 'sent', NULL)")
    move = ("parcel", {"id": 1}, {"state": "lost", "note": "where?"})
    only_if = {"state": ["sent", "waiting"], "note": None}
    assert await do(opened, "guarded_update", *move, only_if=only_if) is Guarded.updated
    assert await do(opened, "guarded_update", *move, only_if=only_if) is Guarded.refused
    gone = ("parcel", {"id": 2}, {"state": "lost"})
    assert await do(opened, "guarded_update", *gone, only_if=only_if) is Guarded.absent


@each_door
async def test_a_row_is_made_or_changed(opened: Open, stage: Stage) -> None:
    await do(opened, "upsert", "parcel", {"id": 1}, {"state": "sent"})
    await do(opened, "upsert", "parcel", {"id": 1}, {"state": "there", "note": "door"})
    await do(opened, "upsert", "parcel", {"id": 1}, {})
    await opened.commit()
    assert stage.query("SELECT id, state, note FROM parcel") == [(1, "there", "door")]


@each_door
async def test_a_function_is_called_once_for_a_key(opened: Open) -> None:
    calls = []

    def plain() -> None:
        calls.append(1)

    async def awaited() -> None:
        calls.append(1)

    function = awaited if opened.is_async else plain
    assert await do(opened, "execute_once", "charge", "order-7", function)
    assert not await do(opened, "execute_once", "charge", "order-7", function)
    assert await do(opened, "execute_once", "charge", "order-8", function)
    assert len(calls) == 2


@one_door_a_database
async def test_an_async_function_is_not_taken_for_one_that_has_run(
    opened: Open, stage: Stage
) -> None:
    calls = []

    async def charge() -> None:
        calls.append(1)

    class Charge:
        __call__ = staticmethod(charge)

    for function in (charge, Charge(), lambda: charge()):
        with pytest.raises(WrongCall, match=r"await inbox\.execute_once_async"):
            await opened.call(inbox.execute_once, opened.tx, "charge", "order-7", function)
        await opened.rollback()
    assert stage.query("SELECT consumer FROM {p}inbox") == []
    paid = lambda: calls.append(2)  # noqa: E731
    assert await do(opened, "execute_once", "charge", "order-7", paid)
    assert calls == [2]


@one_door
@pytest.mark.parametrize("name", ["", "a b", 'x"', "x`", "x;--", "a.b.c", "é"])
async def test_names_that_are_none(opened: Open, name: str) -> None:
    with pytest.raises(InvalidMessage, match="no name"):
        await do(opened, "upsert", name, {"id": 1}, {})
    with pytest.raises(InvalidMessage, match="no name"):
        await do(opened, "guarded_update", "parcel", {name: 1}, {"state": 1}, only_if={"id": 1})
