"""Hints wake a relay that polls rarely; a lost hint costs a poll and never the relay."""

import asyncio
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from relaying import Post, note, on_postgres
from sqlalchemy import create_engine, make_url
from sqlalchemy.orm import Session

from helpers import eventually_async
from postroom import failpoints
from postroom.databases.database import Database
from postroom.outbox import notify
from postroom.outbox.notify import Notifier
from postroom.outbox.relay import Relay
from postroom.outbox.together import Pulse

pytest_plugins = ("relay_fixtures",)

# Far longer than the tests wait: only a hint can be why a message arrives.
RARELY = {"poll_max_seconds": 60.0, "poll_min_seconds": 60.0}


async def settled(post: Post, relay: Relay) -> None:
    """Wait until every lane has read once and now waits for its next poll."""

    def waiting() -> bool:
        office = relay._office
        return office is not None and len(office.pulse._waiters) == 16

    await eventually_async(waiting)


async def arrives_within(post: Post, count: int, seconds: float) -> None:
    begun = time.perf_counter()
    await eventually_async(lambda: len(post.broker.messages) == count, seconds)
    assert time.perf_counter() - begun < seconds


async def test_without_a_hint_it_waits_for_its_poll(post: Post) -> None:
    async with post.relay(**RARELY) as relay:
        await settled(post, relay)
        await post.put(note("k", 1))
        await asyncio.sleep(0.3)
        assert post.broker.messages == []


async def test_a_lost_hint_costs_a_poll(post: Post) -> None:
    """Published by a plain driver in another thread: nobody tells the relay."""
    async with post.relay(listen=False, poll_min_seconds=0.3, poll_max_seconds=0.3) as relay:
        await settled(post, relay)
        await post.put(note("k", 1))
        await eventually_async(lambda: len(post.broker.messages) == 1)


async def test_a_commit_in_the_same_process_wakes_it(post: Post) -> None:
    driver = {"postgresql": "psycopg", "mariadb": "pymysql", "sqlite": "pysqlite"}[post.dialect]
    url = make_url(post.url)
    engine = create_engine(url.set(drivername=f"{url.drivername}+{driver}"))

    def publish() -> None:
        with Session(engine) as session:
            post.outbox.publish(session, 1, type="note", topic="orders", key="k")
            session.commit()

    async with post.relay(listen=False, **RARELY) as relay:
        await settled(post, relay)
        await asyncio.to_thread(publish)
        await arrives_within(post, 1, 30)
    engine.dispose()


def pauses(pace: notify.Pace, phases: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Run the notifier's loop on a made-up clock; each phase is a duration and a commit rate.

    Returns the time and length of each pause."""
    found, now, start, count = [], 0.0, 0.0, 0.0
    for seconds, rate in phases:
        while now < start + seconds:
            pause = pace.after(now, int(count + (now - start) * rate))
            found.append((now, pause))
            now += max(pause, 1 / rate)  # a hint needs a commit
        start, count = start + seconds, count + seconds * rate
    return found


def test_the_pause_comes_down_when_a_burst_is_over() -> None:
    found = pauses(notify.Pace(), [(0.5, 3_000), (2.0, 200)])
    assert found[0][1] == notify.QUIET_SECONDS
    burst = {pause for at, pause in found if 0.1 < at < 0.5}
    assert burst == {notify.BUSY_SECONDS}
    after = {pause for at, pause in found if at > 0.5 + 3 * notify.WINDOW_SECONDS}
    assert after == {notify.QUIET_SECONDS}


@given(
    st.lists(st.tuples(st.floats(0.2, 2), st.floats(5, 20_000)), max_size=5),
    st.floats(5, 20_000).filter(lambda rate: abs(rate - notify.BUSY_RATE) > 50),
)
def test_the_pause_depends_on_the_rate_of_now_alone(
    before: list[tuple[float, float]], rate: float
) -> None:
    settle = 3 * notify.WINDOW_SECONDS + 2 / rate
    found = pauses(notify.Pace(), [*before, (settle + 1.0, rate)])
    start = sum(seconds for seconds, _ in before)
    last = {pause for at, pause in found if at > start + settle}
    expected = notify.BUSY_SECONDS if rate > notify.BUSY_RATE else notify.QUIET_SECONDS
    assert last <= {expected}


@pytest.fixture
def failing() -> Iterator[None]:
    yield
    failpoints.clear()


@pytest.mark.usefixtures("failing")
async def test_a_hint_during_a_read_reaches_every_lane(post: Post) -> None:
    """The message is committed after the read has its snapshot, and all lanes share that read."""
    point = "sql.read_lanes.after" if post.dialect == "postgresql" else "sql.lane_sizes.after"
    async with post.relay(listen=False, **RARELY) as relay:
        await settled(post, relay)
        office = relay._office
        assert office is not None

        def commit() -> None:
            failpoints.clear()
            post.publish(*[note(f"k{n}", n) for n in range(50)])  # in every lane
            office.pulse.hint()

        failpoints.arm(point, commit, at=1 if post.dialect == "postgresql" else 16)
        office.pulse.hint()
        await arrives_within(post, 50, 30)


async def test_idle_lanes_share_a_read_only_while_messages_are_under_way() -> None:
    pulse = Pulse(60.0, 60.0)
    idle = asyncio.create_task(pulse.wait(pulse.hints))
    await asyncio.sleep(0)
    pulse.share(0)
    await asyncio.sleep(0)
    assert not idle.done()
    pulse.share(3)
    await eventually_async(idle.done)


@on_postgres
async def test_hints_that_come_thick_and_fast_are_told_rarely(post: Post) -> None:
    notifier = Notifier(post.url)
    told: list[float] = []
    link = await Database(post.url).connect()
    listener = asyncio.create_task(notify.listen(link, lambda: told.append(time.monotonic())))
    try:
        await eventually_async(lambda: notifier.hint() or told)
        hints, begun = 0, time.monotonic()
        while time.monotonic() - begun < 0.5:
            notifier.hint()
            hints += 1
            await asyncio.sleep(0)
        late = [at for at in told if at > begun + 0.1]
        assert hints > 10 * len(late)
        assert len(late) <= 0.4 / notify.BUSY_SECONDS + 2
        assert late  # though never silent
    finally:
        listener.cancel()
        await asyncio.gather(listener, return_exceptions=True)
        await link.close()


@on_postgres
@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_a_notification_wakes_relays_elsewhere(post: Post, driver: str) -> None:
    post.url = post.url.replace("postgresql:", f"postgresql+{driver}:")
    plain = post.url.replace(f"+{driver}", "")
    notifier = Notifier(post.url)
    async with post.relay(**RARELY) as relay:
        await settled(post, relay)
        post.url = plain
        await eventually_async(lambda: listening(post) == 1)
        for n in range(1, 4):
            await settled(post, relay)
            await post.put(note("k", n))
            notifier.hint()
            await arrives_within(post, n, 30)


@on_postgres
@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_a_lost_listener_does_not_end_the_relay(
    post: Post, driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "ALIVE_SECONDS", 0.1)
    plain = post.url
    post.url = post.url.replace("postgresql:", f"postgresql+{driver}:")
    async with post.relay():
        post.url = plain
        await eventually_async(lambda: listening(post) == 1)
        post.sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            " AND (query LIKE 'LISTEN%' OR query = 'SELECT 1')"
        )
        await eventually_async(lambda: post.of("notify.lost"))
        await post.put(note("k", 1))
        await eventually_async(post.empty)
    assert not post.of("database.lost")


def listening(post: Post) -> int:
    """How many sessions listen; those that keep themselves alive show that last."""
    rows = post.sql(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
        " AND pid <> pg_backend_pid() AND (query LIKE 'LISTEN%' OR query = 'SELECT 1')"
    )
    return int(rows[0][0])
