"""The relay on a good day: what is committed arrives, in order, and leaves what it should."""

import datetime as dt
from contextlib import closing

import pytest
from relaying import Post, by_key, note, told

from helpers import eventually_async
from postroom import failpoints
from postroom.brokers.base import Permanent, Transient
from postroom.errors import RoutingChanged, SchemaError
from postroom.messages import LANES, lane_of
from postroom.outbox.relay import Drained
from postroom.retry import RetryPolicy

pytest_plugins = ("relay_fixtures",)

NOW = dt.datetime.now(dt.UTC)
POISON = Permanent("bad", "never")


async def smoke(post: Post) -> None:
    for start in range(0, 300, 50):
        post.publish(*(note(f"k{n % 7}", n) for n in range(start, start + 50)))
    post.publish(note(None, 1000), note(None, 1001))
    relay = post.relay(batch_rows=40, in_flight_rows=200)
    assert await relay.drain_once() == Drained(302, 0, 0, 0)
    received = by_key(post.broker.messages)
    assert sorted(received.pop(None)) == [1000, 1001]
    assert received == {f"k{k}": list(range(k, 300, 7)) for k in range(7)}
    assert post.empty()
    assert await relay.drain_once() == Drained(0, 0, 0, 0)
    await relay.close()


async def test_what_is_committed_arrives_in_order(post: Post) -> None:
    await smoke(post)
    assert post.count("archive") == 302
    assert post.count("lane_batch") == 0
    assert set(post.owners().values()) == {None}


async def test_on_postgresql_15(postgres15_post: Post) -> None:
    post = postgres15_post
    await smoke(post)
    post.broker.fail(lambda m: m.payload == b"5", POISON)
    async with post.relay():
        await post.put(*(note("k", n) for n in range(5, 9)), note("other", 1))
        await eventually_async(lambda: post.numbers("held") == [5, 6, 7, 8])
        await eventually_async(lambda: told(post.broker.messages)[-1] == ("other", 1))
    assert post.sql("SELECT state, holds_key FROM {p}dead_letter") == [("dead", True)]


@pytest.mark.parametrize("database_url", ["mariadb"], indirect=True)
async def test_on_aiomysql(post: Post, monkeypatch: pytest.MonkeyPatch) -> None:
    post.broker.fail(lambda m: m.payload == b"5", POISON)
    monkeypatch.setattr(post, "url", post.url.replace("mysql:", "mysql+aiomysql:"))
    async with post.relay() as relay:
        monkeypatch.undo()
        await post.put(*(note("k", n) for n in range(9)), note("other", 1))
        await eventually_async(lambda: post.numbers("held") == [5, 6, 7, 8])
        await eventually_async(lambda: ("other", 1) in told(post.broker.messages))
        assert relay.database.target.url.drivername == "mysql+aiomysql"
    assert post.sql("SELECT state, holds_key FROM {p}dead_letter") == [("dead", True)]
    assert by_key(post.broker.messages)["k"] == [0, 1, 2, 3, 4]


async def test_a_running_relay_delivers_what_comes_and_hands_back_its_lanes(post: Post) -> None:
    async with post.relay() as relay:
        for n in range(20):
            await post.put(note("k", n))
        await eventually_async(lambda: len(post.broker.messages) == 20)
        await eventually_async(post.empty)
        assert set(post.owners().values()) == {relay.owner}
        assert post.count("worker") == 1
    assert by_key(post.broker.messages) == {"k": list(range(20))}
    assert set(post.owners().values()) == {None}
    assert post.count("worker") == 0
    assert not post.of("lane.lost")


async def test_a_drain_leaves_to_others_what_they_own(post: Post) -> None:
    post.publish(*(note(f"k{n}", n) for n in range(50)))
    async with post.relay() as owner:
        await eventually_async(lambda: set(post.owners().values()) == {owner.owner})
        drained = await post.relay().drain_once()
        assert drained.elsewhere == LANES
        assert drained.delivered == 0
        await eventually_async(lambda: len(post.broker.messages) == 50)


async def test_rolled_back_messages_are_never_sent(post: Post) -> None:
    with closing(post.connect()) as tx:
        post.outbox.publish_many(tx, [note("k", 1)])
        tx.rollback()
    post.publish(note("k", 2))
    await post.relay().drain_once()
    assert told(post.broker.messages) == [("k", 2)]


async def test_the_message_arrives_as_it_was_published(post: Post) -> None:
    draft = note("kéy ☃", 7, headers={"trace": "äé"}, aggregate_type="Order", aggregate_id="o-1")
    (id,) = post.publish(draft)
    await post.relay().drain_once()
    (message,) = post.broker.messages
    assert message.id == id
    assert message.key == "kéy ☃"
    assert message.headers == {"trace": "äé"}
    assert (message.aggregate_type, message.aggregate_id) == ("Order", "o-1")
    assert message.lane == lane_of("orders", "kéy ☃", id)
    assert abs(message.created_us / 1e6 - NOW.timestamp()) < 3600


# ── Times ──────────────────────────────────────────────────────────────────────────────────────


async def test_an_expired_message_ends_as_a_resolved_letter_and_its_key_goes_on(post: Post) -> None:
    past, later = NOW - dt.timedelta(minutes=1), NOW + dt.timedelta(hours=1)
    post.publish(note("k", 1), note("k", 2, expires_at=past), note("k", 3, expires_at=later))
    await post.relay().drain_once()
    assert told(post.broker.messages) == [("k", 1), ("k", 3)]
    letters = post.sql("SELECT state, error_code, holds_key, attempts FROM {p}dead_letter")
    assert letters == [("resolved", "expired", 0, 0)]
    assert post.empty()


async def test_a_head_that_expires_between_two_attempts_frees_its_key_at_once(post: Post) -> None:
    post.broker.fail(lambda m: m.payload == b"1", Transient("busy", "later"), times=None)
    async with post.relay(retry=RetryPolicy((600,), attempts=3)):
        soon = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=1.5)
        await post.put(note("k", 1, expires_at=soon), note("k", 2), note("k", 3))
        await eventually_async(lambda: post.of("message.held"))
        await eventually_async(post.empty, 20)
    assert told(post.broker.messages) == [("k", 2), ("k", 3)]
    letters = post.sql("SELECT state, error_code, attempts FROM {p}dead_letter")
    assert letters == [("resolved", "expired", 1)]


async def test_a_delayed_message_takes_its_place_when_it_is_due(post: Post) -> None:
    soon = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=1.2)
    post.publish(note("k", 1, deliver_at=soon), note("k", 2))
    relay = post.relay()
    await relay.drain_once()
    assert told(post.broker.messages) == [("k", 2)]
    assert post.count("delayed") == 1
    post.publish(note("k", 3))
    async with post.relay():
        await eventually_async(lambda: len(post.broker.messages) == 3)
    assert told(post.broker.messages) == [("k", 2), ("k", 3), ("k", 1)]
    assert dt.datetime.now(dt.UTC) >= soon
    assert post.empty()


async def test_delayed_messages_that_are_due_go_in_the_order_of_their_times(post: Post) -> None:
    times = [NOW - dt.timedelta(seconds=seconds) for seconds in (10, 30, 20, 40)]
    post.publish(*(note("k", n, deliver_at=time) for n, time in enumerate(times)))
    await post.relay().drain_once()
    assert told(post.broker.messages) == [("k", 3), ("k", 1), ("k", 2), ("k", 0)]


async def test_a_look_for_what_is_due_locks_nothing(post: Post) -> None:
    post.publish(note("k", 1, deliver_at=NOW + dt.timedelta(hours=1)))
    passed: list[str] = []
    for name in ("sql.delayed_lanes.after", "sql.fence.before"):
        failpoints.arm(name, lambda name=name: passed.append(name))  # type: ignore[misc]
    try:
        async with post.relay():
            await eventually_async(lambda: len(passed) >= 3)
    finally:
        failpoints.clear()
    assert set(passed) == {"sql.delayed_lanes.after"}
    assert post.count("delayed") == 1


# ── What is kept, and for how long ─────────────────────────────────────────────────────────────


async def test_delivered_messages_are_kept_or_deleted_as_told(post: Post) -> None:
    (kept,) = post.publish(note("k", 1))
    await post.relay().drain_once()
    rows = post.sql("SELECT id, attempts FROM {p}archive")
    assert [(str(id), attempts) for id, attempts in rows] == [(kept, 1)]
    post.publish(note("k", 2))
    await post.relay(keep_delivered_seconds=0).drain_once()
    assert post.numbers("archive") == [1]
    assert post.empty()
    (keep,) = post.sql("SELECT value FROM {p}meta WHERE name = 'keep_delivered_seconds'")
    assert keep == ("0",)


async def test_a_drain_by_itself_makes_room_for_today(post: Post) -> None:
    overflow = "SELECT count(*) FROM {p}archive WHERE 1 = 0"
    if post.dialect == "postgresql":
        overflow = "SELECT count(*) FROM postroom.archive_overflow"
        post.sql(f"DROP TABLE postroom.archive_{NOW.date().isoformat().replace('-', '')}")
    (kept,) = post.publish(note("k", 1))
    await post.relay().drain_once()
    assert [str(id) for (id,) in post.sql("SELECT id FROM {p}archive")] == [kept]
    assert post.sql(overflow) == [(0,)]


async def test_what_is_old_and_finished_is_pruned(post: Post) -> None:
    post.publish(*(note("k", n, dedup_key=f"d{n}") for n in range(3)))
    await post.relay().drain_once()
    for n, state in enumerate(("dead", "queued", "resolved", "discarded")):
        post.broker.fail(lambda m, n=n: m.payload == b"%d" % (10 + n), POISON)
        post.publish(note(None, 10 + n))
        await post.relay().drain_once()
        post.sql("UPDATE {p}dead_letter SET state = %s WHERE state = 'dead'", "discarded")
        post.sql("UPDATE {p}dead_letter SET note = %s WHERE note IS NULL", state)
    post.sql("UPDATE {p}dead_letter SET state = note")
    make_old(post)
    async with post.relay(keep_delivered_seconds=3600 * 24 * 5):
        await eventually_async(lambda: post.count("dedup") == 1)
        await eventually_async(lambda: post.count("dead_letter") == 2)
        await eventually_async(lambda: post.count("archive") == 1)
    states = {state for (state,) in post.sql("SELECT state FROM {p}dead_letter")}
    assert states == {"dead", "queued"}


def make_old(post: Post) -> None:
    """Move two of three messages 100 days back, as if they were of then."""
    days = 100 * 86_400
    back = {
        "postgresql": "{} - interval '100 days'",
        "mariadb": "{} - INTERVAL 100 DAY",
        "sqlite": f"{{}} - {days} * 1000000",
    }[post.dialect]
    post.sql(f"UPDATE {{p}}dead_letter SET died_at = {back.format('died_at')}")
    post.sql(
        f"UPDATE {{p}}dedup SET created_at = {back.format('created_at')} WHERE dedup_key <> 'd2'"
    )
    day = (NOW - dt.timedelta(days=100)).date().isoformat()
    if post.dialect == "postgresql":
        post.sql(
            f"CREATE TABLE postroom.archive_{day.replace('-', '')} PARTITION OF postroom.archive"
            f" FOR VALUES FROM ('{day}') TO ('{(NOW - dt.timedelta(days=99)).date()}')"
        )
    post.sql("UPDATE {p}archive SET day = %s WHERE payload <> %s", day, b"2")


# ── Refusing to start ──────────────────────────────────────────────────────────────────────────


async def test_changed_routes_are_refused_until_they_are_bound_anew(post: Post) -> None:
    await post.relay().drain_once()
    other = {"orders": post.broker_url, "*": "memory://elsewhere"}
    post.publish(note("k", 1))
    with pytest.raises(RoutingChanged, match="--rebind"):
        await post.relay(other).drain_once()
    with pytest.raises(RoutingChanged):
        await post.relay(other).run()
    assert post.numbers("outbox") == [1]
    assert set(post.owners().values()) == {None}
    await post.relay(other, rebind=True).drain_once()
    assert told(post.broker.messages) == [("k", 1)]
    with pytest.raises(RoutingChanged):
        await post.relay().drain_once()


async def test_newer_tables_that_serve_older_code_are_worked_on(post: Post) -> None:
    post.publish(note("k", 1))
    post.sql("UPDATE {p}meta SET value = '99' WHERE name = 'schema_version'")
    post.sql("DELETE FROM {p}meta WHERE name = 'oldest_code'")
    with pytest.raises(SchemaError, match="upgrade postroom"):
        await post.relay().drain_once()
    post.sql("INSERT INTO {p}meta (name, value) VALUES ('oldest_code', '1')")
    await post.relay().drain_once()
    assert told(post.broker.messages) == [("k", 1)]


@pytest.mark.parametrize(("version", "remedy"), [("0", "db upgrade"), ("99", "upgrade postroom")])
async def test_another_schema_version_is_refused(post: Post, version: str, remedy: str) -> None:
    post.sql("UPDATE {p}meta SET value = %s WHERE name = 'schema_version'", version)
    post.sql("DELETE FROM {p}meta WHERE name = 'oldest_code'")
    with pytest.raises(SchemaError, match=remedy):
        await post.relay().run()


async def test_a_paused_lane_is_not_worked_until_it_is_resumed(post: Post) -> None:
    lane = lane_of("orders", "k", "")
    flowing = next(f"o{n}" for n in range(99) if lane_of("orders", f"o{n}", "") != lane)
    async with post.relay(lease_seconds=3.2) as relay:
        await eventually_async(lambda: None not in post.owners().values())
        await post.change("UPDATE {p}lane SET paused = %s WHERE lane = %s", True, lane)
        await eventually_async(lambda: relay._office and relay._office._lanes[lane][0].paused)
        await post.put(note("k", 1))
        for n in range(5):
            await post.put(note(flowing, n))
            await eventually_async(lambda n=n: (flowing, n) in told(post.broker.messages))
        await eventually_async(lambda: post.numbers("outbox") == [1])  # received, then settled
        assert ("k", 1) not in told(post.broker.messages)
        await post.change("UPDATE {p}lane SET paused = %s WHERE lane = %s", False, lane)
        await eventually_async(lambda: ("k", 1) in told(post.broker.messages))
