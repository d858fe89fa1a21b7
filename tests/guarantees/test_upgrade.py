"""The tables go up and down under load, while relays and publishers of the version before run."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from history import History, check
from tables import Tables, connect, run

from helpers import eventually
from postroom.databases import migrate
from postroom.databases.schema import newest

HERE = Path(__file__).parent
NEWEST = newest("postgresql")
WHEEL = HERE / "old" / "postroom-0.1.0-py3-none-any.whl"
NOW = HERE.parents[1] / "src"
WRITER = (
    "import sys; from programs import writer;"
    "writer(sys.argv[1], log=sys.argv[2], count=10**9, keys=20, seed=sys.argv[3],"
    " rest_seconds=0.005)"
)


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Postroom with schema version 1, as somebody has it installed."""
    folder = tmp_path_factory.mktemp("before")
    with zipfile.ZipFile(WHEEL) as wheel:
        wheel.extractall(folder)
    return folder


class World:
    """Processes of two versions on one database."""

    def __init__(self, url: str, folder: Path, before: Path, stack: ExitStack) -> None:
        self.url, self.folder, self.before = url, folder, before
        self.history = History(in_flight=10_000)
        self.writers: list[tuple[subprocess.Popen[bytes], Path]] = []
        self._stack = stack

    def environ(self, version: Path) -> dict[str, str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("POSTROOM_")}
        return clean | {
            "PYTHONPATH": os.pathsep.join([str(version), str(HERE), str(HERE.parent)]),
            "POSTROOM_DATABASE_URL": self.url,
            "POSTROOM_BROKER_URL": "call:sink:take",
            "POSTROOM_RELAY_LEASE_SECONDS": "4",
            "POSTROOM_RELAY_SEND_TIMEOUT_SECONDS": "1",
            "SINK_DELAY_SECONDS": "0.001",
            "SINK_RECORD": str(self.folder / "deliveries"),
        }

    def start(self, version: Path, *arguments: str) -> subprocess.Popen[bytes]:
        with open(self.folder / "log", "ab") as log:
            process = subprocess.Popen(
                [sys.executable, *arguments], env=self.environ(version), stdout=log, stderr=log
            )
        self._stack.callback(_end, process)
        return process

    def relay(self, version: Path) -> subprocess.Popen[bytes]:
        """Start a relay, and wait until it works: before, a signal would just end it."""
        started = self.log.count("relay.started")
        process = self.start(version, "-m", "postroom.ops.cli", "relay", "--verbose")
        eventually(lambda: self.log.count("relay.started") > started, timeout=60)
        return process

    @property
    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text() if path.exists() else ""

    def write(self, version: Path) -> None:
        path = self.folder / f"writer-{len(self.writers)}"
        process = self.start(version, "-c", WRITER, self.url, str(path), path.name)
        self.writers.append((process, path))

    def delivered(self) -> int:
        path = self.folder / "deliveries"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def moves(self) -> None:
        """Both still work: wait until more was delivered."""
        goal = self.delivered() + 50
        eventually(lambda: self.delivered() >= goal, timeout=60)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


@pytest.fixture
def world(database_url: str, tmp_path: Path, before: Path) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(database_url, tmp_path, before, stack)


def run_command(world: World, version: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "postroom.ops.cli", *arguments],
        env=world.environ(version),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def watched_commits(url: str, longest: list[float]) -> Iterator[None]:
    """Time every commit of a publisher's own meanwhile: what is locked makes one of them long."""
    stopped = threading.Event()

    def work() -> None:
        connection = connect(url)
        while not stopped.is_set():
            begun = time.monotonic()
            run(connection, "UPDATE counter SET n = n + 1 WHERE k = 'watched'")
            connection.commit()
            longest[0] = max(longest[0], time.monotonic() - begun)
            time.sleep(0.002)
        connection.close()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join(60)


def test_up_and_down_under_load_with_workers_of_the_version_before(world: World) -> None:
    assert "schema version 1" in run_command(world, world.before, "db", "install")
    tables = Tables(world.url)
    tables.query("CREATE TABLE business (id VARCHAR(36) PRIMARY KEY, k VARCHAR(50), n BIGINT)")
    tables.query("CREATE TABLE counter (k VARCHAR(50) PRIMARY KEY, n BIGINT NOT NULL)")
    for key in ("watched", *(f"key-{number}" for number in range(20))):
        tables.query("INSERT INTO counter (k, n) VALUES (%s, 0)", key)
    relays = [world.relay(world.before), world.relay(world.before)]
    world.write(world.before)
    world.moves()

    longest = [0.0]
    with watched_commits(world.url, longest):
        assert asyncio.run(migrate.upgrade(world.url)) == migrate.Change(1, NEWEST)
    world.moves()
    assert [relay.poll() for relay in relays] == [None, None], world.log

    # One of the old ones dies and comes back on the new tables; new ones join them.
    world.history.disturbed.add(relays[0].pid)
    relays.pop(0).kill()
    relays.append(world.relay(world.before))
    fresh = world.relay(NOW)
    world.write(NOW)
    eventually(lambda: len(tables.query("SELECT 1 FROM {p}worker")) >= 3, timeout=60)
    world.moves()
    assert asyncio.run(migrate.check(world.url)) == []

    # The way back: the new relay goes first, then the tables; publishers need not care.
    fresh.send_signal(signal.SIGTERM)
    assert fresh.wait(60) == 0
    with watched_commits(world.url, longest):
        assert asyncio.run(migrate.downgrade(world.url, 1)) == migrate.Change(NEWEST, 1)
    world.moves()
    assert all(relay.poll() is None for relay in relays)
    assert longest[0] < 5, "a publisher had to wait long for the change of the tables"

    for writer, path in world.writers:
        writer.send_signal(signal.SIGTERM)
        writer.wait(60)
        world.history.read_writer(path)
    eventually(lambda: tables.waiting() == 0, timeout=90)
    for relay in relays:
        relay.send_signal(signal.SIGTERM)
        assert relay.wait(60) == 0
    world.history.read_deliveries(world.folder / "deliveries")
    world.history.read_tables(tables)
    report = check(world.history)
    assert not report.violations, str(report)
    assert len(world.history.committed) > 200


def test_an_open_publisher_does_not_hold_an_upgrade_up(
    database_url: str, tmp_path: Path, before: Path
) -> None:
    """Version 2 touches no table a publisher writes to. SQLite has one writer at a time for all."""
    with ExitStack() as stack:
        world = World(database_url, tmp_path, before, stack)
        run_command(world, before, "db", "install")
        if database_url.startswith("sqlite"):
            return
        publisher = stack.enter_context(connect(database_url))
        table = "postroom.outbox" if database_url.startswith("postgresql") else "postroom_outbox"
        run(publisher, f"DELETE FROM {table}")
        run(publisher, f"SELECT COUNT(*) FROM {table}")
        begun = time.monotonic()
        assert asyncio.run(migrate.upgrade(database_url)) == migrate.Change(1, NEWEST)
        assert asyncio.run(migrate.downgrade(database_url, 1)) == migrate.Change(NEWEST, 1)
        assert time.monotonic() - begun < 20, "it waited for the publisher's transaction"
        publisher.rollback()
