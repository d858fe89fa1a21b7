"""All that can happen to a message, in one small outbox that a relay works off."""

import datetime as dt
from typing import Any

from nursery import Child
from sweeping import full_size
from tables import Tables
from worlds import World, drafts

from helpers import eventually
from postroom.messages import Draft

SMALL = {"batch_rows": 4, "in_flight_rows": 64}
if not full_size():
    SMALL["lease_seconds"] = 30  # ended by hand, once its relay is dead
PAST = dt.datetime.now(dt.UTC) - dt.timedelta(minutes=1)


def draft(n: int, do: str = "", *, key: str | None, **wishes: Any) -> Draft:
    return Draft(payload={"n": n, "do": do}, type="fact", topic="facts", key=key, **wishes)


def publish_scenario(world: World) -> tuple[set[str], dict[str, str]]:
    """All that can happen to a message; returns who is delivered in the end, and who dies why."""
    good = world.publish(*drafts(20, keys=4))
    good += world.publish(draft(1, key="tried"), draft(2, "transient", key="tried"))
    good += world.publish(*[draft(n, key="tried") for n in range(3, 11)])
    good += world.publish(draft(1, key=None), draft(2, "transient", key=None), draft(3, key=None))
    good += world.publish(draft(1, key="later", deliver_at=PAST), draft(2, key="later"))
    good += world.publish(draft(1, key="dead"))
    (dead,) = world.publish(draft(2, "permanent", key="dead"))
    world.publish(*[draft(n, key="dead") for n in range(3, 8)])
    (expired,) = world.publish(draft(1, key="gone", expires_at=PAST))
    _leave_suspects(world.tables)
    return set(good), {dead: "refused", expired: "expired"}


def _leave_suspects(tables: Tables) -> None:
    """A relay died here before: its batch of the lane with most, and one message alone."""
    lane, lo, hi = tables.query(
        "SELECT lane, MIN(position), MAX(position) FROM {p}outbox GROUP BY lane"
        " ORDER BY COUNT(*) DESC, lane LIMIT 1"
    )[0]
    for batch, last, alone in ((1, hi, False), (2, lo, True)):
        tables.query(
            "INSERT INTO {p}lane_batch (lane, incarnation, batch, lo, hi, messages, alone)"
            " VALUES (%s, 'gone', %s, %s, %s, 3, %s)",
            *(lane, batch, lo, last, alone),
        )


def work(world: World, relay: Child) -> None:
    """Let a relay work until all is done, or until it ends by itself; then it must stop."""
    # A machine that is busy lets a probe of the broker time out now and then.
    eventually(lambda: world.settled_or_ended(relay), 90, interval=0.05)
    relay.terminate()
    relay.wait()
