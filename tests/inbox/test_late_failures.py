"""What only shows at the end of a transaction is a handler's fault too, and that of nobody else."""

from typing import Any

import pytest
from consuming import House, apply, note
from sqlalchemy import Integer, String
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from postroom.retry import RetryPolicy

ONCE = RetryPolicy(attempts=1)


class Base(DeclarativeBase):
    """Models of the user's."""


class Effect(Base):
    """What `effect` is to an ORM; it has no row for a number twice."""

    __tablename__ = "effect"
    place: Mapped[int] = mapped_column(Integer, primary_key=True)
    who: Mapped[str] = mapped_column(String(99))
    k: Mapped[str] = mapped_column(String(99))
    n: Mapped[int] = mapped_column(Integer)


@pytest.mark.parametrize("plain", [False, True])
async def test_what_a_session_holds_back_is_written_and_may_fail(house: House, plain: bool) -> None:
    """The handler only adds an object; the database refuses it when it is written."""
    consumer, runs = house.consumer(retry=ONCE), []

    def add(event: Any, tx: Any) -> None:
        runs.append(event["n"])
        place = 1000 if event["n"] in (2, 3) else 100 + event["n"]
        tx.add(Effect(place=place, who="billing", k=event["key"], n=event["n"]))

    async def add_async(event: Any, tx: Any) -> None:
        add(event, tx)

    consumer.on("note")(add if plain else add_async)
    await house.send(*(note(f"k{n}", n) for n in range(6)))
    done = await consumer.drain_once()
    assert (done.handled, done.buried) == (5, 1)
    assert sorted(n for _, n in house.effects()) in ([0, 1, 2, 4, 5], [0, 1, 3, 4, 5])
    assert house.letters()[0]["error_code"] == "IntegrityError"
    assert max(map(runs.count, runs)) <= 2  # with others, and alone


@pytest.mark.parametrize("house", ["postgresql"], indirect=True)
async def test_a_deferred_constraint(house: House) -> None:
    house.stage.query(
        "ALTER TABLE effect ADD CONSTRAINT once UNIQUE (n) DEFERRABLE INITIALLY DEFERRED"
    )
    consumer = house.consumer(retry=ONCE)

    @consumer.on("note")
    async def handle(event: Any, tx: Any) -> None:
        await apply(tx, {"key": event["key"], "n": event["n"] // 2})

    await house.send(*(note(f"k{n}", n) for n in range(4)))
    done = await consumer.drain_once()
    assert (done.handled, done.buried) == (2, 2)
    assert sorted(n for _, n in house.effects()) == [0, 1]
