"""A relay whose grace is over keeps the lanes it names until their lease ends, and no others."""

import asyncio
from collections.abc import Sequence

from relaying import Post, note

from helpers import eventually_async
from postroom.brokers.base import Capabilities, Outcome
from postroom.messages import LANES, Message, lane_of

pytest_plugins = ("relay_fixtures",)

LANE = lane_of("orders", "k", "")


class Silent:
    """A broker that takes what it is sent and never says so."""

    def __init__(self) -> None:
        self.capabilities = Capabilities()
        self.sent = asyncio.Event()

    async def send(self, batch: Sequence[Message], *, epoch: int = 0) -> list[Outcome]:
        self.sent.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def ping(self) -> None: ...
    async def close(self) -> None: ...


def owned(post: Post) -> set[int]:
    return {lane for lane, owner in post.owners().items() if owner is not None}


async def test_when_its_grace_is_over_it_keeps_the_lane_of_the_send_and_says_so(post: Post) -> None:
    silent = Silent()
    relay = post.relay(
        "memory://silent",
        brokers={"memory://silent": silent},
        lease_seconds=60,
        send_timeout_seconds=30,
        grace_seconds=1,
    )
    working = asyncio.create_task(relay.run())
    await eventually_async(lambda: len(owned(post)) == LANES)
    await post.put(note("k", 1))
    await silent.sent.wait()
    relay.stop()
    await working
    (said,) = post.of("relay.unsettled")
    assert LANE in said["lanes"]
    assert LANE in owned(post) <= set(said["lanes"])
    assert post.count("worker") == 0
    # The send may still arrive, so nobody sends for this lane before the lease is over.
    drained = await post.relay(rebind=True).drain_once()
    assert (drained.delivered, drained.elsewhere) == (0, len(owned(post)))
    post.sql("UPDATE {p}lane SET owner = NULL")
    assert (await post.relay().drain_once()).delivered == 1
