"""The archive on PostgreSQL: cheap to write, quick to look up by id, safe to upgrade."""

import uuid
from collections.abc import Iterator

import psycopg
import pytest
from relaying import Post, make_post, note

from helpers import eventually_async
from postroom.databases import migrate
from servers import PostgresServer

ROWS = 40_000
OWN = 500  # one row in 500 has an id that its publisher chose
FILL = """
INSERT INTO postroom.archive (day, id, lane, position, topic, type, content_type, payload, size,
       redrives, attempts, created_at, delivered_at)
SELECT CAST(clock_timestamp() AT TIME ZONE 'UTC' AS date) - n % {days},
       CASE WHEN n % {own} = 0 THEN CAST(md5(CAST(n AS text)) AS uuid)
            ELSE CAST(lpad(to_hex(1760000000000 + n / 8), 12, '0')
                      || '7' || substr(md5(CAST(n AS text)), 1, 19) AS uuid) END,
       n % 16, n, 'orders', 'note', 'application/json', decode(repeat('78', 500), 'hex'), 500,
       0, 1, clock_timestamp(), clock_timestamp()
  FROM generate_series(1, {rows}) AS n
"""
FILES = """
SELECT relname, relfilenode FROM pg_class WHERE relname LIKE 'archive%' AND relkind = 'r' ORDER BY 1
"""
SOME = [7, OWN, ROWS // 2, ROWS // 2 + 1, ROWS - 1, ROWS]


@pytest.fixture
def fresh_url(postgres: PostgresServer) -> Iterator[str]:
    name = f"test_{uuid.uuid4().hex[:12]}"
    yield postgres.create_database(name)
    postgres.drop_database(name)


@pytest.fixture
def server_post(fresh_url: str) -> Iterator[Post]:
    yield from make_post(fresh_url)


def fill(connection: psycopg.Connection, rows: int, *, days: int = 1) -> None:
    connection.execute(FILL.format(rows=rows, days=days, own=OWN))


def ids_at(connection: psycopg.Connection, positions: list[int]) -> list[str]:
    found = connection.execute(
        "SELECT CAST(id AS text) FROM postroom.archive WHERE position = ANY(%s) ORDER BY position",
        (positions,),
    )
    return [id for (id,) in found]


def test_postgres_finds_an_id_in_few_blocks(server_post: Post) -> None:
    """Ids of ours and ids that publishers chose: a filter for each range of blocks finds both."""
    with psycopg.connect(server_post.url, autocommit=True) as connection:
        fill(connection, ROWS)
        connection.execute("VACUUM ANALYZE postroom.archive")
        ((blocks,),) = connection.execute(
            "SELECT sum(pg_relation_size(inhrelid)) / 8192 FROM pg_inherits"
            " WHERE inhparent = 'postroom.archive'::regclass"
        ).fetchall()
        assert blocks > 2_000
        for id in [*ids_at(connection, SOME), str(uuid.uuid4())]:
            ((plan,),) = connection.execute(
                "EXPLAIN (ANALYZE, FORMAT JSON, TIMING OFF, SUMMARY OFF)"
                f" SELECT position FROM postroom.archive WHERE id = '{id}'"
            ).fetchall()
            scans = plan[0]["Plan"]["Plans"]
            heap = sum(scan.get("Lossy Heap Blocks", 0) for scan in scans)
            assert any(scan["Node Type"] == "Bitmap Heap Scan" for scan in scans), plan
            assert heap <= 3 * 64, (id, heap)


async def test_postgres_keeps_each_of_two_messages_under_one_id(server_post: Post) -> None:
    id = str(uuid.uuid4())
    for n in (1, 2):
        server_post.sql("DELETE FROM postroom.dedup")  # the claim of the id was pruned
        await server_post.put(note("k", n, id=id))
        async with server_post.relay():
            await eventually_async(server_post.empty)
    assert sorted(server_post.numbers("archive")) == [1, 2]


async def test_postgres_keeps_its_archive_through_upgrade_and_downgrade(fresh_url: str) -> None:
    await migrate.install(fresh_url)
    await migrate.downgrade(fresh_url, 5, force=True)
    with psycopg.connect(fresh_url, autocommit=True) as connection:
        fill(connection, 2_000, days=3)  # days without a partition are in the overflow
        before = connection.execute(FILES).fetchall()
        await migrate.upgrade(fresh_url)
        assert connection.execute(FILES).fetchall() == before, "a table was rewritten"
        assert len(ids_at(connection, list(range(1, 2_001)))) == 2_000
        connection.execute("SELECT postroom.make_archive_days(9)")
        ((indexes, parts),) = connection.execute(
            "SELECT count(*) FILTER (WHERE inhparent = 'postroom.archive_id'::regclass),"
            " count(*) FILTER (WHERE inhparent = 'postroom.archive'::regclass) FROM pg_inherits"
        ).fetchall()
        assert indexes == parts
        connection.execute(
            "INSERT INTO postroom.archive SELECT * FROM postroom.archive WHERE position = 3"
        )
        await migrate.downgrade(fresh_url, 5)
        assert len(ids_at(connection, list(range(1, 2_001)))) == 2_000
        with pytest.raises(psycopg.errors.UniqueViolation):
            connection.execute(
                "INSERT INTO postroom.archive SELECT * FROM postroom.archive WHERE position = 3"
            )
