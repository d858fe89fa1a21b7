"""Install, upgrade, downgrade and check on every database; roles on those that have them."""

import asyncio
import re
import sqlite3
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pymysql
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pymysql.constants import CLIENT

from postroom.databases import migrate, schema
from postroom.databases.sql import DIALECTS, prepare, query_names, split
from postroom.databases.urls import resolve
from postroom.errors import ConfigurationError, PostroomError, Refused, SchemaError
from servers import MariaDBServer, PostgresServer

NEWEST = schema.newest("sqlite")
MESSAGE = (
    "INSERT INTO {p}outbox (lane, id, topic, type, content_type, payload, size)"
    " VALUES (1, '018f0000-0000-7000-8000-000000000001', 't', 'x', 'text/plain', 'secret', 6)"
)


class Raw:
    """A plain connection beside Postroom, with the dialect's prefix for table names."""

    def __init__(self, url: str) -> None:
        self.dialect = resolve(url).dialect
        self.prefix = "postroom." if self.dialect == "postgresql" else "postroom_"
        parts = urlsplit(url)
        if self.dialect == "postgresql":
            self.connection = psycopg.connect(url, autocommit=True)
        elif self.dialect == "mysql":
            self.connection = pymysql.connect(
                host=parts.hostname,
                port=parts.port or 3306,
                user=parts.username,
                password=parts.password or "",
                database=parts.path[1:],
                autocommit=True,
                client_flag=CLIENT.MULTI_STATEMENTS,
            )
        else:
            self.connection = sqlite3.connect(parts.path[1:], isolation_level=None)

    def run(self, statement: str) -> list[tuple]:
        cursor = self.connection.cursor()
        cursor.execute(statement.replace("{p}", self.prefix))
        return list(cursor.fetchall()) if cursor.description else []

    def script(self, text: str) -> None:
        if self.dialect == "sqlite":
            self.connection.executescript(text)
        elif self.dialect == "postgresql":
            self.connection.execute(text)
        else:
            with self.connection.cursor() as cursor:
                cursor.execute(text)
                while cursor.nextset():
                    pass


@pytest.fixture
def raw(database_url: str) -> Iterator[Raw]:
    raw = Raw(database_url)
    yield raw
    raw.connection.close()


async def test_install_once_and_again(database_url: str) -> None:
    assert await migrate.version(database_url) == 0
    newest = schema.newest(resolve(database_url).dialect)
    assert await migrate.install(database_url) == migrate.Change(0, newest)
    assert await migrate.version(database_url) == newest
    assert await migrate.check(database_url) == []
    assert await migrate.install(database_url) == migrate.Change(newest, newest)
    assert await migrate.upgrade(database_url) == migrate.Change(newest, newest)
    assert await migrate.check(database_url) == []


async def test_what_the_scripts_make_is_what_is_there(database_url: str) -> None:
    """`check` reads the scripts; this holds its reading against the database, both ways."""
    await migrate.install(database_url)
    target = resolve(database_url)
    made = schema.made_by(target.dialect, schema.newest(target.dialect))
    async with migrate._open(target) as connection:
        there = await connection.run_sync(schema.found, target.dialect, set(made.tables))
    overflow = "postroom.archive_overflow"  # a partition: the script gives it no columns
    for name in made.tables.keys() - {overflow}:
        assert made.tables[name] == there.tables[name], name
    assert len(made.tables) >= 11


async def test_the_printed_script_installs_too(database_url: str, raw: Raw) -> None:
    raw.script(migrate.sql(raw.dialect))
    assert await migrate.check(database_url) == []
    assert await migrate.install(database_url) == migrate.Change(NEWEST, NEWEST)
    assert migrate.sql(raw.dialect, from_version=schema.newest(raw.dialect)) == ""


async def test_downgrade_removes_everything(database_url: str, raw: Raw) -> None:
    await migrate.install(database_url)
    assert await migrate.downgrade(database_url, 0) == migrate.Change(NEWEST, 0)
    assert await migrate.version(database_url) == 0
    [problem] = await migrate.check(database_url)
    assert "postroom db install" in problem
    assert await migrate.downgrade(database_url, 0) == migrate.Change(0, 0)
    await migrate.install(database_url)
    assert await migrate.check(database_url) == []


@pytest.mark.parametrize("table", ["outbox", "held", "dead_letter"])
async def test_downgrade_keeps_undelivered_messages(
    database_url: str, raw: Raw, table: str
) -> None:
    await migrate.install(database_url)
    raw.run(MESSAGE)
    columns = "lane, position, id, topic, type, content_type, payload, size, redrives, created_at"
    if table == "held":
        raw.run(f"INSERT INTO {{p}}held ({columns}) SELECT {columns} FROM {{p}}outbox")
    if table == "dead_letter":
        raw.run(
            f"INSERT INTO {{p}}dead_letter ({columns}, source, state, holds_key, error_code, error,"
            " attempts, history, died_at)"
            f" SELECT {columns}, 'outbox', 'dead', {'true' if raw.dialect != 'sqlite' else 1},"
            " '', '', 1, '[]', created_at FROM {p}outbox"
        )
    if table != "outbox":
        raw.run("DELETE FROM {p}outbox")
    with pytest.raises(Refused, match=table):
        await migrate.downgrade(database_url, 0)
    assert await migrate.check(database_url) == []
    assert await migrate.downgrade(database_url, 0, force=True) == migrate.Change(NEWEST, 0)


@pytest.mark.parametrize("table", ["inbox", "job", "inbox_held", "idempotency_key", "ledger"])
async def test_downgrade_keeps_what_only_the_newer_tables_hold(
    database_url: str, raw: Raw, table: str
) -> None:
    await migrate.install(database_url)
    if table == "inbox":
        raw.run("INSERT INTO {p}inbox (consumer, message_id) VALUES ('billing', 'm')")
    elif table == "inbox_held":
        raw.run(
            "INSERT INTO {p}inbox_held (consumer, message_id, topic, type, content_type, payload,"
            " size) VALUES ('billing', 'm', 't', 'x', 'text/plain', '', 0)"
        )
    elif table == "idempotency_key":
        key = "`key`" if raw.dialect == "mysql" else "key"
        raw.run(
            f"INSERT INTO {{p}}idempotency_key (scope, operation, {key}, fingerprint, mode, status,"
            " owner, expires_at) VALUES ('', 'o', 'k', 'f', 'same', 'completed', '', "
            f"{0 if raw.dialect == 'sqlite' else repr('2030-01-01')})"
        )
    elif table == "ledger":
        column = "`key`" if raw.dialect == "mysql" else "key"
        raw.run(
            f"INSERT INTO {{p}}ledger (id, scope, {column}, digest, state, request)"
            " VALUES ('00000000-0000-4000-8000-000000000001', 's', 'k', 'd', 'accepted', '')"
        )
    else:
        raw.run(
            "INSERT INTO {p}job (id, kind, state, wish, total, who) VALUES"
            " ('00000000-0000-4000-8000-000000000001', 'redrive', 'running', '{}', 1, 'ada')"
        )
    with pytest.raises(Refused, match=table):
        await migrate.downgrade(database_url, 1)
    assert await migrate.check(database_url) == []
    assert await migrate.downgrade(database_url, 1, force=True) == migrate.Change(NEWEST, 1)
    [problem] = await migrate.check(database_url)
    assert "postroom db upgrade" in problem
    assert await migrate.upgrade(database_url) == migrate.Change(1, NEWEST)
    assert await migrate.check(database_url) == []


async def test_upgrade_needs_an_installation(database_url: str) -> None:
    with pytest.raises(SchemaError, match="postroom db install"):
        await migrate.upgrade(database_url)


async def test_versions_that_do_not_exist(database_url: str) -> None:
    await migrate.install(database_url)
    with pytest.raises(ConfigurationError, match="no schema version 99"):
        await migrate.upgrade(database_url, to=99)
    with pytest.raises(ConfigurationError, match="no schema version -1"):
        await migrate.downgrade(database_url, -1)
    with pytest.raises(Refused, match="downgrade"):
        await migrate.upgrade(database_url, to=0)


async def test_check_names_another_version(database_url: str, raw: Raw) -> None:
    await migrate.install(database_url)
    raw.run("UPDATE {p}meta SET value = '7' WHERE name = 'schema_version'")
    [problem] = await migrate.check(database_url)
    assert "version 7" in problem
    assert "newer Postroom" in problem
    raw.run("UPDATE {p}meta SET value = 'many' WHERE name = 'schema_version'")
    with pytest.raises(SchemaError, match="not a number"):
        await migrate.check(database_url)


async def test_check_names_what_was_dropped(database_url: str, raw: Raw) -> None:
    await migrate.install(database_url)
    index = "postroom_held_due" if raw.dialect == "sqlite" else "held_due"
    if raw.dialect == "mysql":
        raw.run("DROP INDEX held_due ON postroom_held")
    else:
        raw.run(f"DROP INDEX {'postroom.' if raw.dialect == 'postgresql' else ''}{index}")
    raw.run("ALTER TABLE {p}dead_letter DROP COLUMN note")
    raw.run("DROP TABLE {p}audit")
    problems = await migrate.check(database_url)
    p = raw.prefix
    assert [problem.partition(";")[0] for problem in problems] == [
        f"Index {index} of {p}held is missing",
        f"Column note of {p}dead_letter is missing",
        f"Table {p}audit is missing",
    ]


async def test_check_counts_the_lanes(database_url: str, raw: Raw) -> None:
    await migrate.install(database_url)
    raw.run("DELETE FROM {p}lane WHERE lane = 3")
    assert "lane" in (await migrate.check(database_url))[0]


async def test_check_finds_functions_and_keys_missing(postgres: PostgresServer) -> None:
    name = f"test_{uuid.uuid4().hex[:12]}"
    url = postgres.create_database(name)
    await migrate.install(url)
    with psycopg.connect(url) as connection:
        connection.execute("DROP FUNCTION postroom.drop_archive_days")
        connection.execute("ALTER TABLE postroom.worker DROP CONSTRAINT worker_pkey")
    text = " ".join(await migrate.check(url))
    assert "The primary key of postroom.worker is missing" in text
    assert "Function postroom.drop_archive_days is missing" in text
    postgres.drop_database(name)


def test_four_processes_install_at_once(database_url: str) -> None:
    program = (
        "import asyncio, sys; from postroom.databases import migrate;"
        "sys.stdin.read(1); print(asyncio.run(migrate.install(sys.argv[1])))"
    )
    installers = [
        subprocess.Popen(
            [sys.executable, "-c", program, database_url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    for installer in installers:
        assert installer.stdin is not None
        installer.stdin.write("!")
        installer.stdin.flush()
    answers = [installer.communicate(timeout=60) for installer in installers]
    assert [installer.returncode for installer in installers] == [0] * 4, answers
    assert all(f"after={NEWEST}" in out for out, _ in answers)
    assert asyncio.run(migrate.check(database_url)) == []


def _mysql_cuts() -> range:
    return range(1, len(split(schema.migrations("mysql")[0].up)))


@pytest.mark.parametrize("done", [1, 4, 7, 8, 12])
async def test_half_done_install_is_completed(mariadb: MariaDBServer, done: int) -> None:
    name = f"test_{uuid.uuid4().hex[:12]}"
    url = mariadb.create_database(name)
    raw = Raw(url)
    assert done in _mysql_cuts()
    for statement in split(schema.migrations("mysql")[0].up)[:done]:
        raw.run(statement)
    assert await migrate.version(url) == 0
    assert await migrate.check(url) == [
        "The installation is incomplete; run `postroom db install` again."
    ]
    await migrate.install(url)
    assert await migrate.check(url) == []
    raw.connection.close()
    mariadb.drop_database(name)


def test_every_mariadb_statement_may_be_run_again() -> None:
    again = re.compile(
        r"CREATE TABLE IF NOT EXISTS|CREATE (UNIQUE )?INDEX IF NOT EXISTS|DROP \w+ IF EXISTS"
        r"|ALTER TABLE \w+ (ADD COLUMN IF NOT EXISTS|DROP COLUMN IF EXISTS)|UPDATE|DELETE"
        r"|INSERT .*\sON DUPLICATE KEY UPDATE",
        re.DOTALL,
    )
    for step in schema.migrations("mysql"):
        for statement in split(step.up) + split(step.down):
            assert again.match(statement), statement


async def test_failed_migration_leaves_nothing(
    postgres: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"test_{uuid.uuid4().hex[:12]}"
    urls = [postgres.create_database(name), f"sqlite:///{tmp_path / 'x.db'}"]
    for url in urls:
        dialect = resolve(url).dialect
        [first, *_] = schema.migrations(dialect)
        broken = schema.Migration(
            1, "core", first.up + "\nSELECT nothing FROM nowhere;", first.down
        )
        with monkeypatch.context() as patch:
            patch.setattr(migrate, "migrations", lambda _, step=broken: (step,))
            with pytest.raises(PostroomError):
                await migrate.install(url)
        assert "postroom db install" in (await migrate.check(url))[0]
        await migrate.install(url)
        assert await migrate.check(url) == []
    postgres.drop_database(name)


async def test_does_not_queue_behind_a_long_transaction(postgres: PostgresServer) -> None:
    name = f"test_{uuid.uuid4().hex[:12]}"
    url = postgres.create_database(name)
    await migrate.install(url)
    with psycopg.connect(url) as reader:
        reader.execute("SELECT count(*) FROM postroom.outbox")
        with pytest.raises(Refused, match="try again"):
            await asyncio.wait_for(migrate.downgrade(url, 0), 20)
    assert await migrate.check(url) == []
    await migrate.downgrade(url, 0)
    postgres.drop_database(name)


async def test_sqlite_is_in_wal_mode_and_asking_makes_no_file(tmp_path: Path) -> None:
    path = tmp_path / "new.db"
    url = f"sqlite:///{path}"
    assert await migrate.version(url) == 0
    assert await migrate.check(url)
    assert not path.exists()
    await migrate.install(url)
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        connection.execute("PRAGMA journal_mode = DELETE")
    connection.close()
    [problem] = await migrate.check(url)
    assert "WAL" in problem
    await migrate.install(url)
    assert await migrate.check(url) == []


async def test_postgres15(postgres15: PostgresServer) -> None:
    url = postgres15.create_database("test_fifteen")
    await migrate.install(url)
    assert await migrate.check(url) == []
    await migrate.downgrade(url, 0)
    postgres15.drop_database("test_fifteen")


# Roles.


def test_names_of_roles_are_quoted_and_listed() -> None:
    text = migrate.grants("postgresql", {"publisher": "app-writer"})
    assert 'TO "app-writer"' in text
    assert '"postroom_relay"' in text
    assert "{" not in text
    assert "`app-writer`" in migrate.grants("mysql", {"publisher": "app-writer"})
    assert "permissions" in migrate.grants("sqlite")


@given(st.text(max_size=80))
def test_no_name_escapes_its_quotes(name: str) -> None:
    for dialect in DIALECTS:
        try:
            text = migrate.grants(dialect, {"relay": name})
        except ConfigurationError:
            continue
        assert re.fullmatch("[A-Za-z_][A-Za-z0-9_-]{0,62}", name)
        assert dialect == "sqlite" or name in text


@pytest.mark.parametrize("name", ["", "a b", 'x" SUPERUSER', "x`", "x;--", "public", "é", "a" * 64])
def test_names_that_cannot_be_roles(name: str) -> None:
    with pytest.raises(ConfigurationError, match="role"):
        migrate.grants("postgresql", {"operator": name})


ALLOWED = {
    "publisher": [
        MESSAGE,
        "INSERT INTO {p}dedup (dedup_key, message_id)"
        " VALUES ('k', '018f0000-0000-7000-8000-000000000001')",
        "SELECT message_id FROM {p}dedup WHERE dedup_key = 'k'",
        "SELECT 1 FROM {p}outbox WHERE id = '018f0000-0000-7000-8000-000000000001'",
        "SELECT 1 FROM {p}archive WHERE id = '018f0000-0000-7000-8000-000000000001'",
        "SELECT value FROM {p}meta",
        "UPDATE {p}idempotency_key SET status = 'completed'",
        "SELECT state FROM {p}ledger",
    ],
    "relay": [
        MESSAGE,
        "SELECT payload FROM {p}outbox",
        "DELETE FROM {p}outbox",
        "UPDATE {p}lane SET owner = 'me', epoch = epoch + 1 WHERE lane = 1",
        "SELECT lane FROM {p}lane FOR UPDATE",
        "SELECT lane FROM {p}lane LOCK IN SHARE MODE",
        "UPDATE {p}held SET attempts = 2",
        "UPDATE {p}ledger SET state = 'succeeded' WHERE attempts = 7",
        "INSERT INTO {p}audit (who, what, subject) VALUES ('me', 'x', 'y')",
        "SELECT postroom.make_archive_days(7)",
    ],
    "consumer": [
        MESSAGE,
        "INSERT INTO {p}inbox (consumer, message_id) VALUES ('billing', 'm')",
        "UPDATE {p}inbox_held SET attempts = 2",
        "DELETE FROM {p}inbox_held",
        "SELECT owner FROM {p}seat LOCK IN SHARE MODE",
        "UPDATE {p}dead_letter SET state = 'resolved' WHERE source = 'consumer:billing'",
    ],
    "operator": [
        MESSAGE,
        "SELECT payload FROM {p}outbox",
        "SELECT count(*) FROM {p}worker",
        "UPDATE {p}lane SET paused = true WHERE lane = 1",
        "UPDATE {p}dead_letter SET state = 'discarded'",
        "INSERT INTO {p}audit (who, what, subject) VALUES ('me', 'pause', 'lane 1')",
    ],
}
DENIED = {
    "publisher": [
        "SELECT payload FROM {p}outbox",
        "SELECT * FROM {p}outbox",
        "DELETE FROM {p}outbox",
        "UPDATE {p}outbox SET topic = 'x'",
        "DELETE FROM {p}dedup",
        "DELETE FROM {p}idempotency_key",
        "UPDATE {p}ledger SET state = 'succeeded'",
        "SELECT payload FROM {p}dead_letter",
        "UPDATE {p}lane SET paused = true",
        "INSERT INTO {p}audit (who, what, subject) VALUES ('me', 'x', 'y')",
        "DROP TABLE {p}outbox",
    ],
    "relay": [
        "UPDATE {p}lane SET paused = true",
        "SELECT response_body FROM {p}idempotency_key",
        "SELECT * FROM {p}audit",
        "DELETE FROM {p}audit",
        "DELETE FROM {p}lane",
        "DELETE FROM {p}ledger",
        "DROP TABLE {p}outbox",
    ],
    "consumer": [
        "SELECT payload FROM {p}outbox",
        "DELETE FROM {p}outbox",
        "DELETE FROM {p}dead_letter",
        "UPDATE {p}lane SET paused = true",
        "DROP TABLE {p}inbox",
    ],
    "operator": [
        "DELETE FROM {p}audit",
        "UPDATE {p}audit SET who = 'you'",
        "UPDATE {p}meta SET value = '9'",
        "DROP TABLE {p}outbox",
    ],
}


@pytest.mark.parametrize("role", ["publisher", "relay", "consumer", "operator"])
@pytest.mark.parametrize("kind", ["postgres", "mariadb"])
async def test_roles_may_do_their_work_and_no_more(
    request: pytest.FixtureRequest, kind: str, role: str
) -> None:
    server: PostgresServer | MariaDBServer = request.getfixturevalue(kind)
    tag = uuid.uuid4().hex[:8]
    url = server.create_database(f"test_{tag}")
    await migrate.install(url)
    names = {name: f"{name}-{tag}" for name in migrate.ROLES}
    owner = Raw(url)
    for _ in range(2):  # may be run again
        owner.script(migrate.grants(owner.dialect, names))
    member = _member(url, owner, names[role], tag)
    for statement in ALLOWED[role]:
        if _fits(statement, owner.dialect):
            member.run(statement)
    denied = (psycopg.errors.InsufficientPrivilege, pymysql.OperationalError)
    for statement in DENIED[role]:
        with pytest.raises(denied, match=r"denied|must be owner"):
            member.run(statement)
    member.connection.close()
    _dismiss(owner, names, tag)
    owner.connection.close()
    server.drop_database(f"test_{tag}")


ROOMS = {
    "postroom.inbox": "consumer",
    "postroom.outbox.writing": "publisher",
    "postroom.outbox": "relay",
    "postroom.dead_letters": "operator",
    "postroom.audit": "operator",
    "postroom.ops": "operator",
}


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("kind", ["postgres", "mariadb"])
async def test_roles_suffice_for_every_query_of_their_room(
    request: pytest.FixtureRequest, kind: str, room: str
) -> None:
    """Planning a statement checks the rights that running it needs."""
    server: PostgresServer | MariaDBServer = request.getfixturevalue(kind)
    tag = uuid.uuid4().hex[:8]
    url = server.create_database(f"test_{tag}")
    await migrate.install(url)
    names = {name: f"{name}-{tag}" for name in migrate.ROLES}
    owner = Raw(url)
    owner.script(migrate.grants(owner.dialect, names))
    member = _member(url, owner, names[ROOMS[room]], tag)
    style = "dollar" if kind == "postgres" else "format"
    explain = "EXPLAIN (GENERIC_PLAN) " if kind == "postgres" else "EXPLAIN "
    denied = {}
    for name in sorted(query_names(room, owner.dialect)):
        for prepared in prepare(room, owner.dialect, name, style):
            text, values = prepared.bind(owner.dialect, _Anything())
            if text.split()[0] in ("SET", "DO"):
                continue
            cursor = member.connection.cursor()
            try:
                cursor.execute(explain + text, values if kind == "mariadb" else None)
            except (psycopg.Error, pymysql.Error) as error:
                denied[name] = str(error)
    assert denied == {}
    member.connection.close()
    _dismiss(owner, names, tag)
    owner.connection.close()
    server.drop_database(f"test_{tag}")


class _Anything(dict[str, Any]):
    """A value for every parameter."""

    def __missing__(self, name: str) -> Any:
        return [1] if name.endswith("_list") else 1


def _fits(statement: str, dialect: str) -> bool:
    return ("make_archive" if dialect == "mysql" else "LOCK IN SHARE") not in statement


def _member(url: str, owner: Raw, role: str, tag: str) -> Raw:
    """A connection of somebody who has this role and nothing else."""
    user = f"member_{tag}"
    if owner.dialect == "postgresql":
        owner.run(f'CREATE ROLE {user} LOGIN IN ROLE "{role}"')
        return Raw(url.replace("postgres@", f"{user}@"))
    owner.run(f"CREATE USER {user}@'%' IDENTIFIED BY 'x'")
    owner.run(f"GRANT `{role}` TO {user}@'%'")
    owner.run(f"SET DEFAULT ROLE `{role}` FOR {user}@'%'")
    return Raw(url.replace("postroom:postroom@", f"{user}:x@"))


def _dismiss(owner: Raw, names: dict[str, str], tag: str) -> None:
    if owner.dialect == "postgresql":
        owner.run(f"DROP ROLE member_{tag}")
        for name in names.values():
            owner.run(f'DROP OWNED BY "{name}"')
            owner.run(f'DROP ROLE "{name}"')
    else:
        owner.run(f"DROP USER member_{tag}@'%'")
        for name in names.values():
            owner.run(f"DROP ROLE `{name}`")
