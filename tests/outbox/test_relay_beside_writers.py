"""An application that publishes synchronously on the event loop of its embedded relay."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from relaying import Post, make_post, note

PUBLISHES = 1_000
INTERVAL_SECONDS = 0.001
LONGEST_WAIT_SECONDS = 0.2


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Post]:
    """SQLite has one writer at a time: a publisher waits for the relay, and blocks its loop."""
    yield from make_post(f"sqlite:///{tmp_path}/shop.db")


async def longest_wait_seconds(file: Post, first: int) -> float:
    """Publish on this loop; returns the longest time that one publish blocked it."""
    longest = 0.0
    with closing(file.connect()) as tx:
        for number in range(first, first + PUBLISHES):
            begun = time.monotonic()
            file.outbox.publish_many(tx, [note(f"k{number % 50}", number)])
            tx.commit()
            longest = max(longest, time.monotonic() - begun)
            await asyncio.sleep(INTERVAL_SECONDS)
    return longest


async def test_a_publish_never_waits_for_a_lock_that_its_own_loop_must_release(file: Post) -> None:
    alone = await longest_wait_seconds(file, 0)
    async with file.relay():
        beside = await longest_wait_seconds(file, PUBLISHES)
        async with asyncio.timeout(60):
            while len(file.broker.messages) < 2 * PUBLISHES:
                await asyncio.sleep(0.05)
    assert sorted(int(m.payload) for m in file.broker.messages) == list(range(2 * PUBLISHES))
    assert beside < LONGEST_WAIT_SECONDS + alone
