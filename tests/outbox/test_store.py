"""The relay's writes: fenced on every database, exact about what they touch, bounded in what they
read."""

import asyncio
import datetime as dt
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio
from relaying import TABLES, Post, note, on_postgres, several_writers

from helpers import eventually_async
from postroom.databases.database import Database, WorkerLink
from postroom.messages import LANES, Message, lane_of
from postroom.outbox.store import ROOM, Ask, Burial, Change, Entry, Failure, Fence, Store

pytest_plugins = ("relay_fixtures",)

ME, OTHER = "me", "somebody-else"
KEY = "k"
LANE = lane_of("orders", KEY, "")
LONG_AGO = dt.datetime(2020, 1, 1, tzinfo=dt.UTC)


@dataclass
class Desk:
    """Connections to one database, and stores of different owners on it."""

    post: Post
    database: Database
    links: list[WorkerLink] = field(default_factory=list)

    async def link(self) -> WorkerLink:
        link = await self.database.connect()
        self.links.append(link)
        return link

    def store(self, owner: str = ME, *, archive: bool = True) -> Store:
        return Store(self.database.dialect, owner, archive=archive)

    async def take(self, owner: str = ME, lanes: list[int] | None = None) -> dict[int, Fence]:
        wanted = list(range(LANES)) if lanes is None else lanes
        taken = await self.store(owner).take_lanes(self.links[0], wanted, 60)
        return {fence.lane: fence for fence in taken}

    async def read(self, lane: int = LANE) -> list[Message]:
        asks = [Ask(lane, 0, True)]
        found = await self.store().read(
            self.links[0], asks, rows=100, total_rows=100, bytes=1_000_000
        )
        return found[lane]

    def clear(self) -> None:
        for table in TABLES[:-1]:
            self.post.sql(f"DELETE FROM {{p}}{table}")

    def expire_leases(self) -> None:
        past = {"postgresql": "'2020-01-01'", "mariadb": "'2020-01-01'", "sqlite": "1"}
        self.post.sql(f"UPDATE {{p}}lane SET lease_until = {past[self.post.dialect]}")


@pytest_asyncio.fixture
async def desk(post: Post) -> AsyncIterator[Desk]:
    desk = Desk(post, Database(post.url))
    await desk.link()
    yield desk
    for link in desk.links:
        await link.close()


# ── The fence ──────────────────────────────────────────────────────────────────────────────────

Write = Callable[[Store, WorkerLink, Fence, list[Message]], Awaitable[object]]


def settling(**parts: Callable[[list[Message]], Any]) -> Write:
    async def write(store: Store, link: WorkerLink, fence: Fence, hot: list[Message]) -> object:
        change = Change(fence, **{name: part(hot) for name, part in parts.items()})
        mine, _ = await store.settle(link, [change])
        return mine

    return write


def failure(message: Message) -> Failure:
    return Failure(message, 1, "[]", "busy", "no", 60)


def burial(message: Message, *, holds_key: bool) -> Burial:
    return Burial(message, 1, "[]", "bad", "no", holds_key)


async def write_journal(store: Store, link: WorkerLink, fence: Fence, hot: list[Message]) -> object:
    return await store.write_journal(link, [Entry(fence, 7, 1, 2, 2, False)])


async def promote(store: Store, link: WorkerLink, fence: Fence, hot: list[Message]) -> object:
    return await store.promote(link, [fence], 10)


async def release(store: Store, link: WorkerLink, fence: Fence, hot: list[Message]) -> object:
    await link.query(ROOM, "lanes_release", owner=store.owner, fence_list=[fence.number])
    return 0


HOT: dict[str, Write] = {
    "deliver": settling(delivered=lambda hot: hot),
    "clear the journal": settling(batches=lambda _: [1]),
    "deliver and clear": settling(delivered=lambda hot: hot, batches=lambda _: [1]),
    "hold": settling(failures=lambda hot: [failure(hot[0])], waiting=lambda hot: hot[1:]),
    "wait": settling(waiting=lambda hot: hot),
    "destination down": settling(later=lambda hot: hot, later_seconds=lambda _: 60.0),
    "bury and hold the key": settling(burials=lambda hot: [burial(hot[0], holds_key=True)]),
    "bury and go on": settling(burials=lambda hot: [burial(hot[0], holds_key=False)]),
    "acquit": settling(acquitted=lambda _: [5], batches=lambda _: [99]),
    "journal": write_journal,
    "promote": promote,
    "release": release,
}
HELD: dict[str, Write] = {
    "deliver": settling(delivered=lambda hot: hot[:1], from_held=lambda _: True),
    "fail again": settling(failures=lambda hot: [failure(hot[0])], from_held=lambda _: True),
    "bury": settling(
        burials=lambda hot: [burial(hot[0], holds_key=True)], from_held=lambda _: True
    ),
}


async def set_up(desk: Desk, *, held: bool) -> tuple[Fence, list[Message]]:
    """Two messages of one key, a delayed one that is due, a journal; the lane is ours."""
    desk.post.publish(note(KEY, 1), note(KEY, 2), note(KEY, 3, deliver_at=LONG_AGO))
    fence = (await desk.take())[LANE]
    store, link = desk.store(), desk.links[0]
    entries = [Entry(fence, 1, 1, 2, 2, False), Entry(fence, 2, 5, 5, 1, True)]
    await store.write_journal(link, entries)
    hot = await desk.read()
    assert [int(m.payload) for m in hot] == [1, 2]
    if held:
        await store.settle(link, [Change(fence, failures=[failure(hot[0])], waiting=hot[1:])])
    return fence, hot


@pytest.mark.parametrize("held", [False, True], ids=["from the outbox", "from held"])
async def test_a_stale_epoch_or_another_owner_writes_nothing(desk: Desk, held: bool) -> None:
    link = desk.links[0]
    for what, write in (HELD if held else HOT).items():
        desk.clear()
        fence, hot = await set_up(desk, held=held)
        before = desk.post.everything()
        for owner, epoch in ((ME, fence.epoch - 1), (ME, fence.epoch + 1), (OTHER, fence.epoch)):
            for archive in (True, False):
                store = desk.store(owner, archive=archive)
                assert not await write(store, link, Fence(LANE, epoch), hot), what
                assert desk.post.everything() == before, what
        # With the right fence it does change something, or the test would prove nothing.
        await write(desk.store(ME), link, fence, hot)
        assert desk.post.everything() != before, what


async def test_one_lost_lane_does_not_spoil_the_others(desk: Desk) -> None:
    keys = ["a", "b", "c", "d"]
    desk.post.publish(*(note(key, n) for n, key in enumerate(keys)))
    fences = await desk.take()
    changes = []
    for key in keys:
        lane = lane_of("orders", key, "")
        changes.append(Change(fences[lane], delivered=await desk.read(lane)))
    lost = changes[0].fence
    changes[0].fence = Fence(lost.lane, lost.epoch - 1)
    mine, missing = await desk.store().settle(desk.links[0], changes)
    assert mine == {change.fence.lane for change in changes} - {lost.lane}
    assert missing == 0
    assert desk.post.numbers("outbox") == [0]
    assert sorted(desk.post.numbers("archive")) == [1, 2, 3]


@pytest.mark.parametrize("troubled", [False, True], ids=["plain", "with a failure"])
async def test_a_message_already_gone_is_counted_and_not_fatal(desk: Desk, troubled: bool) -> None:
    fence, hot = await set_up(desk, held=False)
    desk.post.sql("DELETE FROM {p}outbox WHERE position = %s", hot[0].position)
    change = Change(fence, delivered=hot[:1] if troubled else hot)
    if troubled:
        change.failures = [failure(hot[1])]
    mine, missing = await desk.store().settle(desk.links[0], [change])
    assert mine == {LANE}
    assert missing == 1
    assert desk.post.numbers("outbox") == []
    assert desk.post.numbers("archive") == ([] if troubled else [2])


@several_writers
@pytest.mark.parametrize("what", ["deliver", "wait", "promote"])
async def test_an_open_publisher_keeps_no_write_waiting(desk: Desk, what: str) -> None:
    # So many that MariaDB would rather scan the table, and lock what it meets, than use an index.
    link = await desk.database.connect(idle_seconds=1)
    desk.links.append(link)
    with closing(desk.post.connect()) as tx:
        desk.post.outbox.publish_many(tx, [note(KEY, 1), note(KEY, 1, deliver_at=LONG_AGO)])
        desk.post.publish(*(note(KEY, n) for n in range(900)), note(KEY, 1, deliver_at=LONG_AGO))
        fence = (await desk.take())[LANE]
        asks = [Ask(LANE, 0, True)]
        found = await desk.store().read(link, asks, rows=999, total_rows=999, bytes=9_000_000)
        assert len(found[LANE]) == 900
        await HOT[what](desk.store(), link, fence, found[LANE])
        assert desk.post.count("outbox") == (901 if what == "promote" else 0)
        tx.rollback()


# ── Owning lanes ───────────────────────────────────────────────────────────────────────────────


async def test_of_many_takers_one_wins_each_lane(desk: Desk) -> None:
    links = [desk.links[0], *[await desk.link() for _ in range(LANES - 1)]]
    rounds = 25 if desk.post.dialect != "sqlite" else 4
    for number in range(1, rounds + 1):
        desk.expire_leases()
        takers = [desk.store(f"taker-{number}-{n}") for n in range(len(links))]
        taken = await asyncio.gather(
            *(
                taker.take_lanes(link, range(LANES), 60)
                for taker, link in zip(takers, links, strict=True)
            )
        )
        winners = [
            (fence.lane, taker.owner, fence.epoch)
            for taker, fences in zip(takers, taken, strict=True)
            for fence in fences
        ]
        assert sorted(lane for lane, _, _ in winners) == list(range(LANES))
        assert sorted(winners) == sorted(desk.post.sql("SELECT lane, owner, epoch FROM {p}lane"))
        assert {epoch for _, _, epoch in winners} == {number}


async def test_an_owned_lane_is_left_alone_until_its_lease_ends(desk: Desk) -> None:
    fences = await desk.take()
    assert await desk.take(OTHER) == {}
    desk.expire_leases()
    taken = await desk.take(OTHER)
    assert sorted(taken) == list(range(LANES))
    assert all(taken[lane].epoch == fences[lane].epoch + 1 for lane in taken)


async def test_the_clock_of_a_relays_machine_decides_nothing(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    true, renewal = time.time, {"owner": ME, "lease_us": 60_000_000}
    fences = await desk.take()
    for hours in (-1, 1, -2, 2):
        monkeypatch.setattr(time, "time", lambda ahead=hours: true() + ahead * 3600)
        assert await desk.take(OTHER) == {}, "an hour of its own made it think the lease over"
        state = await desk.links[0].query(ROOM, "lanes_state")
        assert min(left_us for *_, left_us in state) > 0
        renewed = await desk.links[0].query(ROOM, "lanes_renew", **renewal)
        assert {lane: epoch for lane, epoch, _ in renewed} == {
            lane: fence.epoch for lane, fence in fences.items()
        }
    desk.expire_leases()
    assert len(await desk.take(OTHER)) == LANES


async def test_an_owner_may_take_its_own_lanes_again_at_a_new_epoch(desk: Desk) -> None:
    first, second = await desk.take(), await desk.take()
    assert {fence.epoch for fence in first.values()} == {1}
    assert {fence.epoch for fence in second.values()} == {2}


async def test_a_paused_lane_is_not_taken(desk: Desk) -> None:
    desk.post.sql("UPDATE {p}lane SET paused = %s WHERE lane = %s", True, LANE)
    assert LANE not in await desk.take()


async def test_release_gives_back_only_what_is_ours(desk: Desk) -> None:
    mine = await desk.take(ME, [1, 2])
    theirs = await desk.take(OTHER, [3])
    numbers = [fence.number for fence in (*mine.values(), *theirs.values())]
    await desk.links[0].query(ROOM, "lanes_release", owner=ME, fence_list=numbers)
    owners = desk.post.owners()
    assert owners[1] is None
    assert owners[2] is None
    assert owners[3] == OTHER


# ── A take-over that is not committed yet ──────────────────────────────────────────────────────

TAKEN_OVER: dict[str, Write] = {
    "delete": HOT["deliver"],
    "archive": HOT["deliver"],
    "hold": HOT["hold"],
    "bury": HOT["bury and hold the key"],
    "journal": write_journal,
    "promote": promote,
}


@on_postgres
@pytest.mark.parametrize("what", TAKEN_OVER)
async def test_a_write_that_meets_a_take_over_waits_and_does_nothing(desk: Desk, what: str) -> None:
    fence, hot = await set_up(desk, held=False)
    store = desk.store(archive=what != "delete")
    link = await desk.link()
    with closing(desk.post.connect()) as taker:
        taker.execute(
            "UPDATE postroom.lane SET owner = %s, epoch = epoch + 1 WHERE lane = %s", (OTHER, LANE)
        )
        write = asyncio.ensure_future(TAKEN_OVER[what](store, link, fence, hot))
        await eventually_async(lambda: waiting_for_a_lock(desk.post))
        assert not write.done()
        taker.commit()
    before = desk.post.everything()
    assert not await write
    assert desk.post.everything() == before
    assert desk.post.numbers("outbox") == [1, 2]


@several_writers
@pytest.mark.parametrize("troubled", [False, True], ids=["plain", "with a failure"])
async def test_a_settle_and_a_take_over_never_both_happen(desk: Desk, troubled: bool) -> None:
    """A settle that has passed its fence and waits for a row: whoever takes the lane meanwhile
    would see it settled by somebody who does not own it any more."""
    fence, hot = await set_up(desk, held=False)
    desk.expire_leases()
    link = await desk.link()
    change = Change(fence, delivered=hot[:1], failures=[failure(hot[1])] if troubled else [])
    with closing(desk.post.connect()) as other:
        lock = "SELECT 1 FROM {p}outbox WHERE lane = %s AND position = %s FOR UPDATE"
        desk.post._execute(other, lock, (LANE, hot[0].position))
        settle = asyncio.ensure_future(desk.store().settle(link, [change]))
        # MariaDB renews what it shows of locks only for those who ask less than ten times a second.
        await eventually_async(lambda: waiting_for_a_lock(desk.post), interval=0.2)
        taken = await desk.take(OTHER, [LANE])
        other.rollback()
    settled, _ = await settle
    assert not (settled and taken)
    assert 1 not in desk.post.numbers("outbox")


@on_postgres
async def test_a_take_over_leaves_a_lane_that_is_being_settled(desk: Desk) -> None:
    fence, _ = await set_up(desk, held=False)
    desk.expire_leases()
    with closing(desk.post.connect()) as settler:
        settler.execute("SELECT 1 FROM postroom.lane WHERE lane = %s FOR SHARE", (fence.lane,))
        assert LANE not in await desk.take(OTHER)
        settler.rollback()
    assert LANE in await desk.take(OTHER)


def waiting_for_a_lock(post: Post) -> bool:
    if post.dialect == "mariadb":
        waiting = "SELECT 1 FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'"
        return bool(post.sql(waiting))
    return bool(
        post.sql(
            "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
            " AND datname = current_database()"
        )
    )


# ── Reading ────────────────────────────────────────────────────────────────────────────────────


async def read_sizes(desk: Desk, asks: list[Ask], **limits: int) -> dict[int, list[int]]:
    found = await desk.store().read(desk.links[0], asks, **limits)
    return {lane: [m.size for m in messages] for lane, messages in found.items()}


def big(key: str, size: int) -> Any:
    return note(key, 0, type="big", headers={"x": "y" * size})


async def test_a_read_is_bounded_by_rows(desk: Desk) -> None:
    desk.post.publish(*(note(f"k{n % 50}", n) for n in range(200)))
    asks = [Ask(lane, 0, False) for lane in range(LANES)]
    found = await read_sizes(desk, asks, rows=5, total_rows=1000, bytes=1_000_000)
    assert max(len(sizes) for sizes in found.values()) == 5
    found = await read_sizes(desk, asks, rows=5, total_rows=17, bytes=1_000_000)
    assert sum(len(sizes) for sizes in found.values()) == 17


async def test_each_lane_may_fill_the_whole_read(desk: Desk) -> None:
    desk.post.publish(*(note(KEY, n) for n in range(60)))
    asks = [Ask(lane, 0, False) for lane in range(LANES)]
    found = await read_sizes(desk, asks, rows=50, total_rows=50, bytes=1_000_000)
    assert len(found[LANE]) == 50


async def test_a_read_is_bounded_by_bytes_give_or_take_a_row(desk: Desk) -> None:
    desk.post.publish(*(big(f"k{n % 9}", 1000) for n in range(60)))
    asks = [Ask(lane, 0, False) for lane in range(LANES)]
    found = await read_sizes(desk, asks, rows=50, total_rows=500, bytes=10_000)
    sizes = [size for each in found.values() for size in each]
    assert 8_000 < sum(sizes) < 10_000 + max(sizes)


async def test_a_row_larger_than_the_limit_comes_alone(desk: Desk) -> None:
    desk.post.publish(*(big(KEY, 5000) for _ in range(3)))
    found = await read_sizes(desk, [Ask(LANE, 0, False)], rows=50, total_rows=50, bytes=100)
    assert len(found[LANE]) == 1
    fence = (await desk.take())[LANE]
    hot = await desk.read()
    await desk.store().settle(desk.links[0], [Change(fence, failures=[failure(m) for m in hot])])
    desk.post.sql(f"UPDATE {{p}}held SET next_attempt_at = {past(desk.post)}")
    due = await desk.store().held_due(desk.links[0], LANE, rows=50, bytes=100)
    assert len(due) == 1
    run = await desk.store().held_run(desk.links[0], hot[0], rows=50, bytes=100)
    assert len(run) == 1


async def test_a_read_starts_after_its_watermark_and_tells_held_keys(desk: Desk) -> None:
    fence, hot = await set_up(desk, held=True)
    desk.post.publish(note(KEY, 4))
    store, link = desk.store(), desk.links[0]
    limits = {"rows": 9, "total_rows": 9, "bytes": 1_000_000}
    (message,) = (await store.read(link, [Ask(LANE, 0, True)], **limits))[LANE]
    assert message.held == 1
    (message,) = (await store.read(link, [Ask(LANE, 0, False)], **limits))[LANE]
    assert message.held == 0
    after = Ask(LANE, message.position, True)
    assert (await store.read(link, [after], **limits))[LANE] == []
    assert fence.lane == LANE
    assert hot[1].position < message.position


def past(post: Post) -> str:
    return "1" if post.dialect == "sqlite" else "'2020-01-01'"
