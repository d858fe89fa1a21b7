"""Order per key: whichever message fails, and wherever the later ones are then, none passes it."""

import asyncio
import random
import threading
import time
from collections.abc import Callable
from contextlib import closing

import pytest
from relaying import Post, by_key, first_by_key, note, several_writers

from helpers import eventually_async
from postroom.brokers.base import Transient
from postroom.messages import Message
from postroom.outbox.relay import Relay
from postroom.retry import RetryPolicy

pytest_plugins = ("relay_fixtures",)

COUNT = 6
BUSY = Transient("busy", "no")
EXPECTED = {f"k{k}": list(range(COUNT)) for k in range(COUNT)}
RETRY = RetryPolicy((0.15,), attempts=5)


def fail_one_of_each_key(post: Post, times: int) -> None:
    """Message k of key k fails: every place in a key fails once, all in one run."""
    for k in range(COUNT):
        post.broker.fail(
            lambda m, k=k: m.key == f"k{k}" and m.payload == b"%d" % k, BUSY, times=times
        )


async def drain_until(post: Post, make: Callable[[], Relay], count: int) -> None:
    async def done() -> bool:
        await make().drain_once()
        return len(post.broker.messages) >= count and post.empty()

    await eventually_async(done)


@pytest.mark.parametrize(("batch_rows", "times"), [(1, 1), (2, 3), (1000, 1), (1000, 3)])
async def test_later_ones_in_the_same_batch_or_the_next(
    post: Post, batch_rows: int, times: int
) -> None:
    fail_one_of_each_key(post, times)
    post.publish(*(note(f"k{k}", n) for n in range(COUNT) for k in range(COUNT)))
    relay = post.relay(batch_rows=batch_rows, retry=RetryPolicy((0.03,), attempts=5))
    await drain_until(post, lambda: relay, COUNT * COUNT)
    assert by_key(post.broker.messages) == EXPECTED


async def test_later_ones_that_come_during_the_back_off(post: Post) -> None:
    fail_one_of_each_key(post, 2)
    async with post.relay(retry=RETRY):
        for n in range(COUNT):
            # The next number is published while the one before may be in its back-off.
            await post.put(*(note(f"k{k}", n) for k in range(COUNT)))
            await eventually_async(lambda: post.count("outbox") == 0)
        await eventually_async(post.empty)
    assert by_key(post.broker.messages) == EXPECTED
    assert len(post.of("message.held")) == 2 * COUNT


async def test_later_ones_that_another_relay_finds(post: Post) -> None:
    fail_one_of_each_key(post, 2)
    for n in range(COUNT):
        # Each round is another relay, which knows of the failure only from the tables.
        post.publish(*(note(f"k{k}", n) for k in range(COUNT)))
        await post.relay(retry=RETRY).drain_once()
    await drain_until(post, lambda: post.relay(retry=RETRY), COUNT * COUNT)
    assert by_key(post.broker.messages) == EXPECTED


async def test_hand_over_in_the_middle_of_a_back_off(post: Post) -> None:
    fail_one_of_each_key(post, 1)
    post.publish(*(note(f"k{k}", n) for n in range(COUNT) for k in range(COUNT)))
    async with post.relay(retry=RETRY):
        await eventually_async(lambda: len(post.of("message.held")) == COUNT)
    waiting = post.count("held")
    assert waiting >= COUNT
    async with post.relay(retry=RETRY):
        await eventually_async(post.empty)
    assert by_key(post.broker.messages) == EXPECTED


async def test_half_of_all_messages_on_one_key(post: Post) -> None:
    rng = random.Random(7)
    post.broker.fail(lambda m: rng.random() < 0.02, BUSY, times=None)
    count = 1200
    keys = ["hot" if n % 2 else f"k{n % 40}" for n in range(count)]
    for start in range(0, count, 300):
        post.publish(*(note(keys[n], n) for n in range(start, start + 300)))
    relay = post.relay(batch_rows=100, retry=RetryPolicy((0.01,), attempts=9))
    await drain_until(post, lambda: relay, count)
    received = by_key(post.broker.messages)
    assert sum(map(len, received.values())) == count
    assert received["hot"] == list(range(1, count, 2))
    assert all(numbers == sorted(numbers) for numbers in received.values())


# ── Many writers that serialise by a lock of the application's own ─────────────────────────────


class Writers:
    """Threads that lock an account's row, take its next number, publish it, and commit."""

    def __init__(self, post: Post, seed: int, *, threads: int, each: int, keys: int) -> None:
        self.post, self.seed = post, seed
        self.threads, self.each, self.keys = threads, each, keys
        self.committed: dict[str, list[int]] = {}
        self._guard = threading.Lock()
        post.sql("CREATE TABLE account (name VARCHAR(20) PRIMARY KEY, number INT NOT NULL)")
        for key in range(keys):
            post.sql("INSERT INTO account VALUES (%s, 0)", f"k{key}")

    async def run(self) -> None:
        await asyncio.gather(
            *(asyncio.to_thread(self._write, number) for number in range(self.threads))
        )

    def _write(self, number: int) -> None:
        rng = random.Random(f"{self.seed} {number}")
        with closing(self.post.connect()) as tx:
            cursor = tx.cursor()
            for _ in range(self.each):
                # Keys in one order, so that two writers never wait for each other.
                chosen = {0 if rng.random() < 0.5 else rng.randrange(self.keys) for _ in range(2)}
                drafts = []
                for key in sorted(chosen):
                    cursor.execute(
                        "SELECT number FROM account WHERE name = %s FOR UPDATE", (f"k{key}",)
                    )
                    (last,) = cursor.fetchone()
                    cursor.execute(
                        "UPDATE account SET number = %s WHERE name = %s", (last + 1, f"k{key}")
                    )
                    drafts.append(note(f"k{key}", last + 1))
                    self.post.outbox.publish_many(tx, drafts[-1:])
                    if rng.random() < 0.1:
                        time.sleep(rng.random() * 0.02)
                if rng.random() < 0.1:
                    tx.rollback()
                else:
                    tx.commit()
                    with self._guard:
                        for draft in drafts:
                            self.committed.setdefault(draft.key or "", []).append(draft.payload)


@several_writers
async def test_order_equals_commit_order_under_many_writers(
    post: Post, record_property: Callable[[str, object], None]
) -> None:
    seed = random.SystemRandom().randrange(2**32)
    record_property("seed", seed)
    print(f"seed {seed}")
    rng = random.Random(seed)
    lock = threading.Lock()

    def unlucky(message: Message) -> bool:
        with lock:
            return rng.random() < 0.01

    post.broker.fail(unlucky, BUSY, times=None)
    writers = Writers(post, seed, threads=12, each=120, keys=30)
    relay = post.relay(batch_rows=200, retry=RetryPolicy((0.02,), attempts=20))
    async with relay:
        await writers.run()
        await eventually_async(post.empty, 60)
    expected = {key: sorted(numbers) for key, numbers in writers.committed.items()}
    # A number is one higher than the last committed one, so commit order is the order of numbers.
    assert all(numbers == list(range(1, len(numbers) + 1)) for numbers in expected.values())
    assert first_by_key(post.broker.messages) == expected
    assert not post.of("lane.late")
    assert len(post.broker.messages) == sum(map(len, expected.values()))
