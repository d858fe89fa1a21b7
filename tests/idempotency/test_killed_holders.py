"""No key is stuck for longer than its lease: real processes hold one, and are killed."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from holding import WORK
from serving import SYNC_DRIVERS, with_driver
from sqlalchemy import create_engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from helpers import eventually
from postroom.errors import KeyInDoubt, PostroomError
from postroom.idempotency import SHARED, Answer, Keys, Policy, idempotent
from stages import Stage

PROGRAM = Path(__file__).with_name("holding.py")
LEASE_SECONDS = 1.5
# Every day a machine may be three times as slow as it should.
MOST_SECONDS = (1 if os.environ.get("POSTROOM_GUARANTEES") == "big" else 3) * LEASE_SECONDS


@contextmanager
def holding(stage: Stage, role: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has said that it is at work; it is killed in the end."""
    with subprocess.Popen(
        [sys.executable, str(PROGRAM), stage.url, role, str(LEASE_SECONDS)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def seconds_after_the_kill(process: subprocess.Popen[str], done: Callable[[], Any]) -> float:
    """kill -9, and how long it took until it was done."""
    process.kill()
    killed = time.monotonic()
    process.wait()
    eventually(done, retry=(AssertionError, DBAPIError, PostroomError))
    return time.monotonic() - killed


def record(stage: Stage) -> tuple[Any, ...]:
    (row,) = stage.query("SELECT status, mode, attempts FROM {p}idempotency_key")
    return row


def test_a_lost_owner_is_in_doubt_once_its_lease_is_over(
    stage: Stage, record_property: Callable[[str, object], None]
) -> None:
    with holding(stage, "finish"), holding(stage, "external") as process:
        assert record(stage) == ("pending", "external", 1)
        took = seconds_after_the_kill(process, lambda: record(stage)[0] == "indeterminate")
    record_property("leases until it was in doubt", f"{took / LEASE_SECONDS:.2f}")
    assert took < MOST_SECONDS
    plain, found = Keys(stage.url, scope=SHARED), Answer(200, (), b'"paid"')

    def pay(key: str) -> str:
        raise AssertionError("it may have been done already")

    with pytest.raises(KeyInDoubt):
        idempotent("pay", key="key", keys=plain)(pay)("k")
    asks = Policy(verify=lambda name: found)
    assert idempotent("pay", key="key", keys=plain, policy=asks)(pay)("k") == "paid"
    plain.close()


def test_a_lost_run_is_finished_by_another_once_its_lease_is_over(
    stage: Stage, record_property: Callable[[str, object], None]
) -> None:
    with holding(stage, "finish"), holding(stage, "resume") as process:
        assert record(stage) == ("pending", "resume", 1)
        took = seconds_after_the_kill(process, lambda: record(stage)[0] == "completed")
    record_property("leases until it was finished", f"{took / LEASE_SECONDS:.2f}")
    assert took < MOST_SECONDS
    assert (record(stage), stage.things()) == (("completed", "resume", 2), ["a"])


def test_what_was_lost_with_its_transaction_is_carried_out_at_once(
    stage: Stage, record_property: Callable[[str, object], None]
) -> None:
    engine = create_engine(with_driver(stage.url, SYNC_DRIVERS))

    @idempotent("place", key="key", tx="session")
    def place(session: Session, key: str) -> str:
        session.execute(WORK)
        return "done"

    def again() -> bool:
        with Session(engine) as session, session.begin():
            return place(session, "k") == "done"

    with holding(stage, "same") as process:
        took = seconds_after_the_kill(process, again)
    record_property("seconds until it was carried out", f"{took:.2f}")
    engine.dispose()
    assert took < MOST_SECONDS
    assert (record(stage)[0], stage.things()) == ("completed", ["a"])
