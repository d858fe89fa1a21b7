"""What the inbox asks SQLite goes by index: a batch costs the same however much is remembered."""

import sqlite3
from pathlib import Path

import pytest

from postroom.databases import migrate, sql


@pytest.mark.parametrize("name", ["enter", "claim", "known", "held_keys"])
async def test_a_batch_goes_by_index(name: str, tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    await migrate.install(f"sqlite:///{path}")
    connection = sqlite3.connect(path)
    connection.execute("CREATE TEMP TABLE postroom_fresh (id TEXT PRIMARY KEY, digest TEXT)")
    for part in sql.prepare("postroom.inbox", "sqlite", name, "qmark"):
        values = ["[]" for _ in part.names]
        plan = connection.execute(f"EXPLAIN QUERY PLAN {part.text}", values).fetchall()
        for *_, step in plan:
            # `SEARCH i USING PRIMARY KEY (consumer=? AND message_id=?)`: by more than the consumer.
            if step.split()[1] in ("i", "s", "h"):
                assert step.startswith("SEARCH"), step
                assert " AND " in step, step
    connection.close()


async def test_what_is_still_held_is_looked_up_by_its_id(tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    await migrate.install(f"sqlite:///{path}")
    connection = sqlite3.connect(path)
    part = sql.prepare("postroom.outbox", "sqlite", "prune_inbox", "qmark")[0]
    plan = connection.execute(f"EXPLAIN QUERY PLAN {part.text}", [1 for _ in part.names])
    steps = [step for *_, step in plan]
    connection.close()
    assert any("postroom_inbox_age" in step for step in steps), steps
    assert any("inbox_held_id (consumer=? AND message_id=?)" in step for step in steps), steps
    assert not any(step.startswith("SCAN h") for step in steps), steps
