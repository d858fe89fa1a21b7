"""`postroom db`, run as people run it: what it answers, and how it ends when the input is wrong."""

import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
from commands import Here, postroom

from postroom.databases.schema import newest
from servers import MariaDBServer, PostgresServer

NEWEST = newest("sqlite")
SECRET = "hunter22"


def fails(done: subprocess.CompletedProcess[str], code: int, sentence: str) -> None:
    """One clear line on stderr, nothing on stdout, the right exit code, and no secret."""
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert line.startswith("postroom: ")
    assert sentence in line
    assert "Traceback" not in line
    assert SECRET not in line


def test_life_of_a_schema(database_url: str, here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTROOM_DATABASE_URL", database_url)

    def db(*arguments: str) -> subprocess.CompletedProcess[str]:
        return here("db", *arguments)

    missing = db("check")
    assert missing.returncode == 1
    assert "run `postroom db install`" in missing.stdout
    fails(db("upgrade"), 1, "run `postroom db install`")

    installed = db("install")
    assert (installed.returncode, installed.stderr) == (0, "")
    assert f"installed, schema version {NEWEST}" in installed.stdout
    again = db("install", "--json")
    assert json.loads(again.stdout)["before"] == NEWEST
    assert (again.returncode, again.stderr) == (0, "")
    assert "nothing to do" in db("upgrade").stdout
    checked = db("check", "--json")
    assert checked.returncode == 0
    assert json.loads(checked.stdout)["problems"] == []
    script = db("sql")
    assert "CREATE TABLE" in script.stdout
    assert "\nGRANT" in db("grants").stdout or "permissions" in db("grants").stdout

    fails(db("downgrade", "--to", "7"), 2, "no schema version 7")
    removed = db("downgrade", "--to", "0")
    assert (removed.returncode, removed.stderr) == (0, "")
    assert db("check").returncode == 1
    assert "postroom:postroom" not in missing.stdout + installed.stdout + checked.stdout


def test_options_stand_before_or_after_the_command(here: Here, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    before = here("--database", url, "--json", "db", "install")
    assert json.loads(before.stdout) == {"database": url, "before": 0, "after": NEWEST}
    other = f"sqlite:///{tmp_path}/b.db"
    after = here("--database", url, "db", "install", "--database", other)
    assert other in after.stdout
    (tmp_path / "postroom.toml").write_text(f'database_url = "{url}"')
    assert here("db", "check").returncode == 0
    (tmp_path / "x.toml").write_text(f'database_url = "{other}"')
    assert other in here("db", "check", "--config", "x.toml").stdout


def test_undelivered_messages_are_not_lost(postgres: PostgresServer, here: Here) -> None:
    url = postgres.create_database("test_cli_undelivered")
    assert here("db", "install", "--database", url).returncode == 0
    with psycopg.connect(url) as connection:
        connection.execute(
            "INSERT INTO postroom.outbox (lane, id, topic, type, content_type, payload, size)"
            " VALUES (1, gen_random_uuid(), 't', 'x', 'text/plain', '', 0)"
        )
    downgrade = ("db", "downgrade", "--to", "0", "--database", url)
    fails(here(*downgrade), 1, "undelivered messages")
    assert here(*downgrade, "--force").returncode == 0
    postgres.drop_database("test_cli_undelivered")


WRONG: dict[str, tuple[list[str], int, str]] = {
    "no URL": (["db", "install"], 2, "No database URL: use --database"),
    "not a URL": (["db", "install", "--database", SECRET], 2, "not a URL"),
    "unknown scheme": (
        ["db", "install", "--database", f"oracle://u:{SECRET}@h/d"],
        2,
        "oracle:// is not a database",
    ),
    "unescaped password": (
        ["db", "check", "--database", f"mysql://u:x@{SECRET}@h/d"],
        2,
        "%40",
    ),
    "in memory": (["db", "install", "--database", "sqlite://"], 2, "in-memory"),
    "no directory": (
        ["db", "install", "--database", "sqlite:////no/such/directory/a.db"],
        2,
        "directory exists",
    ),
    "refused": (
        ["db", "check", "--database", f"postgres://u:{SECRET}@127.0.0.1:1/d"],
        3,
        "Nothing listens at postgresql://u@127.0.0.1:1/d",
    ),
    "refused by MariaDB": (
        ["db", "install", "--database", f"mysql://u:{SECRET}@127.0.0.1:1/d"],
        3,
        "Nothing listens at mysql://u@127.0.0.1:1/d",
    ),
    "no such host": (
        ["db", "install", "--database", f"postgres://u:{SECRET}@no-such-host.invalid/d"],
        3,
        "host name",
    ),
    "no tables": (["db", "upgrade", "--database", "sqlite:///new.db"], 1, "postroom db install"),
    "no file": (["db", "check", "--config", "no.toml"], 2, "no configuration file no.toml"),
    "unknown command": (["db", "instal"], 2, "No such command"),
    "unknown option": (["db", "install", "--force"], 2, "No such option"),
    "unknown dialect": (["db", "sql", "--dialect", "oracle"], 2, "oracle"),
    "not a number": (["db", "upgrade", "--to", "x"], 2, "Invalid value for '--to'"),
    "bad role": (
        ["db", "grants", "--dialect", "postgresql", "--relay", 'x"; DROP ROLE y'],
        2,
        "cannot be a role",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input(case: str, tmp_path: Path) -> None:
    arguments, code, sentence = WRONG[case]
    fails(postroom(*arguments, cwd=tmp_path), code, sentence)


def test_wrong_setting(tmp_path: Path) -> None:
    (tmp_path / "postroom.toml").write_text(f'databaes_url = "postgres://u:{SECRET}@h/d"')
    fails(postroom("db", "check", cwd=tmp_path), 2, "did you mean database_url?")


def test_wrong_login_and_database(
    mariadb: MariaDBServer, postgres: PostgresServer, here: Here
) -> None:
    login = mariadb.url.replace("postroom:postroom@", f"postroom:{SECRET}@")
    fails(here("db", "check", "--database", login), 2, "user name or password")
    for server in (mariadb, postgres):
        url = server.url.rpartition("/")[0] + "/no_such_database"
        done = here("db", "install", "--database", url)
        fails(done, 2, "no such database")


def test_other_schema_version(here: Here, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    assert here("db", "install", "--database", url).returncode == 0
    with sqlite3.connect(tmp_path / "a.db") as connection:
        connection.execute("UPDATE postroom_meta SET value = '9'")
    connection.close()
    done = here("db", "check", "--database", url)
    assert done.returncode == 1
    assert "version 9" in done.stdout
    upgrade = here("db", "upgrade", "--database", url)
    fails(upgrade, 1, "version 9")
    fails(here("db", "install", "--database", url), 1, "version 9")


def test_missing_driver(tmp_path: Path) -> None:
    """An environment without any driver for the URL, made by hiding them."""
    hide = (
        "import sys; sys.argv = ['postroom', 'db', 'install', '--database',"
        f" 'postgres://u:{SECRET}@h/d']\n"
        "from postroom.databases import urls; urls.find_spec = lambda name: None\n"
        "from postroom.ops.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", hide], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    fails(done, 2, "pip install 'postroom[asyncpg]'")


def test_half_done_mariadb_install_is_completed_quietly(
    mariadb: MariaDBServer, here: Here, tmp_path: Path
) -> None:
    """Drivers print warnings about what is there already; people should not see them."""
    url = mariadb.create_database("test_cli_half")
    for scheme in ("mysql+asyncmy", "mysql+aiomysql"):
        database = f"{scheme}://{url.partition('://')[2]}"
        assert here("db", "install", "--database", database).returncode == 0
        with mariadb._connect() as connection, connection.cursor() as cursor:
            cursor.execute("DELETE FROM test_cli_half.postroom_meta")
            cursor.execute("DROP TABLE test_cli_half.postroom_audit")
        incomplete = here("db", "check", "--database", database)
        assert "incomplete" in incomplete.stdout
        done = postroom("db", "install", "--database", database, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert here("db", "check", "--database", database).returncode == 0
    mariadb.drop_database("test_cli_half")


def test_quick_help(tmp_path: Path) -> None:
    heavy = "import sys, postroom.ops.cli; print({'sqlalchemy', 'asyncpg'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", heavy], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"
    assert postroom("--version", cwd=tmp_path).stdout.startswith("postroom ")
    assert "downgrade" in postroom("db", "--help", cwd=tmp_path).stdout


def test_debug_shows_where_without_secrets(tmp_path: Path) -> None:
    done = postroom(
        *("db", "check", "--database", f"postgres://u:{SECRET}@127.0.0.1:1/d"),
        cwd=tmp_path,
        POSTROOM_DEBUG="1",
    )
    assert "Traceback" in done.stderr
    assert SECRET not in done.stderr
