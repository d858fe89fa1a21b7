"""Relays, publishers, a database and brokers in thousands of made-up histories: none breaks a
promise, and every bug that is planted does.

    POSTROOM_SIM_SEED=1234 pytest tests/simulation    that one history again, with its trace
"""

import gc
import os
import subprocess
import sys
import time
import traceback
import uuid
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from postroom.databases import sql
from postroom.retry import RetryPolicy
from simulation.checks import violations
from simulation.planted import BUGS
from simulation.size import SMALL, TROUBLES, Size
from simulation.view import View
from simulation.world import World

TESTS = Path(__file__).parents[1]
BIG = os.environ.get("POSTROOM_GUARANTEES") == "big"
SCHEDULES = 100_000 if BIG else 800
PART = 25  # schedules that a process takes at once
LONG_SCHEDULES = 50 if BIG else 1
TRIES = 300  # within which every planted bug must be found
HOUR_SECONDS = 3600.0
DAY_SECONDS = 24 * HOUR_SECONDS
# One long history with the times that a quiet deployment has: relays come and go, and for hours or
# days there is nobody but a scheduler. The network to the database is good, so that nothing excuses
# a duplicate for long.
DAYS = Size(
    seconds=5 * DAY_SECONDS,
    transactions=100,
    gap_seconds=DAY_SECONDS / 20,
    pause_seconds=HOUR_SECONDS / 6,
    relays=1,
    troubles=tuple(kind for kind in TROUBLES if kind not in ("lossy", "slow database")),
    outages_seconds=(60, HOUR_SECONDS, DAY_SECONDS),
    late_seconds=1.5 * DAY_SECONDS,
    retry=RetryPolicy((60, HOUR_SECONDS, 6 * HOUR_SECONDS), attempts=6),
    quiet_seconds=4 * DAY_SECONDS,
    shift_seconds=HOUR_SECONDS / 12,
    away_seconds=DAY_SECONDS / 2,
    settings={
        "lease_seconds": 120,
        "send_timeout_seconds": 10,
        "batch_rows": 100,
        "poll_max_seconds": 30,
        "rescan_seconds": 300,
        "keep_delivered_seconds": 24 * 3600,
    },
)


def play(seed: int, size: Size = SMALL) -> tuple[World, list[str]]:
    world = World(seed, size)
    try:
        world.run()
    except Exception:
        # What fails in the simulation itself must not hide the seed.
        world.wrong.append(traceback.format_exc())
    return world, violations(world)


def story(world: World, wrong: list[str]) -> str:
    """What somebody needs who wants to know why."""
    return "\n".join(
        [
            f"POSTROOM_SIM_SEED={world.seed}",
            f"troubles: {', '.join(world.troubles)}; settings: {world.settings}",
            *world.last_lines(),
            *wrong,
        ]
    )


def settle_in() -> None:
    """Garbage is collected between schedules: a tenth of the time goes into looking for it."""
    gc.freeze()
    gc.disable()


def play_many(seeds: list[int]) -> tuple[float, str]:
    """The virtual seconds of these schedules, and the story of the first that went wrong."""
    seconds = 0.0
    for seed in seeds:
        world, wrong = play(seed)
        seconds += world.loop.now
        if wrong:
            return seconds, story(world, wrong)
    gc.collect()
    return seconds, ""


@pytest.fixture
def first_seed() -> int:
    return uuid.uuid4().int % 1_000_000_000


def test_no_schedule_breaks_a_promise(first_seed: int) -> None:
    chosen = os.environ.get("POSTROOM_SIM_SEED")
    if chosen:
        world, wrong = play(int(chosen))
        print(story(world, wrong), f"digest {world.digest}", sep="\n")
        assert wrong == []
        return
    print(f"POSTROOM_SIM_SEED={first_seed} and the {SCHEDULES - 1} that follow")
    parts = [
        list(range(start, min(start + PART, first_seed + SCHEDULES)))
        for start in range(first_seed, first_seed + SCHEDULES, PART)
    ]
    begun, virtual = time.monotonic(), 0.0
    with ProcessPoolExecutor(mp_context=get_context("spawn"), initializer=settle_in) as pool:
        for seconds, told in pool.map(play_many, parts):
            virtual += seconds
            if told:
                pool.shutdown(wait=False, cancel_futures=True)
                pytest.fail(told, pytrace=False)
    took = time.monotonic() - begun
    print(f"{SCHEDULES} schedules, {virtual / HOUR_SECONDS:.1f} virtual hours in {took:.0f} s")


@pytest.mark.parametrize("number", range(LONG_SCHEDULES))
def test_days_go_by(number: int, first_seed: int) -> None:
    seed = int(os.environ.get("POSTROOM_SIM_SEED") or first_seed)
    begun = time.monotonic()
    world, wrong = play(seed, DAYS)
    took = time.monotonic() - begun
    print(f"POSTROOM_SIM_SEED={seed}: {world.loop.now / DAY_SECONDS:.1f} days in {took:.0f} s")
    assert wrong == [], story(world, wrong)
    assert world.loop.now > DAYS.seconds


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str) -> None:
    bug = BUGS[name]
    for seed in range(TRIES):
        with bug.plant():
            world = bug.world(seed, bug.size, bug.view)
            world.run()
        if wrong := violations(world):
            break
    else:
        pytest.fail(f"not found in {TRIES} schedules")
    assert any(sign in sentence for sign in bug.shows for sentence in wrong), wrong
    # The same schedule without the bug: it is the bug that was found, and not the simulation's own.
    assert play(seed, bug.size)[1] == []
    print(f"found in schedule {seed}: {wrong[0]}")


def test_exit_at_sigterm_costs_duplicates_and_nothing_else() -> None:
    bug = BUGS["exit at SIGTERM"]
    for seed in range(20):
        world = bug.world(seed, bug.size)
        world.run()
        assert [wrong for wrong in violations(world) if "came twice" not in wrong] == []


def test_a_seed_tells_the_same_story_in_every_process() -> None:
    code = "from simulation.world import *; w = World(7, Size()); w.run(); print(w.digest)"
    told = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=TESTS,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    world, _ = play(7)
    assert told == {f"{world.digest}\n"}
    assert play(8)[0].digest != world.digest


def test_every_query_of_the_outbox_is_answered() -> None:
    known = {name for name in dir(View) if not name.startswith("_")}
    # These ask about sessions, which the server knows.
    known |= {"horizon", "open_publishers"}
    assert sql.query_names("postroom.outbox", "postgresql") - known == set()
