"""A request with a key may lose its process at any line: it is carried out once, in every mode.

claim → work → finish → commit, point by point and call by call: the points are learnt from a run in
which nothing goes wrong, and then each is the end of a run of its own, by a kill or by an error.
The client then asks again, as clients do.
"""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from clerks import Register
from sweeping import Case, full_size, learn, sweep, tell
from worlds import KINDS, World

pytestmark = pytest.mark.guarantee


def run_case(world: World, case: Case) -> str:
    register = Register(world)
    code = register.start(case.failpoints).wait()
    # What failed is tried again, by its client and by a worker.
    successor = register.start(rounds=3)
    assert successor.wait() == 0, successor.log
    register.judge()
    return f"{case.action}: {'killed' if code == -9 else 'survived'}"


@pytest.mark.parametrize("kind", KINDS)
def test_a_clerk_may_die_at_any_point(kind: str, new_world: Callable[[str], World]) -> None:
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
    # Every pass: the modes share most of their points.
    passes = [(point, at) for point in sorted(points) for at in range(1, points[point] + 1)]
    chosen = [Case("kill", (point,), at) for point, at in passes]
    if kind == "sqlite" or full_size():  # what an error does is the same on every database
        chosen += [Case("error", (point,), at) for point, at in passes]
    ends = sweep(lambda: new_world(kind), chosen, run_case)
    tell(kind, begun, len(chosen), f"{len(points)} points, {len(passes)} passes", ends)
