"""A request with a key may lose its process at any line: it is carried out once, in every mode.

claim → work → finish → commit, point by point and call by call: the points are learnt from a run in
which nothing goes wrong, and then each is the end of a run of its own, by a kill or by an error.
The client then asks again, as clients do. In everyday runs it is a part of them, chosen by a seed.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from clerks import Register
from sweeping import Case, full_size, learn, sweep, tell
from worlds import KINDS, World

pytestmark = pytest.mark.guarantee

# Where a request is between two truths; and how many others, of all passes of all points.
KEY_POINTS = (
    "key.claim.after",
    "clerk.effect.after",
    "key.call.after",
    "key.point.after",
    "key.finish.before",
    "key.commit.before",
    "key.commit.after",
)
SOME = {"sqlite": 16, "postgresql": 8, "mariadb": 2}


def run_case(world: World, case: Case) -> str:
    register = Register(world)
    code = register.start(case.failpoints).wait()
    # What failed is tried again, by its client and by a worker.
    successor = register.start(rounds=3)
    assert successor.wait() == 0, successor.log
    register.judge()
    return f"{case.action}: {'killed' if code == -9 else 'survived'}"


def every(points: Counter[str]) -> Iterator[Case]:
    """Every pass of every point, as the modes share most; each by a kill and by an error."""
    for action in ("kill", "error"):
        for point, passes in sorted(points.items()):
            for at in range(1, passes + 1):
                yield Case(action, (point,), at)


def some(points: Counter[str], kind: str, seed: str) -> Iterator[Case]:
    """What must not be left out, and a few by chance."""
    if kind == "mariadb":  # the same program on a server that is slower to clear
        yield from (Case("kill", (point,)) for point in KEY_POINTS[:4])
    else:
        yield from (Case("kill", (point,)) for point in KEY_POINTS)
    yield from random.Random(seed).sample(list(every(points)), SOME[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_a_clerk_may_die_at_any_point(
    kind: str, seed: str, new_world: Callable[[str], World]
) -> None:
    begun = time.perf_counter()
    world = new_world(kind)
    log: Path = world.folder / "points"
    register = Register(world)
    first = register.start(log=log)
    assert first.wait() == 0, first.log
    register.judge()
    points = learn(log)
    for name in ("key.claim", "key.finish", "key.commit", "key.point", "key.call", "clerk.effect"):
        assert points[f"{name}.before"], name
        assert points[f"{name}.after"], name
    for query in ("claim", "finish", "advance"):
        assert points[f"sql.{query}.after"], query
    passes = sum(points.values())
    chosen = list(every(points) if full_size() else some(points, kind, seed))
    ends = sweep(lambda: new_world(kind), chosen, run_case)
    tell(kind, begun, len(chosen), f"{len(points)} points, {passes} passes", ends)
