"""A relay may die at any line: killed at every point it passes, nothing is lost and order holds.

The points are learnt from a run in which nothing goes wrong, and then each is the end of a run of
its own. In place of the kill there may be an error, before the effect or after it, which the relay
may survive: on SQLite, which has no network, the error after is the reply that is lost (for the
others see test_lost_replies.py). POSTROOM_SWEEP=full also waits for the dead relay's leases, fails
at more passes of each point, and does all of it on MariaDB and SQLite too, where every day has half
of it.
"""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from nursery import Child
from scenario import SMALL, publish_scenario, work
from sweeping import Case, errors, full_size, kills, learn, share, sweep, tell
from worlds import KINDS, World

pytestmark = pytest.mark.guarantee

MISSED = "did not come there"


def start(world: World, case: Case, log: Path) -> Child:
    if case.action == "kill":
        return world.relay(case.failpoints, log=log, settings=SMALL)
    errors = [(point, case.at) for point in case.points]
    return world.relay(log=log, settings=SMALL, errors=errors, faults=str(world.faults))


def run_case(world: World, case: Case) -> str:
    good, dead = publish_scenario(world)
    log = world.record.with_suffix(".points")
    relay = start(world, case, log)
    world.disturbed.add(relay.pid)
    work(world, relay)
    killed = relay.code == -9
    reached = killed if case.action == "kill" else set(case.points) <= learn(log).keys()
    in_flight: set[str] = set()
    if killed:
        world.note_fault()
        in_flight = world.delivered() & world.standing()
    if not world.settled():
        assert relay.code != 0, "a relay that stopped in good order left work behind"
        if not full_size():
            world.tables.end_leases()
        successor = world.relay(settings=SMALL)
        work(world, successor)
        assert successor.code == 0
    report = world.judge(in_flight=SMALL["in_flight_rows"], every_fault_noted=True)
    assert not report.violations, report
    assert world.settled()
    assert world.delivered() == good
    assert world.tables.dead() == dead
    if killed:
        assert set(report.repeated) == in_flight, "not all that was in flight, or more, came again"
    if not reached:
        return f"{case.action}: {MISSED if case.certain else 'fewer passes this time'}"
    end = "killed" if killed else "survived" if relay.code == 0 else "gave up"
    return f"{case.action}: {end}, {report.duplicates.total()} twice"


@pytest.mark.parametrize("kind", KINDS)
def test_a_relay_may_die_at_any_point(
    kind: str, seed: str, new_world: Callable[[str], World]
) -> None:
    begun = time.perf_counter()
    world = new_world(kind)
    good, dead = publish_scenario(world)
    relay = world.relay(log=world.folder / "points", settings=SMALL)
    work(world, relay)
    assert relay.code == 0, relay.log
    assert world.delivered() == good, relay.log
    assert world.tables.dead() == dead
    assert not world.judge().violations
    points = learn(world.folder / "points")
    for point, passes in points.items():
        name, _, end = point.rpartition(".")
        assert points[f"{name}.{'after' if end == 'before' else 'before'}"] == passes, point
    chosen = share([*kills(points), *errors(points)], kind, seed)
    ends = sweep(lambda: new_world(kind), chosen, run_case)
    tell(kind, begun, len(chosen), f"{len(points)} points", ends)
    # A few points are passed only if two things happen in one order, not in the other.
    assert sum(count for end, count in ends.items() if MISSED in end) < len(chosen) / 10
