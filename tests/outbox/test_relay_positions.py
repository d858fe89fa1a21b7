"""A sequence that hands out positions in advance breaks the order of keys: no relay starts."""

import pytest
from relaying import Post, note, on_postgres

from postroom.databases import migrate
from postroom.errors import SchemaError

pytest_plugins = ("relay_fixtures",)


@on_postgres
@pytest.mark.parametrize("table", ["outbox", "inbox_held"])
async def test_a_sequence_with_a_cache_is_refused(post: Post, table: str) -> None:
    assert await migrate.check(post.url) == []
    column = f"ALTER TABLE postroom.{table} ALTER COLUMN position SET CACHE"
    post.sql(f"{column} 50")
    (problem,) = await migrate.check(post.url)
    assert "50 positions at a time" in problem
    assert f"{column} 1" in problem
    if table == "outbox":
        post.publish(note("k", 1))
        with pytest.raises(SchemaError, match="SET CACHE 1"):
            await post.relay().drain_once()
        assert not post.broker.messages
    post.sql(f"{column} 1")
    assert await migrate.check(post.url) == []
    await post.relay().drain_once()
    assert post.empty()
