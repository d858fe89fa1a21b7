"""A request with a key may lose its process at any line: it is carried out once, in every mode,
whichever door it came through.

claim → work → finish → commit, point by point and call by call: the points are learnt from a run in
which nothing goes wrong, and then each is the end of a run of its own, by a kill or by an error.
The client then asks again, as clients do. In everyday runs it is a part of them, chosen by a seed.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from registers import IN_ONE, MODES, ROUNDS, Register, requests
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
    "key.refusal.before",
)
SOME = {"sqlite": 16, "postgresql": 8, "mariadb": 2}
# The other doors have most of this in common: everyday it is so many of them, and of each.
OTHER_DOORS = {"sqlite": (6, 2), "postgresql": (6, 1), "mariadb": (2, 1)}
# What is passed at every door; and the commit that holds everything, which of functions is their
# caller's.
PASSED = ("key.claim", "key.finish", "key.point", "key.call", "clerk.effect")
COMMITS = {"function": "clerk.commit", "function_async": "clerk.commit"}


@dataclass(frozen=True)
class AtDoor:
    """What goes wrong, and where it was asked for."""

    door: str
    case: Case

    def __str__(self) -> str:
        return f"{self.door} {self.case}"


def run_case(world: World, at: AtDoor) -> str:
    case = at.case
    register = Register(world, at.door)
    code = register.start(case.failpoints).wait()
    # What failed is tried again, by its client and by a worker.
    successor = register.start(rounds=ROUNDS)
    assert successor.wait() == 0, successor.log
    register.judge()
    return f"{at.door} {case.action}: {'killed' if code == -9 else 'survived'}"


def every(points: Counter[str]) -> Iterator[Case]:
    """Every pass of every point, as the modes share most; each by a kill and by an error."""
    for action in ("kill", "error"):
        for point, passes in sorted(points.items()):
            for at in range(1, passes + 1):
                yield Case(action, (point,), at)


def doors(kind: str, seed: str) -> list[str]:
    if full_size():
        return list(MODES)
    first, *others = MODES
    return [first, *random.Random(seed).sample(others, OTHER_DOORS[kind][0])]


def some(door: str, points: Counter[str], kind: str, seed: str) -> Iterator[Case]:
    """What must not be left out, and a few by chance."""
    if door != "asgi":
        _, few = OTHER_DOORS[kind]
        yield from random.Random(f"{seed} {door}").sample(list(every(points)), few)
        return
    if kind == "mariadb":  # the same program on a server that is slower to clear
        yield from (Case("kill", (point,)) for point in KEY_POINTS[:4])
    else:
        yield from (Case("kill", (point,)) for point in KEY_POINTS)
    yield from random.Random(seed).sample(list(every(points)), SOME[kind])


def learnt(world: World, door: str) -> Counter[str]:
    """The points that are passed at a door when nothing goes wrong."""
    world.clear()
    log: Path = world.folder / f"points-{door}"
    register = Register(world, door)
    first = register.start(log=log)
    assert first.wait() == 0, first.log
    register.judge()
    points = learn(log)
    for name in PASSED:
        assert points[f"{name}.before"], (door, name)
        assert points[f"{name}.after"], (door, name)
    in_one = sum(mode in IN_ONE for mode, _ in requests(door))
    for end in ("before", "after"):
        assert points[f"{COMMITS.get(door, 'key.commit')}.{end}"] == in_one, (door, end)
        refused = sum(mode == "refused" for mode, _ in requests(door))
        assert points[f"key.refusal.{end}"] == refused, (door, end)
    for query in ("claim", "finish", "advance"):
        assert points[f"sql.{query}.after"], (door, query)
    return points


@pytest.mark.parametrize("kind", KINDS)
def test_a_clerk_may_die_at_any_point(
    kind: str, seed: str, new_world: Callable[[str], World]
) -> None:
    begun = time.perf_counter()
    world = new_world(kind)
    chosen: list[AtDoor] = []
    for door in doors(kind, seed):
        points = learnt(world, door)
        cases = list(every(points) if full_size() else some(door, points, kind, seed))
        chosen += [AtDoor(door, case) for case in cases]
        print(f"{kind} {door}: {len(points)} points, {sum(points.values())} passes")
    ends = sweep(lambda: new_world(kind), chosen, run_case)
    tell(kind, begun, len(chosen), f"{len({at.door for at in chosen})} doors", ends)
