"""A gateway may die at any line: each order is placed once, by an exchange that would take copies.

accept → journal → send → look up → settle with the ledger, point by point: the points are learnt
from a run in which nobody dies, and then each is the end of a gateway. The next one goes on.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from sweeping import Case, full_size, kills, learn, sweep, tell
from traders import Market
from worlds import KINDS, World

pytestmark = pytest.mark.guarantee

KEY_POINTS = (
    "gateway.accept.after",
    "relay.send.after",
    "relay.lookup.after",
    "sql.finish.after",
)


def run_case(world: World, case: Case) -> str:
    with Market(world) as market:
        code = market.trader(case.failpoints).wait(600)
        if code == -9:
            successor = market.trader()
            assert successor.wait(600) == 0, successor.log
        market.judge()
    return {-9: "killed", 0: "not reached"}[code]


@pytest.mark.parametrize("kind", KINDS)
def test_a_kill_at_every_point_places_each_order_once(
    kind: str, seed: str, new_world: Callable[[str], World]
) -> None:
    begun = time.perf_counter()
    world = new_world(kind)
    log = world.folder / "points"
    with Market(world) as market:
        first = market.trader(log=log)
        assert first.wait(600) == 0, first.log
        market.judge()
    points = learn(log)
    assert set(points) >= set(KEY_POINTS)
    chosen = list(kills(points) if full_size() else some(points, seed))
    ends = sweep(lambda: new_world(kind), chosen, run_case)
    tell(kind, begun, len(chosen), f"{len(points)} points", ends)
    # Which of the other points a gateway passes depends on who is faster.
    assert ends["killed"] >= (len(chosen) * 0.8 if full_size() else len(chosen) - 1)


def some(points: Counter[str], seed: str) -> Iterator[Case]:
    """Every day: two of the points between two effects, and another one."""
    dice = random.Random(seed)
    others = sorted(set(points) - set(KEY_POINTS))
    for point in (*dice.sample(KEY_POINTS, 2), dice.choice(others)):
        yield Case("kill", (point,))
