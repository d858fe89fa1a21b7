"""Relays that come and go, freeze, lose their database or are cancelled: lanes are shared fairly,
nothing is lost, and nothing is left locked."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable

import pytest
from relaying import Post, by_key, first_by_key, note

from helpers import eventually_async
from postroom.brokers.base import Transient
from postroom.databases.database import DatabaseLost
from postroom.messages import LANES, Message, lane_of
from postroom.outbox.housekeeping import Housekeeper
from postroom.outbox.office import Office
from postroom.outbox.relay import Relay
from postroom.outbox.together import Budget
from postroom.retry import RetryPolicy
from servers import Server

pytest_plugins = ("relay_fixtures",)

LANE = lane_of("orders", "k", "")


class Load:
    """Publishes numbers on every key, as quickly as the database lets it, until it is stopped."""

    def __init__(self, post: Post, keys: int = 24) -> None:
        self.post, self.keys, self.rounds = post, keys, 0
        self._stop = asyncio.Event()

    async def __aenter__(self) -> "Load":
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._stop.set()
        await self._task

    async def _run(self) -> None:
        while not self._stop.is_set():
            await self.post.put(*(note(f"k{key}", self.rounds) for key in range(self.keys)))
            self.rounds += 1
            await asyncio.sleep(0.02)

    @property
    def expected(self) -> dict[str, list[int]]:
        return {f"k{key}": list(range(self.rounds)) for key in range(self.keys)}


def shares(post: Post) -> dict[str | None, int]:
    return dict(Counter(post.owners().values()))


async def test_relays_that_join_and_leave_share_fairly_and_repeat_nothing(post: Post) -> None:
    how = {"lease_seconds": 4, "keep_delivered_seconds": 0}
    async with Load(post) as load, post.relay(**how) as first:
        await eventually_async(lambda: shares(post) == {first.owner: LANES})
        async with post.relay(**how) as second:
            await eventually_async(lambda: shares(post) == {first.owner: 8, second.owner: 8}, 20)
            async with post.relay(**how) as third:
                await eventually_async(
                    lambda: sorted(shares(post).values()) == [5, 5, 6] and None not in shares(post),
                    20,
                )
                assert third.owner in shares(post)
        await eventually_async(lambda: shares(post) == {first.owner: LANES}, 20)
        await load.__aexit__()
        await eventually_async(post.empty, 20)
    assert by_key(post.broker.messages) == load.expected
    assert not post.of("lane.lost")
    assert post.count("lane_batch") == 0


async def test_no_lane_waits_for_a_relay_that_died_before_it_had_one(post: Post) -> None:
    gone = "INSERT INTO {p}worker (incarnation, kind, name) VALUES ('gone', 'relay', 'gone')"
    await post.change(gone)
    async with post.relay(lease_seconds=600) as alive:
        await eventually_async(lambda: shares(post) == {alive.owner: LANES}, 60)


async def test_lanes_stay_with_the_others_while_one_is_slow_to_stop(post: Post) -> None:
    """It works off its last message for longer than anybody is counted who was not seen."""
    entered, go_on = asyncio.Event(), asyncio.Event()

    async def slowly(message: Message) -> None:
        entered.set()
        await go_on.wait()

    post.broker.subscribe(slowly)
    how = {"lease_seconds": 15, "send_timeout_seconds": 8}
    other = post.relay(**how)
    async with post.relay(**how) as slow:
        await eventually_async(lambda: shares(post) == {slow.owner: LANES}, 20)
        await post.put(note("k", 1))
        await eventually_async(entered.is_set)
        async with other:
            # The lane of that message may be among those to hand over: all the same to us.
            await eventually_async(lambda: shares(post).get(other.owner, 0) >= LANES // 2 - 1, 20)
            slow.stop()
            await eventually_async(lambda: shares(post) == {slow.owner: 1, other.owner: 15}, 20)
            released = len(post.of("lane.released"))
            await asyncio.sleep(4)
            assert shares(post) == {slow.owner: 1, other.owner: 15}
            assert len(post.of("lane.released")) == released
            go_on.set()
            await eventually_async(lambda: shares(post) == {other.owner: LANES}, 20)


async def test_a_zombie_writes_nothing_and_its_lane_is_drained_by_the_new_owner(
    post: Post,
) -> None:
    """While a relay sends, another takes its lane: what it then learns it does not write down."""
    entered, go_on = asyncio.Event(), asyncio.Event()

    async def slowly(message: Message) -> None:
        if message.payload == b"1" and not entered.is_set():
            entered.set()
            await go_on.wait()

    post.broker.subscribe(slowly)
    await post.put(note("k", 1), note("k", 2))
    relay = post.relay(send_timeout_seconds=2.5)
    zombie = asyncio.create_task(relay.run())
    await eventually_async(entered.is_set)
    await post.change("UPDATE {p}lane SET owner = 'thief', epoch = epoch + 1 WHERE lane = %s", LANE)
    go_on.set()
    await eventually_async(lambda: LANE in {fields["lane"] for fields in post.of("lane.lost")})
    assert post.numbers("outbox") == [1, 2]
    assert post.numbers("archive") == []
    assert relay.tally.delivered == 0
    await post.change("UPDATE {p}lane SET owner = NULL WHERE lane = %s", LANE)
    await eventually_async(post.empty)
    assert first_by_key(post.broker.messages) == {"k": [1, 2]}
    zombie.cancel()
    await asyncio.gather(zombie, return_exceptions=True)


async def test_a_lost_lane_gives_its_part_of_the_memory_back(post: Post) -> None:
    async with post.relay(lease_seconds=3.2, in_flight_rows=20, batch_rows=10) as relay:
        for n in range(3):
            await eventually_async(lambda: post.owners()[LANE] == relay.owner)
            await post.put(*(note("k", n * 10 + m) for m in range(10)))
            await post.change(
                "UPDATE {p}lane SET owner = NULL, epoch = epoch + 1 WHERE lane = %s", LANE
            )
        await eventually_async(post.empty, 20)
        assert relay._office is not None
        await eventually_async(lambda: relay._office.budget.left[0] == 20)
    assert first_by_key(post.broker.messages) == {"k": list(range(30))}


async def test_memory_stays_within_its_budget(post: Post, monkeypatch: pytest.MonkeyPatch) -> None:
    lowest = [10**9, 10**9]
    take = Budget.take

    def watch(self: Budget, lane: int, rows: int, size: int) -> None:
        take(self, lane, rows, size)
        for place, left in enumerate(self.left):
            lowest[place] = min(lowest[place], left)

    monkeypatch.setattr(Budget, "take", watch)
    large = {"x": "y" * 400}
    for _ in range(4):
        post.publish(*(note(f"k{n % 60}", n, headers=large) for n in range(300)))
    limits = {"batch_rows": 40, "in_flight_rows": 100}
    await post.relay(**limits).drain_once()
    assert lowest[0] >= 0
    assert lowest[0] < 60  # it was used, or this would show nothing
    assert len(post.broker.messages) == 1200
    for _ in range(2):
        post.publish(*(note(f"k{n % 60}", n, headers=large) for n in range(300)))
    await post.relay(batch_bytes=4_000, in_flight_bytes=10_000).drain_once()
    assert len(post.broker.messages) == 1800
    assert lowest[1] > -1_000  # one row at most beyond the limit
    assert lowest[1] < 6_000


# ── Trouble with the database and the process ──────────────────────────────────────────────────


@pytest.mark.parametrize("database_url", ["postgresql", "mariadb"], indirect=True)
async def test_it_outlives_a_restart_of_the_database_and_of_the_broker(
    post: Post, request: pytest.FixtureRequest
) -> None:
    server: Server = request.getfixturevalue(
        {"postgresql": "postgres", "mariadb": "mariadb"}[post.dialect]
    )
    server.require_private()
    async with post.relay():
        await post.put(*(note(f"k{n % 5}", n) for n in range(50)))
        await eventually_async(lambda: len(post.broker.messages) >= 10)
        post.forget_look()
        server.kill()
        await eventually_async(lambda: post.of("database.lost"))
        await asyncio.to_thread(server.start)
        post.broker.down = True
        await post.put(*(note(f"k{n % 5}", n) for n in range(50, 100)))
        await eventually_async(lambda: post.of("destination.down"), 20)
        post.broker.down = False
        await eventually_async(post.empty, 30)
    assert first_by_key(post.broker.messages) == {f"k{k}": list(range(k, 100, 5)) for k in range(5)}
    assert not post.count("dead_letter")


@pytest.mark.parametrize("database_url", ["postgresql", "mariadb"], indirect=True)
async def test_a_database_that_dies_during_a_prune_is_a_lost_database(
    post: Post, request: pytest.FixtureRequest
) -> None:
    """The relay tries again then, as after any other loss; it did not when its prune met it."""
    server: Server = request.getfixturevalue(
        {"postgresql": "postgres", "mariadb": "mariadb"}[post.dialect]
    )
    server.require_private()
    relay = post.relay()
    office = Office(relay)
    await office.open()
    try:
        post.forget_look()
        await asyncio.to_thread(server.kill)
        with pytest.raises(DatabaseLost):
            await Housekeeper(office).prune(relay.stopping)
        await asyncio.to_thread(server.start)
    finally:
        await office.close()
    assert post.of("prune.failed")


def open_transactions(post: Post) -> int:
    if post.dialect == "postgresql":
        rows = post.sql(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
            " AND pid <> pg_backend_pid() AND (xact_start IS NOT NULL OR state <> 'idle')"
        )
    elif post.dialect == "mariadb":
        rows = post.sql("SELECT count(*) FROM information_schema.innodb_trx")
    else:
        # Whoever can take the write lock at once has found nobody holding it.
        post.sql("PRAGMA busy_timeout = 0")
        post.sql("BEGIN IMMEDIATE")
        post.sql("ROLLBACK")
        return 0
    return int(rows[0][0])


async def test_cancelled_at_any_moment_it_leaves_nothing_locked(post: Post) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    post.broker.fail(lambda m: rng.random() < 0.1, Transient("busy", "no"), times=None)
    retry = RetryPolicy((0.01,), attempts=50)
    for n in range(6):
        post.publish(*(note(f"k{key}", n) for key in range(20)))
        relay = asyncio.create_task(post.relay(retry=retry).run())
        await asyncio.sleep(rng.random() * 0.15)
        relay.cancel()
        await asyncio.gather(relay, return_exceptions=True)
        await eventually_async(lambda: open_transactions(post) == 0, retry=(Exception,))
        # The lanes stay owned until their lease ends, as after a death.
        post.sql("UPDATE {p}lane SET owner = NULL")
        post.sql("DELETE FROM {p}worker")
    async with post.relay(retry=retry):
        await eventually_async(post.empty)
    received = first_by_key(post.broker.messages)
    assert received == {f"k{key}": list(range(6)) for key in range(20)}


async def test_poisoned_keys_do_not_slow_the_others_much(post: Post) -> None:
    async def seconds(relay: Callable[[], Relay]) -> float:
        for start in range(0, 1500, 500):
            post.publish(*(note(f"k{n % 300}", n) for n in range(start, start + 500)))
        begun = asyncio.get_running_loop().time()
        await relay().drain_once()
        return asyncio.get_running_loop().time() - begun

    healthy = await seconds(post.relay)
    poisoned = {f"k{n}" for n in range(0, 300, 100)}
    post.broker.fail(lambda m: m.key in poisoned, Transient("busy", "no"), times=None)
    troubled = await seconds(lambda: post.relay(retry=RetryPolicy((0.5,), attempts=9)))
    assert troubled < 4 * healthy + 1
    assert post.count("held") == 15
    assert len(post.broker.messages) == 2985
