"""The psycopg example, from an empty database to the broker."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from postroom.databases import migrate

EXAMPLE = Path(__file__).parents[2] / "examples" / "plain_psycopg.py"


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_an_order_arrives_at_the_broker(database_url: str, tmp_path: Path) -> None:
    asyncio.run(migrate.install(database_url))
    for n in (1, 2):
        done = subprocess.run(
            [sys.executable, EXAMPLE],
            cwd=tmp_path,
            env={**os.environ, "DATABASE_URL": database_url},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        (sent,) = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        assert (sent["type"], sent["key"]) == ("order.placed.v1", str(n))
        assert sent["payload"] == {"order_id": n, "total": "9.90"}
    with psycopg.connect(database_url) as connection:
        assert connection.execute("SELECT count(*) FROM orders").fetchone() == (2,)
        assert connection.execute("SELECT count(*) FROM postroom.outbox").fetchone() == (0,)
