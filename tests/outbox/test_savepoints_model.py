"""Random lives of a session: after each, outbox and application tables equal a simple model."""

import asyncio
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from session_tools import DRIVERS, Thing, make_engine, put, put_now
from sqlalchemy.ext.asyncio import AsyncSession

from stages import Stages

STEPS = st.sampled_from(
    ["add", "flush", "queue", "now", "core", "dedup", "begin", "begin", "release", "undo"]
)
LIVES = st.lists(
    st.tuples(st.lists(STEPS, max_size=14), st.sampled_from(["commit", "rollback", "close"])),
    min_size=1,
    max_size=3,
)


class Model:
    """What stands: a list of facts for the transaction, one more for each open savepoint."""

    def __init__(self) -> None:
        self.committed: list[str] = []
        self.open: list[list[str]] = [[]]

    def note(self, fact: str) -> None:
        self.open[-1].append(fact)

    def release(self) -> None:
        inner = self.open.pop()
        self.open[-1] += inner

    def end(self, how: str) -> None:
        if how == "commit":
            self.committed += [fact for level in self.open for fact in level]
        self.open = [[]]


async def live(session: AsyncSession, model: Model, steps: list[str], numbers: Any) -> None:
    savepoints: list[Any] = []
    for step in steps:
        fact = f"{next(numbers):03}"
        if step == "add":
            session.add(Thing(name=fact))
            model.note(f"thing {fact}")
        elif step == "flush":
            await session.flush()
        elif step == "queue":
            put(session, fact.encode())
            model.note(f"message {fact}")
        elif step == "now":
            await put_now(session, fact.encode())
            model.note(f"message {fact}")
        elif step == "core":
            await put_now(await session.connection(), fact.encode())
            model.note(f"message {fact}")
        elif step == "dedup":
            put(session, fact.encode(), dedup_key=f"key {fact}")
            model.note(f"message {fact}")
        elif step == "begin":
            savepoints.append(await session.begin_nested())
            model.open.append([])
        elif savepoints and step == "release":
            await savepoints.pop().commit()
            model.release()
        elif savepoints and step == "undo":
            await savepoints.pop().rollback()
            model.open.pop()


@pytest.mark.parametrize("driver", DRIVERS)
def test_what_stands_in_the_end_is_what_the_model_says(driver: str, stages: Stages) -> None:
    stage = stages[DRIVERS[driver]]

    with asyncio.Runner() as runner:
        engine = make_engine(stage, driver)

        @settings(
            max_examples=120,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        )
        @given(lives=LIVES)
        def check(lives: list[tuple[list[str], str]]) -> None:
            stage.clear()
            model = Model()
            numbers = iter(range(1000))

            async def run() -> None:
                async with AsyncSession(engine) as session:
                    for steps, end in lives:
                        await live(session, model, steps, numbers)
                        await getattr(session, end)()
                        model.end(end)

            runner.run(run())
            messages = [fact[8:].encode() for fact in model.committed if fact[0] == "m"]
            things = [fact[6:] for fact in model.committed if fact[0] == "t"]
            assert stage.payloads() == messages
            assert stage.things() == things

        check()
        runner.run(engine.dispose())
