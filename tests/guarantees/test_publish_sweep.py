"""A message exists if and only if the change it tells of does, wherever the publisher dies."""

import time
from collections.abc import Callable

import pytest
from sweeping import Case, learn, sweep, tell
from worlds import KINDS, World

pytestmark = pytest.mark.guarantee


def run_case(world: World, case: Case) -> str:
    child = world.writer(case.failpoints, program="publisher")
    assert child.wait() == (-9 if case.action == "kill" else 1)
    messages = world.tables.ids("outbox") | world.tables.ids("delayed")
    assert messages == world.tables.business()
    report = world.judge()
    assert not report.violations, report
    return f"{case.action}: {len(messages)} committed"


@pytest.mark.parametrize("kind", KINDS)
def test_business_rows_and_messages_are_always_alike(
    kind: str, new_world: Callable[[str], World]
) -> None:
    begun = time.perf_counter()
    world = new_world(kind)
    points = world.folder / "points"
    child = world.writer(program="publisher", points=points)
    assert child.wait() == 0, child.log
    assert len(world.tables.business()) == 14
    learnt = learn(points)
    chosen = [
        Case(action, (point,), at)
        for point, passes in sorted(learnt.items())
        for action in ("kill", f"error {point.rpartition('.')[2]}")
        for at in range(1, passes + 1)
    ]
    ends = sweep(lambda: new_world(kind), chosen, run_case)
    tell(kind, begun, len(chosen), f"{len(learnt)} points", ends)
