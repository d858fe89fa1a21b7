"""A user's Alembic project beside Postroom's tables, on every database."""

import asyncio
import io
import re
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pymysql
import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import create_engine, inspect, make_url, text

from doors import mysql_options
from postroom import Outbox
from postroom.databases import migrate
from postroom.databases.schema import migrations, newest, remedy
from postroom.databases.sql import split
from postroom.errors import ConfigurationError, Refused, SchemaError

MODELS = """
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

class Base(DeclarativeBase): ...

class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)

class Note(Base):  # a name that looks like one of ours
    __tablename__ = "postroom_note"
    id: Mapped[int] = mapped_column(primary_key=True)
"""
REVISION = """
import postroom.alembic
from alembic import op
from sqlalchemy import text

revision = "{revision}"
down_revision = {before!r}
branch_labels = depends_on = None


def upgrade():
    {up}


def downgrade():
    {down}
"""
DRIVERS = {"postgresql": "psycopg", "mysql": "pymysql", "sqlite": "pysqlite"}
ASYNC_DRIVERS = {"postgresql": "asyncpg", "mysql": "asyncmy", "sqlite": "aiosqlite"}


class Project:
    """A temporary Alembic project of an application."""

    def __init__(self, folder: Path, url: str, template: str = "generic", **options: Any) -> None:
        self.folder, self.url = folder, url
        parsed = make_url(url)
        drivers = DRIVERS if template == "generic" else ASYNC_DRIVERS
        self.dialect = parsed.get_backend_name()
        driver_url = parsed.set(drivername=f"{self.dialect}+{drivers[self.dialect]}")
        self.output = io.StringIO()
        self.config = Config(str(folder / "alembic.ini"), output_buffer=self.output)
        command.init(self.config, str(folder / "migrations"), template=template)
        self.config = Config(str(folder / "alembic.ini"), output_buffer=self.output)
        rendered = driver_url.render_as_string(hide_password=False)
        self.config.set_main_option("sqlalchemy.url", rendered.replace("%", "%%"))
        (folder / f"{folder.name}_models.py").write_text(MODELS)
        self.configure(**options)

    def configure(self, hook: bool = True, **options: Any) -> None:
        """Write env.py as a user does, who adds his models and our hook."""
        env = self.folder / "migrations" / "env.py"
        lines = env.read_text()
        if "import postroom.alembic" not in lines:
            models = f"{self.folder.name}_models"
            # It would set up logging for the whole test run.
            lines = lines.replace("if config.config_file_name is not None:", "if False:")
            lines = lines.replace(
                "target_metadata = None",
                "import sys\n"
                f"sys.path.insert(0, {str(self.folder)!r})\n"
                f"import postroom.alembic\nfrom {models} import Base\n"
                "target_metadata = Base.metadata\n"
                "options = {}",
            ).replace(
                "target_metadata=target_metadata", "target_metadata=target_metadata, **options"
            )
        given = ", ".join(f"{name}={value!r}" for name, value in options.items())
        given += ", include_object=postroom.alembic.include_object" if hook else ""
        env.write_text(re.sub(r"^options = .*$", f"options = dict({given.strip(', ')})", lines,
                              flags=re.MULTILINE))  # fmt: skip

    def write(self, revision: str, before: str | None, up: str, down: str = "pass") -> None:
        page = REVISION.format(revision=revision, before=before, up=up, down=down)
        (self.folder / "migrations" / "versions" / f"{revision}.py").write_text(page)

    def steps(self) -> list[str]:
        """A revision for each version of our schema."""
        names = [f"v{step.version}" for step in migrations(self.dialect)]
        for n, name in enumerate(names, start=1):
            force = ", force=True" if n == 1 else ""
            self.write(
                name,
                names[n - 2] if n > 1 else None,
                f"postroom.alembic.upgrade(op, to={n})",
                f"postroom.alembic.downgrade(op, to={n - 1}{force})",
            )
        return names

    def plan(self) -> str:
        """What autogenerate would do, as the text of a revision that is thrown away."""
        script: Any = command.revision(self.config, "look", autogenerate=True)
        page = Path(script.path).read_text()
        Path(script.path).unlink()
        return page

    def scripted(self, act: Callable[..., None], target: str) -> str:
        self.output.seek(0)
        self.output.truncate()
        act(self.config, target, sql=True)
        return self.output.getvalue()

    def tables(self) -> set[str]:
        engine = create_engine(
            make_url(self.url).set(drivername=f"{self.dialect}+{DRIVERS[self.dialect]}")
        )
        inspector = inspect(engine)
        names = set(inspector.get_table_names())
        if self.dialect == "postgresql":
            names |= {f"postroom.{n}" for n in inspector.get_table_names(schema="postroom")}
        engine.dispose()
        return names

    def ours(self) -> set[str]:
        return {name for name in self.tables() if re.match(r"postroom[._](?!note)", name)}

    def check(self) -> list[str]:
        return asyncio.run(migrate.check(self.url))

    def version(self) -> int:
        return asyncio.run(migrate.version(self.url))

    def connect(self) -> Any:
        if self.dialect == "sqlite":
            return sqlite3.connect(make_url(self.url).database)
        if self.dialect == "postgresql":
            return psycopg.connect(self.url)
        options = mysql_options(self.url)
        return pymysql.connect(database=options.pop("db"), **options)

    def play(self, script: str) -> None:
        """Run a script as a person would, with the database's own shell."""
        with closing(self.connect()) as connection:
            if self.dialect == "sqlite":
                connection.executescript(script)
            elif self.dialect == "postgresql":
                connection.autocommit = True
                connection.execute(script)
            else:
                with connection.cursor() as cursor:
                    for statement in split(script):
                        cursor.execute(statement)
                connection.commit()

    def publish(self) -> None:
        with closing(self.connect()) as connection:
            Outbox().publish(connection, b"1", type="t")
            connection.commit()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / f"shop_{re.sub(r'[^a-z0-9]', '', tmp_path.name.lower())}"
    folder.mkdir()
    return folder


@pytest.fixture
def project(folder: Path, database_url: str) -> Project:
    return Project(folder, database_url)


# ── Autogenerate ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("include_schemas", [False, True])
def test_autogenerate_leaves_our_tables_alone(project: Project, include_schemas: bool) -> None:
    asyncio.run(migrate.install(project.url))
    # On MariaDB schemas are databases, the server's own among them: nobody compares them all.
    project.configure(include_schemas=include_schemas and project.dialect == "postgresql")
    first = project.plan()
    assert "create_table('orders'" in first
    assert "create_table('postroom_note'" in first
    assert "drop_table" not in first.partition("def downgrade")[0]
    command.revision(project.config, "mine", autogenerate=True)
    command.upgrade(project.config, "head")
    assert "postroom" not in project.plan().replace("postroom_note", "")
    command.check(project.config)
    assert project.check() == []


def test_without_the_hook_autogenerate_would_drop_them(project: Project) -> None:
    """What the hook is for; on PostgreSQL only where all schemas are compared."""
    asyncio.run(migrate.install(project.url))
    project.configure(hook=False, include_schemas=project.dialect == "postgresql")
    dropped = project.plan().partition("def downgrade")[0]
    name = "outbox" if project.dialect == "postgresql" else "postroom_outbox"
    assert f"drop_table('{name}'" in dropped
    if project.dialect == "postgresql":
        project.configure(hook=False)
        assert "drop_table" not in project.plan().partition("def downgrade")[0]


# ── Revisions ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("template", ["generic", "async"])
def test_a_revision_makes_the_tables_and_takes_them_back(
    folder: Path, database_url: str, template: str
) -> None:
    project = Project(folder, database_url, template)
    to = newest(project.dialect)
    project.write(
        "one",
        None,
        f"postroom.alembic.upgrade(op, to={to})",
        "postroom.alembic.downgrade(op, to=0)",
    )
    command.upgrade(project.config, "head")
    assert project.check() == []
    assert project.version() == to
    project.publish()
    with pytest.raises(Refused, match=r"undelivered messages in .*\(outbox\).*force=True"):
        command.downgrade(project.config, "base")
    assert project.check() == []
    with closing(project.connect()) as connection:
        table = "postroom.outbox" if project.dialect == "postgresql" else "postroom_outbox"
        connection.cursor().execute(f"DELETE FROM {table}")
        connection.commit()
    command.downgrade(project.config, "base")
    assert (project.version(), project.ours()) == (0, set())


@pytest.mark.parametrize("per_migration", [False, True])
def test_version_by_version_up_and_down(project: Project, per_migration: bool) -> None:
    project.configure(transaction_per_migration=per_migration)
    names = project.steps()
    command.upgrade(project.config, "head")
    assert project.check() == []
    project.publish()
    for n in range(len(names) - 1, -1, -1):
        command.downgrade(project.config, "-1")
        assert project.version() == n
    assert project.ours() == set()
    for n, name in enumerate(names, start=1):
        command.upgrade(project.config, name)
        assert project.version() == n
    assert project.check() == []


@pytest.mark.parametrize("per_migration", [False, True])
def test_a_revision_that_fails_leaves_nothing_half_done(
    project: Project, per_migration: bool
) -> None:
    project.configure(transaction_per_migration=per_migration)
    to = newest(project.dialect)
    make = f"postroom.alembic.upgrade(op, to={to})"
    project.write("one", None, f"{make}; op.execute(text('SELECT * FROM nowhere'))")
    with pytest.raises(Exception, match="nowhere"):
        command.upgrade(project.config, "head")
    if project.dialect != "mysql":  # MariaDB commits DDL by itself
        assert project.ours() == set()
    project.write("one", None, make)
    command.upgrade(project.config, "head")
    assert project.check() == []


TURNS = {
    "postgresql": "SELECT pg_advisory_xact_lock(7813864120559)",
    "mysql": "SELECT GET_LOCK(CONCAT('postroom.', LEFT(MD5(DATABASE()), 32)), 30)",
}


@pytest.mark.parametrize("database_url", ["postgresql", "mariadb"], indirect=True)
def test_it_waits_for_its_turn_among_installers(project: Project) -> None:
    project.steps()
    installer = project.connect()
    installer.cursor().execute(TURNS[project.dialect])
    with ThreadPoolExecutor(1) as thread:
        work = thread.submit(command.upgrade, project.config, "head")
        with pytest.raises(TimeoutError):
            work.result(1)
        assert project.ours() == set()
        installer.close()
        work.result(30)
    assert project.check() == []


def test_tables_that_are_there_already_are_taken_as_they_are(project: Project) -> None:
    asyncio.run(migrate.install(project.url))
    project.publish()
    project.steps()
    command.upgrade(project.config, "head")
    assert project.check() == []
    with pytest.raises(Refused, match="undelivered"):
        asyncio.run(migrate.downgrade(project.url, 0))


def test_a_version_that_does_not_exist_is_named(project: Project) -> None:
    project.write("one", None, "postroom.alembic.upgrade(op, to=999)")
    with pytest.raises(ConfigurationError, match="no schema version 999"):
        command.upgrade(project.config, "head")


def test_tables_of_a_newer_postroom_are_left_to_it(project: Project) -> None:
    asyncio.run(migrate.install(project.url))
    meta = "postroom.meta" if project.dialect == "postgresql" else "postroom_meta"
    with closing(project.connect()) as connection:
        connection.cursor().execute(f"UPDATE {meta} SET value = '998'")
        connection.commit()
    project.write("one", None, "postroom.alembic.upgrade(op, to=1)")
    with pytest.raises(SchemaError, match="at version 998 and this Postroom knows"):
        command.upgrade(project.config, "head")


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_statements_that_commit_by_themselves_are_refused(project: Project) -> None:
    project.write(
        "one",
        None,
        "with op.get_context().autocommit_block(): postroom.alembic.upgrade(op, to=1)",
    )
    with pytest.raises(Refused, match="outside autocommit_block"):
        command.upgrade(project.config, "head")
    assert project.ours() == set()


# ── Scripts ────────────────────────────────────────────────────────────────────────────────────


def test_a_script_does_the_same(project: Project) -> None:
    project.steps()
    up = project.scripted(command.upgrade, "head")
    down = project.scripted(command.downgrade, f"v{newest(project.dialect)}:base")
    project.play(up)
    assert project.check() == []
    assert project.version() == newest(project.dialect)
    engine = create_engine(
        make_url(project.url).set(drivername=f"{project.dialect}+{DRIVERS[project.dialect]}")
    )
    with engine.connect() as connection:
        head = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
    engine.dispose()
    assert head == f"v{newest(project.dialect)}"
    project.play(down)
    assert (project.version(), project.ours()) == (0, set())


def test_a_script_may_begin_with_a_later_version(project: Project) -> None:
    to = newest(project.dialect)
    project.write(
        "one",
        None,
        f"postroom.alembic.upgrade(op, to={to}, since=0)",
        f"postroom.alembic.downgrade(op, to=0, since={to}, force=True)",
    )
    project.play(project.scripted(command.upgrade, "head"))
    assert project.check() == []
    project.play(project.scripted(command.downgrade, "one:base"))
    assert project.ours() == set()


def test_a_script_that_could_lose_messages_must_be_meant(project: Project) -> None:
    down = "postroom.alembic.downgrade(op, to=0)"
    project.write("one", None, "postroom.alembic.upgrade(op, to=1)", down)
    with pytest.raises(Refused, match=r"cannot look .*force=True"):
        project.scripted(command.downgrade, "one:base")


def test_the_recipe_of_the_page_makes_the_newest_version() -> None:
    """And names the next one for the revision that comes after it."""
    page = (Path(__file__).parents[2] / "docs" / "connections.md").read_text(encoding="utf-8")
    chapter = page.partition("## Alembic")[2].partition("\n## ")[0]
    now = newest("postgresql")
    assert f'"""Postroom\'s tables, version {now}."""' in chapter
    ups = [int(number) for number in re.findall(r"upgrade\(op, to=(\d+)", chapter)]
    assert sorted(set(ups)) == [now, now + 1]


def test_what_to_do_about_an_old_schema() -> None:
    assert remedy(3, 6) == (
        "run `postroom db upgrade`, or a revision with `postroom.alembic.upgrade(op, to=6)`"
    )
    assert remedy(7, 6) == "upgrade postroom"


@pytest.mark.parametrize("dialect", ["postgresql", "mysql", "sqlite"])
def test_dialects_are_at_the_same_version(dialect: str) -> None:
    assert newest(dialect) == newest("postgresql")
