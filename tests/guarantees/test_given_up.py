"""A claim whose reply was lost is given up, and back: whatever ends that, its key is free, or held
until its lease is over and then in doubt. Nothing is carried out for a claim that was given up."""

import pytest
from quitters import paying
from sweeping import Case
from worlds import World

from postroom.errors import KeyInDoubt, KeyInProgress
from postroom.idempotency import SHARED, Keys

pytestmark = pytest.mark.guarantee

# Where the process is killed, or an error raised; and what has become of the key by then.
POINTS = {
    "key.give_back.before": "pending",
    "sql.fail.before": "pending",
    "sql.fail.after": "failed",
    "key.give_back.after": "failed",
}


def status(world: World) -> str:
    ((found,),) = world.tables.query("SELECT status FROM {p}idempotency_key")
    return str(found)


def run_case(world: World, how: str, case: Case) -> None:
    world.clear()
    effects, (point,) = world.folder / f"effects-{case}", case.points
    environment = {"POSTROOM_FAILPOINTS": case.failpoints}
    child = world._start("quitter", environment, effects=str(effects), how=how)
    assert child.wait() == (-9 if case.action == "kill" else 0), child.log
    assert not effects.exists(), "it was given up"
    # After an error it is tried again.
    assert status(world) == (POINTS[point] if case.action == "kill" else "failed"), child.log
    keys = Keys(world.tables.url, scope=SHARED)
    pay = paying(keys, str(effects))
    if status(world) == "failed":
        assert [pay("k"), pay("k")] == ["paid", "paid"]
        assert (status(world), effects.read_text()) == ("completed", "k\n")
    else:
        with pytest.raises(KeyInProgress):
            pay("k")
        past = "0" if world.tables.kind == "sqlite" else "'2020-01-01'"
        world.tables.query(f"UPDATE {{p}}idempotency_key SET locked_until = {past}")
        for _ in range(2):
            with pytest.raises(KeyInDoubt):
                pay("k")
        assert (status(world), effects.exists()) == ("indeterminate", False)
    keys.close()


@pytest.mark.parametrize("how", ["sync", "async"])
def test_whoever_gives_a_claim_back_may_die_at_any_point(world: World, how: str) -> None:
    for action in ("kill", "error"):
        for point in POINTS:
            run_case(world, how, Case(action, (point,)))
