"""A relay that starts while another process has SQLite's write lock waits for it, within limits."""

import asyncio
from contextlib import closing

import pytest
from relaying import Post, note

from helpers import eventually_async
from postroom.errors import PostroomError
from postroom.outbox import relay as relays

pytest_plugins = ("relay_fixtures",)

SHORT = {"lease_seconds": 3.5}
on_sqlite = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


@on_sqlite
async def test_a_lock_longer_than_its_patience_does_not_end_it(post: Post) -> None:
    post.publish(note("k", 1))
    relay = post.relay(**SHORT)
    with closing(post.connect(autocommit=True)) as writer:
        writer.execute("BEGIN IMMEDIATE")
        running = asyncio.create_task(relay.run())
        await eventually_async(lambda: running.done() or post.of("database.lost"))
        assert not running.done(), "it ended"
        assert "lock" in post.of("database.lost")[0]["error"]
        assert not relay.health().ready
        writer.execute("ROLLBACK")
    await eventually_async(post.empty)
    relay.stop()
    await running


@on_sqlite
async def test_it_stops_while_it_waits(post: Post) -> None:
    relay = post.relay(**SHORT)
    with closing(post.connect(autocommit=True)) as writer:
        writer.execute("BEGIN IMMEDIATE")
        running = asyncio.create_task(relay.run())
        await eventually_async(lambda: running.done() or post.of("database.lost"))
        relay.stop()
        await running


@on_sqlite
async def test_it_does_not_wait_for_ever(post: Post, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relays, "START_LEASES", 0)
    with closing(post.connect(autocommit=True)) as writer:
        writer.execute("BEGIN IMMEDIATE")
        with pytest.raises(PostroomError, match="lock"):
            await post.relay(**SHORT).run()
