"""Worker died: what was under way goes in small parts, and only a message that was alone when a
process died three times is blamed.

A death in the middle of a send counts for much less than one at its beginning."""

import asyncio
from collections.abc import Sequence

from relaying import Post, by_key, note, told

from helpers import eventually_async
from postroom.brokers.base import Capabilities, Outcome, Transient
from postroom.messages import LANES, Message, lane_of
from postroom.outbox.rules import CHUNKS, LATE_DEATHS
from postroom.retry import RetryPolicy

pytest_plugins = ("relay_fixtures",)

LANE = lane_of("orders", "k", "")
KEYS = [f"s{n}" for n in range(3000) if lane_of("orders", f"s{n}", "") == LANE]
ELSEWHERE = [f"e{n}" for n in range(300) if lane_of("orders", f"e{n}", "") != LANE]


class Watcher:
    """A broker that remembers the size of every send, and how many were under way at once."""

    def __init__(self, post: Post) -> None:
        self.capabilities = Capabilities()
        self.post = post
        self.sends: list[list[int]] = []
        self.under_way = 0
        self.crowd: dict[int, int] = {}

    async def send(self, batch: Sequence[Message], *, epoch: int = 0) -> list[Outcome]:
        self.sends.append([int(message.payload) for message in batch])
        self.under_way += 1
        for message in batch:
            self.crowd[int(message.payload)] = self.under_way
        outcomes = await self.post.broker.send(batch, epoch=epoch)
        self.under_way -= 1
        return outcomes

    async def ping(self) -> None: ...
    async def close(self) -> None: ...


def die(post: Post, name: str, lo: int, hi: int, *, alone: bool = False, lane: int = LANE) -> None:
    """Leave behind what a process leaves that was killed while it sent these."""
    post.sql(
        "INSERT INTO {p}lane_batch (lane, incarnation, batch, lo, hi, messages, alone) "
        "VALUES (%s, %s, 1, %s, %s, %s, %s)",
        *(lane, name, lo, hi, hi - lo + 1, alone),
    )


def positions(post: Post) -> list[int]:
    return [p for (p,) in post.sql("SELECT position FROM {p}outbox ORDER BY position")]


async def drain(post: Post, **how: object) -> Watcher:
    watcher = Watcher(post)
    relay = post.relay("memory://watched", brokers={"memory://watched": watcher}, **how)
    await relay.drain_once()
    return watcher


async def test_a_batch_that_was_under_way_goes_in_smaller_parts(post: Post) -> None:
    count = 4 * CHUNKS
    post.publish(*(note(KEYS[n], n) for n in range(count)), *(note(KEYS[n], n) for n in range(3)))
    where = positions(post)
    die(post, "dead", where[0], where[count - 1])
    watcher = await drain(post)
    sizes = [len(send) for send in watcher.sends]
    # Four parts of 1/32, and the more go through, the larger are the next.
    assert sorted(sizes) == sorted([4] * 4 + [8] * 4 + [12] * 4 + [16, 16, 3])
    assert sum(sizes) == count + 3
    assert by_key(post.broker.messages)[KEYS[0]] == [0, 0]
    assert post.count("lane_batch") == 0
    assert post.empty()


async def test_without_a_death_it_goes_as_one(post: Post) -> None:
    post.publish(*(note(KEYS[n], n) for n in range(100)))
    watcher = await drain(post)
    assert [len(send) for send in watcher.sends] == [100]


async def test_suspects_that_were_under_way_by_themselves_go_alone_with_nothing_else_under_way(
    post: Post,
) -> None:
    post.publish(*(note(KEYS[n], n) for n in range(5)), *(note(k, 999) for k in ELSEWHERE))
    where = positions(post)
    die(post, "dead", where[1], where[3])
    for n in (1, 2, 3):
        die(post, f"dead-{n}", where[n], where[n])
    watcher = await drain(post)
    assert [send for send in watcher.sends if not {1, 2, 3}.isdisjoint(send)] == [[1], [2], [3]]
    assert {watcher.crowd[n] for n in (1, 2, 3)} == {1}
    assert sorted(fields["deaths"] for fields in post.of("message.suspect")) == [0, 0, 0]
    assert post.count("lane_batch") == 0
    assert not post.count("dead_letter")
    assert len(post.broker.messages) == 5 + len(ELSEWHERE)


async def test_three_deaths_alone_bury_the_message(post: Post) -> None:
    post.publish(note("k", 1), note("k", 2), note("k", 3), note(KEYS[0], 4))
    where = positions(post)
    for n in range(3):
        die(post, f"dead-{n}", where[1], where[1], alone=True)
    watcher = await drain(post)
    assert [2] not in watcher.sends
    assert by_key(post.broker.messages) == {"k": [1], KEYS[0]: [4]}
    rows = post.sql("SELECT error_code, attempts, holds_key, state FROM {p}dead_letter")
    assert [tuple(row) for row in rows] == [("suspected_killer", 0, 1, "dead")]
    assert post.numbers("held") == [2, 3]
    assert post.count("lane_batch") == 0


async def test_two_deaths_alone_bury_nothing(post: Post) -> None:
    post.publish(note("k", 1), note("k", 2))
    where = positions(post)
    for n in range(2):
        die(post, f"dead-{n}", where[0], where[0], alone=True)
    await drain(post)
    assert told(post.broker.messages) == [("k", 1), ("k", 2)]
    assert post.count("lane_batch") == 0


async def test_random_kills_bury_nothing(post: Post) -> None:
    post.publish(*(note(KEYS[n], n) for n in range(40)))
    where = positions(post)
    for n in range(30):
        die(post, f"dead-{n}", where[n % 5], where[20 + n % 7])
    await drain(post)
    assert len(post.broker.messages) == 40
    assert not post.count("dead_letter")
    assert post.count("lane_batch") == 0


async def test_a_suspect_that_is_refused_was_not_the_killer(post: Post) -> None:
    post.publish(note("k", 1))
    (where,) = positions(post)
    for n in range(2):
        die(post, f"dead-{n}", where, where, alone=True)
    post.broker.fail(lambda m: True, Transient("busy", "no"))
    watcher = await drain(post, retry=RetryPolicy((0.02,)))
    # It was sent alone and the process lived: those deaths are settled.
    assert watcher.sends[0] == [1]
    assert post.sql("SELECT count(*) FROM {p}lane_batch WHERE alone")[0][0] == 0
    async with post.relay(rebind=True):
        await eventually_async(post.empty)
    assert post.count("lane_batch") == 0


async def test_what_a_dead_relay_left_of_finished_messages_vanishes(post: Post) -> None:
    for lane in range(LANES):
        die(post, "dead", 1, 10_000, lane=lane)
    async with post.relay():
        await eventually_async(lambda: post.count("lane_batch") == 0)


async def test_the_journal_stands_while_a_send_is_under_way(post: Post) -> None:
    post.publish(note("k", 1), note("k", 2))
    where = positions(post)
    seen: list[list[tuple[int, ...]]] = []

    def look(message: Message) -> None:
        seen.append(post.sql("SELECT lane, lo, hi, messages FROM {p}lane_batch"))

    post.broker.subscribe(look)
    await post.relay().drain_once()
    assert seen == [[(LANE, where[0], where[1], 2)]] * 2
    assert post.count("lane_batch") == 0


class Slow(Watcher):
    """A destination that answers when it is told to."""

    def __init__(self, post: Post) -> None:
        super().__init__(post)
        self.may_answer = asyncio.Event()

    async def send(self, batch: Sequence[Message], *, epoch: int = 0) -> list[Outcome]:
        await self.may_answer.wait()
        return await super().send(batch, epoch=epoch)


def lines(post: Post) -> list[bool]:
    """Return for each line of the journal whether its message is sent alone."""
    return [bool(alone) for (alone,) in post.sql("SELECT alone FROM {p}lane_batch")]


async def test_outliving_the_beginning_of_a_send_settles_quick_deaths(post: Post) -> None:
    post.publish(note("k", 1))
    (where,) = positions(post)
    for n in range(2):
        die(post, f"quick-{n}", where, where, alone=True)
    die(post, "late", where, where)
    slow = Slow(post)
    async with post.relay("memory://slow", brokers={"memory://slow": slow}):
        # Should this relay be killed now, that is the second late death, and no quick one.
        await eventually_async(lambda: lines(post) == [False, False])
        slow.may_answer.set()
        await eventually_async(post.empty)
        await eventually_async(lambda: lines(post) == [])
    assert not post.count("dead_letter")


async def test_late_deaths_bury_nothing_for_long(post: Post) -> None:
    post.publish(note("k", 1), note(KEYS[0], 2))
    often, seldom = positions(post)
    for n in range(LATE_DEATHS):
        die(post, f"often-{n}", often, often)
    for n in range(LATE_DEATHS - 1):
        die(post, f"seldom-{n}", seldom, seldom)
    await drain(post)
    assert told(post.broker.messages) == [(KEYS[0], 2)]
    rows = post.sql("SELECT error_code, error FROM {p}dead_letter")
    text = f"the process died {LATE_DEATHS} times while sending this message alone"
    assert [tuple(row) for row in rows] == [("suspected_killer", text)]
    assert post.count("lane_batch") == 0


async def test_a_held_suspect_that_is_refused_has_no_late_deaths(post: Post) -> None:
    post.publish(note("k", 1))
    (where,) = positions(post)
    post.broker.fail(lambda m: True, Transient("busy", "no"))
    await drain(post, retry=RetryPolicy((0.02, 60)))
    die(post, "dead", where, where)
    post.sql("UPDATE {p}lane_batch SET held = %s", True)
    post.broker.fail(lambda m: True, Transient("busy", "no"))
    while not (await drain(post, retry=RetryPolicy((60, 60)))).sends:
        await asyncio.sleep(0.05)  # it is not due yet
    assert post.count("held") == 1
    assert lines(post) == []


async def test_a_suspect_waits_for_one_wave_of_the_others(post: Post) -> None:
    """And not for all of a lane's: everybody else waits for the suspect."""
    elsewhere = ELSEWHERE[0]
    post.publish(note("k", 1), *(note(elsewhere, 10 + n) for n in range(20)))
    where = positions(post)[0]
    die(post, "dead", where, where)
    watcher = Watcher(post)
    relay = post.relay("memory://watched", brokers={"memory://watched": watcher})
    await relay.drain_once()
    assert watcher.crowd[1] == 1
    assert watcher.sends.index([1]) <= 2
