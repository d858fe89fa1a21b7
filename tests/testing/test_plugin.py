"""The pytest plugin, used by real test files of a user in a pytest of their own."""

import asyncio
import re
import tomllib
from pathlib import Path

import pytest

from postroom.databases import migrate

pytest_plugins = ["pytester"]

# By its name, as the entry point has it: loaded once, whether the package is installed or not.
PLUGIN = ["-p", "postroom.testing.plugin"]
ROOT = Path(__file__).parents[2]

DRIVERS = {"postgresql": ("psycopg", "asyncpg"), "mysql": ("pymysql", "asyncmy")}

SHOP = '''
from postroom import Outbox

outbox = Outbox()

def place(session, number):
    """What is tested: it writes, publishes and commits, as applications do."""
    outbox.publish(session, {"order": number}, type="order.placed.v1", topic="orders", key="o1")
'''

SYNC_CONFTEST = """
import pytest
from sqlalchemy import create_engine, event
from sqlalchemy.orm import Session

engine = create_engine({url!r})

if engine.dialect.name == "sqlite":
    # SQLAlchemy's recipe for savepoints with the sqlite3 driver.
    @event.listens_for(engine, "connect")
    def no_begin_by_the_driver(connection, record):
        connection.isolation_level = None

    @event.listens_for(engine, "begin")
    def begin(connection):
        connection.exec_driver_sql("BEGIN")

@pytest.fixture
def session():
    with engine.connect() as connection:
        outer = connection.begin()
        with Session(bind=connection, join_transaction_mode="create_savepoint") as session:
            yield session
        outer.rollback()

@pytest.fixture
def postroom_url():
    return {plain!r}
"""

ASYNC_CONFTEST = """
import pytest_asyncio
import pytest
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.pool import NullPool

engine = create_async_engine({url!r}, poolclass=NullPool)

if engine.dialect.name == "sqlite":
    @event.listens_for(engine.sync_engine, "connect")
    def no_begin_by_the_driver(connection, record):
        connection.isolation_level = None

    @event.listens_for(engine.sync_engine, "begin")
    def begin(connection):
        connection.exec_driver_sql("BEGIN")

@pytest_asyncio.fixture
async def session():
    async with engine.connect() as connection:
        outer = await connection.begin()
        async with AsyncSession(
            bind=connection, join_transaction_mode="create_savepoint"
        ) as session:
            yield session
        await outer.rollback()

@pytest.fixture
def postroom_url():
    return {plain!r}
"""

SYNC_TESTS = """
from shop import outbox, place

def test_it_is_published(session, mailroom):
    place(session, 1)
    session.commit()  # ends the savepoint, not the outer transaction
    place(session, 2)
    (first, second) = mailroom.published(session, "order.placed.v1")
    assert (first.topic, first.key, first.payload) == ("orders", "o1", {"order": 1})
    assert second.payload == {"order": 2}
    assert mailroom.published(session, "order.cancelled.v1") == []

def test_a_rollback_takes_it_back(session, mailroom):
    place(session, 1)
    session.commit()
    place(session, 2)
    session.rollback()
    assert [m.payload["order"] for m in mailroom.published(session)] == [1]

def test_it_is_drained_in_order(session, mailroom):
    for number in range(5):
        place(session, number)
    session.commit()
    assert [m.payload["order"] for m in mailroom.drain(session)] == [0, 1, 2, 3, 4]
    assert mailroom.drain(session) == []

def test_nothing_was_left_by_the_others(session, mailroom):
    assert mailroom.published(session, everything=True) == []
    assert mailroom.drain() == []
"""

ASYNC_TESTS = """
from shop import outbox, place

async def test_it_is_published(session, mailroom):
    place(session, 1)  # queued
    assert [m.payload["order"] for m in await mailroom.published_async(session)] == [1]
    await session.commit()  # ends the savepoint, not the outer transaction
    place(session, 2)
    found = await mailroom.published_async(session, "order.placed.v1")
    assert [m.payload["order"] for m in found] == [1, 2]

async def test_a_rollback_takes_it_back(session, mailroom):
    place(session, 1)
    await session.commit()
    place(session, 2)
    await session.rollback()
    assert [m.payload["order"] for m in await mailroom.published_async(session)] == [1]

async def test_it_is_drained_in_order(session, mailroom):
    for number in range(5):
        place(session, number)
    assert [m.payload["order"] for m in await mailroom.drain_async(session)] == [0, 1, 2, 3, 4]
    assert await mailroom.drain_async(session) == []

async def test_nothing_was_left_by_the_others(session, mailroom):
    assert await mailroom.published_async(session, everything=True) == []
    assert await mailroom.drain_async() == []
"""

COMMITTING_TESTS = '''
import datetime as dt

import pytest
from sqlalchemy.orm import Session

from conftest import engine
from postroom.brokers import Transient
from shop import outbox, place

@pytest.fixture(autouse=True)
def seed():
    """Left by somebody else, and so not the test's own."""
    with Session(engine) as session:
        place(session, 99)
        session.commit()

def commit(number):
    with Session(engine) as session:
        place(session, number)
        session.commit()

def test_only_what_the_test_itself_does_counts(session, mailroom):
    commit(1)
    place(session, 2)
    assert [m.payload["order"] for m in mailroom.published(session)] == [1, 2]
    assert len(mailroom.published(session, everything=True)) == 3

def test_the_next_test_has_its_own(session, mailroom):
    assert mailroom.published(session) == []
    assert len(mailroom.published(session, everything=True)) > 1

def test_really_delivered_with_a_back_off(mailroom):
    mailroom.drain()
    commit(1)
    mailroom.broker.fail(lambda message: True, Transient("busy", "not now"))
    assert mailroom.drain() == []
    mailroom.clock.advance(6)
    (arrived,) = mailroom.drain()
    assert arrived.payload == {"order": 1}
'''


@pytest.fixture
def home(pytester: pytest.Pytester, database_url: str) -> pytest.Pytester:
    asyncio.run(migrate.install(database_url))
    pytester.makepyfile(shop=SHOP)
    pytester.makeini(
        "[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n"
    )
    return pytester


def with_driver(url: str, place: int) -> str:
    scheme, _, rest = url.partition("://")
    if scheme == "sqlite":
        return f"sqlite{'+aiosqlite' if place else ''}://{rest}"
    return f"{scheme}+{DRIVERS[scheme][place]}://{rest}"


def play(home: pytest.Pytester, conftest: str, tests: str, url: str) -> pytest.RunResult:
    home.makeconftest(conftest)
    home.makepyfile(test_shop=tests)
    return home.runpytest_subprocess("-q", *PLUGIN, "-p", "no:cacheprovider")


def test_rolled_back_tests(home: pytest.Pytester, database_url: str) -> None:
    conftest = SYNC_CONFTEST.format(url=with_driver(database_url, 0), plain=database_url)
    play(home, conftest, SYNC_TESTS, database_url).assert_outcomes(passed=4)


def test_rolled_back_tests_on_an_async_session(home: pytest.Pytester, database_url: str) -> None:
    conftest = ASYNC_CONFTEST.format(url=with_driver(database_url, 1), plain=database_url)
    play(home, conftest, ASYNC_TESTS, database_url).assert_outcomes(passed=4)


def test_tests_that_commit(home: pytest.Pytester, database_url: str) -> None:
    conftest = SYNC_CONFTEST.format(url=with_driver(database_url, 0), plain=database_url)
    play(home, conftest, COMMITTING_TESTS, database_url).assert_outcomes(passed=3)


def test_a_wrong_expectation_fails(pytester: pytest.Pytester, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    asyncio.run(migrate.install(url))
    pytester.makepyfile(shop=SHOP)
    conftest = SYNC_CONFTEST.format(url=url, plain=url)
    tests = SYNC_TESTS.replace("[0, 1, 2, 3, 4]", "[4, 3, 2, 1, 0]")
    play(pytester, conftest, tests, url).assert_outcomes(passed=3, failed=1)


def test_without_a_database_it_says_what_to_do(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("POSTROOM_DATABASE_URL", raising=False)
    pytester.makepyfile("def test_it(mailroom):\n    mailroom.drain()\n")
    done = pytester.runpytest_subprocess("-q", *PLUGIN)
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(["*define a fixture `postroom_url`*"])


def test_the_environment_names_the_database(
    pytester: pytest.Pytester, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    asyncio.run(migrate.install(url))
    monkeypatch.setenv("POSTROOM_DATABASE_URL", url)
    pytester.makepyfile("def test_it(mailroom):\n    assert mailroom.drain() == []\n")
    pytester.runpytest_subprocess("-q", *PLUGIN).assert_outcomes(passed=1)


def test_loading_the_plugin_loads_little(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        "import sys\n"
        "def test_it():\n"
        "    loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "    assert not loaded & {'sqlalchemy', 'asyncpg', 'psycopg', 'aiosqlite'}\n"
        "    assert 'postroom.testing.plugin' in sys.modules\n"
    )
    pytester.runpytest_subprocess("-q", *PLUGIN).assert_outcomes(passed=1)


def test_the_plugin_is_registered_in_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    # The name is the module's, so that `-p` and the entry point are one plugin and not two.
    assert project["entry-points"]["pytest11"] == {PLUGIN[1]: PLUGIN[1]}


def test_an_entry_point_and_an_option_are_one_plugin(pytester: pytest.Pytester) -> None:
    """As after an installation: pytest finds it by itself, and somebody names it as well."""
    folder = pytester.mkdir("there-0.0.dist-info")
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: there\nVersion: 0.0\n")
    (folder / "entry_points.txt").write_text(f"[pytest11]\n{PLUGIN[1]} = {PLUGIN[1]}\n")
    pytester.syspathinsert()
    pytester.makepyfile("def test_it(mailroom):\n    assert mailroom\n")
    for options in ([], PLUGIN):
        pytester.runpytest_subprocess("-q", *options).assert_outcomes(passed=1)


def test_the_tests_of_the_page_pass(pytester: pytest.Pytester) -> None:
    page = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    for name, text in re.findall(r"^```python file=(\S+)\n(.*?)^```$", page, re.M | re.S):
        (pytester.path / name).write_text(text)
    pytester.runpytest_subprocess("-q", *PLUGIN).assert_outcomes(passed=3)
