"""No lane belongs to a relay that does not work it: after a lost connection all is shared anew."""

from functools import partial

import pytest
from worlds import World, drafts, together

from helpers import eventually
from postroom.messages import LANES

pytestmark = pytest.mark.guarantee

MESSAGES = 20 * LANES  # with a key each, so that every lane has some


def test_what_a_relay_owned_before_it_lost_its_database_is_worked_again(world: World) -> None:
    # It loses the connection at its second round, when it is not alone any more.
    first = world.relay("sql.workers_live.before=error@2")
    world.disturbed.add(first.pid)
    world.until_taken(first)
    world.tables.query(
        "INSERT INTO {p}worker (incarnation, kind, name) VALUES ('newcomer', 'relay', 'newcomer')"
    )
    second = world.relay()
    eventually(partial(first.wrote, "database.back"))
    eventually(lambda: first.lanes_acquired > LANES)
    world.publish(*drafts(MESSAGES, keys=MESSAGES))
    world.until_settled()
    assert len(world.delivered()) == MESSAGES
    for relay in (first, second):
        relay.terminate()
        assert relay.wait() == 0, relay.log
    report = world.judge()
    assert not report.violations, f"{report}\n{together((first, second))}"
