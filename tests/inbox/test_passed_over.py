"""A handler that passes over an error of the database has failed, where the database has ended the
transaction with it: nothing of it would be committed, and its message must not be acknowledged."""

from typing import Any

import pytest
from consuming import House, apply, note
from sqlalchemy import text

from postroom.retry import RetryPolicy

WRONG = "SELECT 1 FROM nowhere"
ONCE = RetryPolicy(attempts=1)


@pytest.mark.parametrize("gives", ["session", "connection", "driver"])
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("house", ["postgresql"], indirect=True)
async def test_its_message_and_those_beside_it_are_not_lost(
    house: House, gives: Any, plain: bool
) -> None:
    """PostgreSQL answers COMMIT with a rollback, which no driver reports."""
    consumer = house.consumer(retry=ONCE, gives=gives, concurrency=1)
    statement: Any = WRONG if gives == "driver" else text(WRONG)

    async def pass_over(event: Any, tx: Any) -> None:
        if event["n"] == 1:
            try:
                await tx.execute(statement)
            except Exception:
                return

    def pass_over_in_thread(event: Any, tx: Any) -> None:
        if event["n"] == 1:
            try:
                tx.execute(statement)
            except Exception:
                return

    consumer.on("note")(pass_over_in_thread if plain else pass_over)
    await house.send(*(note(f"k{n}", n) for n in range(3)))
    done = await consumer.drain_once()
    assert (done.handled, done.buried) == (2, 1)
    assert len(house.inbox()) == 3
    assert [letter["error_code"] for letter in house.letters()] == ["WrongCall"]


async def test_a_savepoint_around_it_is_no_failure(house: House) -> None:
    consumer = house.consumer(retry=ONCE)

    @consumer.on("note")
    async def handle(event: Any, tx: Any) -> None:
        await apply(tx, event)
        try:
            async with tx.begin_nested():
                await tx.execute(text(WRONG))
        except Exception:
            return

    await house.send(note("a", 1))
    assert (await consumer.drain_once()).handled == 1
    assert house.effects() == [("a", 1)]


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("house", ["mariadb"], indirect=True)
async def test_a_deadlock_that_nobody_minds(house: House, plain: bool) -> None:
    """MariaDB has rolled the transaction back and begins another with the next statement."""
    consumer = house.consumer(retry=ONCE)
    statement = text("SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = 1213")

    async def pass_over(event: Any, tx: Any) -> None:
        try:
            await tx.execute(statement)
        except Exception:
            return

    def pass_over_in_thread(event: Any, tx: Any) -> None:
        try:
            tx.execute(statement)
        except Exception:
            return

    consumer.on("note")(pass_over_in_thread if plain else pass_over)
    await house.send(note("a", 1))
    done = await consumer.drain_once()
    assert (done.handled, done.buried) == (0, 1)
