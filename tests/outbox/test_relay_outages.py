"""An outage seen from outside: figures stay true, alerts do not flap, and the relay soon uses a
destination that is back."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from relaying import Post, note

from helpers import eventually_async
from places import SERVED, Served
from postroom.brokers.base import Outcome, Transient
from postroom.brokers.memory import MemoryBroker
from postroom.config import AlertSettings
from postroom.databases.database import Database
from postroom.messages import Message
from postroom.ops import health, status
from postroom.outbox import destinations, rules, watch
from postroom.outbox.relay import Relay
from postroom.outbox.telling import ranges

pytest_plugins = ("relay_fixtures",)


class Slow(MemoryBroker):
    """A broker that takes its time to answer, as one that is down and silent does."""

    sends = 0

    async def send(self, batch: Sequence[Message], *, epoch: int = 0) -> list[Outcome]:
        self.sends += 1
        if self.down:
            await asyncio.sleep(0.4)
        return await super().send(batch, epoch=epoch)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "MEASURE_SECONDS", 0.1)
    monkeypatch.setattr(watch, "ELECTION_SECONDS", 0.05)
    monkeypatch.setattr(
        destinations, "Breaker", lambda: rules.Breaker(first_seconds=0.02, cap_seconds=0.1)
    )


@pytest.mark.parametrize("keys", [1, 20])
async def test_figures_never_fall_and_the_alert_stays_until_recovery(
    post: Post, quick: None, keys: int
) -> None:
    broker = Slow()
    broker.down = True
    post.publish(*(note(f"k{n}", n) for n in range(keys)))

    def measured() -> list[dict[str, Any]]:
        return post.of("outbox.measured")

    def alerts(state: str) -> list[str]:
        return [fields["alert"] for fields in post.of(f"alert.{state}")]

    relay = post.relay(
        brokers={post.broker_url: broker}, alert_settings=AlertSettings(stale_seconds=0.5)
    )
    async with relay:
        await eventually_async(lambda: alerts("raised"), 20)
        seen, sends = len(measured()), broker.sends
        await eventually_async(lambda: len(measured()) > seen + 20 and broker.sends > sends + 4, 30)
        figures = measured()
        assert {each["pending"] for each in figures} == {keys}
        ages = [each["oldest_pending_seconds"] for each in figures]
        assert ages == sorted(ages)
        link = await Database(post.url).connect()
        state = await status.look(link)
        await link.close()
        assert state["pending"] + state["held"] == keys
        assert not relay.health().ready
        broker.down = False
        await eventually_async(lambda: alerts("resolved"), 20)
    assert alerts("raised") == alerts("resolved") == ["stale_backlog"]


async def down_for_hours(relay: Relay) -> None:
    """Wait until a destination is down, and for a failed probe as after hours of it."""
    down = relay.sender.destinations.down
    await eventually_async(down, 30)
    for breaker in down().values():
        breaker.failures = 20
    await eventually_async(lambda: any(each.failures > 20 for each in down().values()), 30)


@pytest.fixture(params=["nats", "kafka", "redis"])
async def place(request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    kind, server = SERVED[request.param]
    made = kind(request.getfixturevalue(server))
    await made.begin()
    yield made
    await made.end()


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("silent", [False, True], ids=["refused", "silent"])
async def test_a_broker_that_is_back_after_a_long_outage_is_used_at_once(
    post: Post, place: Served, silent: bool
) -> None:
    broker = place.narrow(2.0)
    detour = place.detour
    relay = post.relay("it://", brokers={"it://": broker})
    async with relay:
        await post.put(note("k", 0, topic=place.topic))
        await eventually_async(post.empty, 30)
        if silent:
            await asyncio.to_thread(detour.freeze, "to_client")
        else:
            await asyncio.to_thread(detour.refuse)
            await asyncio.to_thread(detour.cut)
        await post.put(*(note(f"k{n}", n, topic=place.topic) for n in range(1, 9)))
        await eventually_async(relay.sender.destinations.down, 30)
        await asyncio.sleep(0)
        for breaker in relay.sender.destinations.down().values():
            breaker.failures = 20  # as after hours
        await eventually_async(
            lambda: any(each.failures > 20 for each in relay.sender.destinations.down().values()),
            30,
        )
        begun = time.monotonic()
        await asyncio.to_thread(detour.thaw if silent else detour.accept)
        await eventually_async(post.empty, 60)
        # Less than the half minute that a breaker's back-off alone would last.
        assert time.monotonic() - begun < 10
    await broker.close()


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_a_topic_that_is_back_after_a_long_outage_is_used_at_once(post: Post) -> None:
    full = [True]
    no_room = Transient("full", "maximum bytes exceeded", down="topic")
    post.broker.fail(lambda message: full[0], no_room, times=None)
    async with post.relay() as relay:
        await post.put(*(note(f"k{n}", n) for n in range(9)))
        await down_for_hours(relay)
        begun = time.monotonic()
        full[0] = False
        await eventually_async(post.empty, 100)
        assert time.monotonic() - begun < 12


async def test_an_outage_is_one_line_down_and_one_line_up(post: Post, quick: None) -> None:
    async with post.relay():
        await post.put(*(note(f"k{n}", n) for n in range(40)))
        await eventually_async(post.empty)
        post.broker.down = True
        await post.put(*(note(f"k{n}", n) for n in range(40)))
        await eventually_async(lambda: sum("destination." in name for name, _ in post.heard) > 6)
        post.broker.down = False
        await eventually_async(post.empty)
    assert len(post.of("destination.down")) == len(post.of("destination.up")) == 1


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_sixteen_lanes_are_one_line(post: Post, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "postroom")
    async with post.relay():
        await eventually_async(lambda: post.of("lanes.acquired"))
    lines = [record.getMessage() for record in caplog.records if "lane" in record.getMessage()[:4]]
    assert [line.split()[:2] for line in lines] == [
        ["lanes.acquired", "lanes=0-15"],
        ["lanes.released", "lanes=0-15"],
    ]
    assert len(post.of("lane.acquired")) == len(post.of("lane.released")) == 16


def test_lanes_are_spelled_as_ranges() -> None:
    assert ranges([3, 0, 1, 2, 7, 9, 10]) == "0-3,7,9-10"
    assert ranges([]) == ""


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_ready_names_topics_that_are_down(post: Post, quick: None) -> None:
    missing = [True]
    no_stream = Transient("no_stream", "no stream takes it", down="topic")
    post.broker.fail(lambda m: m.topic == "ordres" and missing[0], no_stream, times=None)

    def ready() -> tuple[int, dict[str, Any]]:
        answered = health.answer(relay, "GET", "/readyz")
        return answered.status, json.loads(answered.body)

    async with post.relay() as relay:
        await post.put(note("k", 1), note("k", 2, topic="ordres"))
        await eventually_async(lambda: post.of("destination.down"))
        # The rest flows, so the relay stays in service.
        reasons = ["topic ordres: no_stream: no stream takes it"]
        for _ in range(20):
            assert ready() == (200, {"status": "degraded", "reasons": reasons})
            await asyncio.sleep(0.02)
        missing[0] = False
        await eventually_async(lambda: ready() == (200, {"status": "ok", "reasons": []}))
