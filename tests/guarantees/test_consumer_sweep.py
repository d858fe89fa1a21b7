"""A consumer may die at any line: killed at every point it passes, each effect comes once.

receive → enter → claim → handler → commit → acknowledge, and what is kept of failures: the points
are learnt from a run in which nothing goes wrong, and then each is the end of a run of its own, by
a kill or by an error before or after the effect; on MariaDB and SQLite half of them, by a seed.
"""

import re
import time
from collections import Counter as Points
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from counters import Counter
from sweeping import Case, full_size, kills, learn, share, sweep, tell, together
from worlds import KINDS, World

from helpers import eventually

pytestmark = pytest.mark.guarantee

INSIDE = re.compile(r"consumer\.(handler|commit|ack)|sql\.(begin|enter|claim|lock|drop|insert)")
SMALL = {"chunk_rows": 4, "concurrency": 2, "in_hand_rows": 16}


def finish(counter: Counter, child: object) -> int:
    """Let a consumer work until all is done, or until it ends by itself; then it must stop."""
    eventually(lambda: counter.settled() or child.code is not None, 60, interval=0.05)  # type: ignore[attr-defined]
    child.terminate()  # type: ignore[attr-defined]
    return child.wait()  # type: ignore[attr-defined,no-any-return]


def errors(points: dict[str, int]) -> list[Case]:
    """The first pass of each point fails; at full size alone, and the last one too."""
    if full_size():
        return [
            Case("error", (point,), at)
            for point, passes in sorted(points.items())
            for at in sorted({1, passes})
        ]
    # What fails at the start ends the consumer, and nothing behind it would be come to.
    fatal = sorted(
        point for point in points if point.startswith(("link.", "sql.meta", "sql.begin"))
    )
    survived = sorted(points.keys() - set(fatal))
    return [Case("error", tuple(group)) for group in [*([p] for p in fatal), *together(survived)]]


def run_case(world: World, case: Case, **how: Any) -> str:
    counter = Counter(world)
    counter.send_scenario()
    child = counter.start(case.failpoints, settings=SMALL, **how)
    code = finish(counter, child)
    if not counter.settled():
        assert code != 0, "a consumer that stopped in good order left work behind"
        successor = counter.start(settings=SMALL, **how)
        assert finish(counter, successor) == 0, successor.log
    counter.judge()
    end = "killed" if code == -9 else "survived" if code == 0 else "gave up"
    return f"{case.action}: {end}"


@pytest.mark.parametrize("kind", KINDS)
def test_a_consumer_may_die_at_any_point(
    kind: str, seed: str, new_world: Callable[[str], World]
) -> None:
    begun = time.perf_counter()
    world = new_world(kind)
    log: Path = world.folder / "points"
    counter = Counter(world)
    counter.send_scenario()
    child = counter.start(log=log, settings=SMALL)
    assert finish(counter, child) == 0, child.log
    counter.judge()
    points = learn(log)
    for stage in ("receive", "handler", "commit", "ack"):
        assert points[f"consumer.{stage}.before"], stage
    for query in ("enter", "claim", "park", "bury", "lease", "start", "drop_parked"):
        assert points[f"sql.{query}.after"], query
    chosen = share([*kills(points), *errors(points)], kind, seed)
    ends = sweep(lambda: new_world(kind), chosen, run_case)
    tell(kind, begun, len(chosen), f"{len(points)} points", ends)


@pytest.mark.parametrize("kind", KINDS)
def test_a_consumer_on_django_s_connection_may_die_at_any_point_of_its_transactions(
    kind: str, seed: str, new_world: Callable[[str], World]
) -> None:
    """Only the points inside a transaction of handlers differ from the sweep above."""
    begun = time.perf_counter()
    world = new_world(kind)
    log: Path = world.folder / "points"
    counter = Counter(world)
    counter.send_scenario()
    child = counter.start(log=log, settings=SMALL, django=True)
    assert finish(counter, child) == 0, child.log
    counter.judge()
    points = learn(log)
    assert points["sql.begin.after"]  # handlers worked on Django's connection
    inside = re.compile(
        r"consumer\.(handler|commit|ack)\.|sql\.(begin|enter|claim|lock|drop|insert)"
    )
    differing = Points({name: passes for name, passes in points.items() if inside.match(name)})
    chosen = share([*kills(differing), *errors(differing)], kind, seed)
    ends = sweep(lambda: new_world(kind), chosen, partial(run_case, django=True))
    tell(kind, begun, len(chosen), f"{len(differing)} points", ends)


@pytest.mark.parametrize("kind", KINDS)
def test_kills_at_random_moments(kind: str, new_world: Callable[[str], World], seed: str) -> None:
    """Two consumers that take turns being killed, while messages keep coming."""
    import random

    dice = random.Random(seed)
    world = new_world(kind)
    counter = Counter(world)
    kills, last = 12, dict.fromkeys(range(6), 0)
    child = counter.start(settings=SMALL)
    for _ in range(kills):
        for _ in range(30):
            key = dice.randrange(6)
            counter.send(f"key-{key}", last[key], "transient" if dice.random() < 0.05 else "")
            last[key] += 1
        time.sleep(dice.random() * 0.4)  # the moment of the kill is the test
        child.kill()
        child = counter.start(settings=SMALL)
    # The one before may have done everything: one that is told to stop must have come to work.
    counter.send("key-0", last[0])
    assert finish(counter, child) == 0, child.log
    counter.judge()
