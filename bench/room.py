"""Where measurements are made: private servers, and programs in processes of their own."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg
from rich.console import Console

HERE = Path(__file__).parent
HOME = HERE.parent
ENVIRONMENTS = HOME / ".bench"

sys.path.insert(0, str(HOME / "tests"))
sys.path.insert(0, str(HERE / "peers"))
import stage  # noqa: E402

from servers import MariaDBServer, NatsServer, PostgresServer, Server  # noqa: E402
from servers.places import new_directory  # noqa: E402


@dataclass(frozen=True, slots=True)
class System:
    """Something that is measured: its name, the command that starts it, and its options."""

    name: str
    command: tuple[str, ...]
    options: tuple[str, ...] = ()
    ordered: bool = True  # strict order per key


def _ours(name: str, program: str) -> System:
    return System(name, (sys.executable, str(HERE / program)))


OURS = _ours("postroom", "ours.py")
CLIENTS = _ours("clients", "clients.py")
BY_HAND = _ours("by hand", "by_hand.py")
CONSUMERS = _ours("consumers", "consumers.py")


def _peer(name: str, folder: str, *options: str, ordered: bool) -> System:
    python = ENVIRONMENTS / folder / "bin" / "python"
    command = (str(python), str(HERE / "peers" / folder / "program.py"))
    return System(name, command, options, ordered)


PEERS = (
    _peer("txoutbox, strict order", "txoutbox", "--strict", ordered=True),
    _peer("txoutbox, no order", "txoutbox", ordered=False),
    _peer("pgqueuer, no order", "pgqueuer", ordered=False),
    _peer("faststream-outbox, strict order", "faststream_outbox", "--strict", ordered=True),
    _peer("faststream-outbox, no order", "faststream_outbox", ordered=False),
)


@dataclass(frozen=True, slots=True)
class Build:
    """How a peer of another language is built from its folder, and which tool it needs."""

    folder: str
    tool: str
    command: tuple[str, ...]
    system: System


# Measured with a receiver that accepts immediately, if a toolchain is there. Both are built in a
# copy of their folder in `.bench`.
BUILDS = (
    Build(
        "river",
        "go",
        ("go", "build", "-o", "river", "."),
        System(
            "river (Go), no order, kept",
            (str(ENVIRONMENTS / "river" / "river"),),
            ordered=False,
        ),
    ),
    Build(
        "debezium",
        "mvn",
        (
            *("mvn", "--quiet", "--batch-mode", "compile"),
            *("dependency:copy-dependencies", "-DoutputDirectory=jars"),
        ),
        System(
            "debezium (Java), log order, kept",
            (
                *("java", "-cp"),
                f"{ENVIRONMENTS / 'debezium' / 'target' / 'classes'}{os.pathsep}"
                f"{ENVIRONMENTS / 'debezium' / 'jars'}/*",
                "Main",
            ),
        ),
    ),
)


def install_others(say: Callable[[str], None]) -> tuple[System, ...]:
    """Build the peers of other languages, once and again when they change; returns those there."""
    return tuple(build.system for build in BUILDS if _built(build, say))


def _built(build: Build, say: Callable[[str], None]) -> bool:
    if shutil.which(build.tool) is None:
        say(f"{build.folder} is left out: its program needs {build.tool}, which is not installed")
        return False
    source, place = HERE / "peers" / build.folder, ENVIRONMENTS / build.folder
    files = sorted(path for path in source.rglob("*") if path.is_file())
    wanted = "".join(path.read_text() for path in files)
    stamp = place / "installed.txt"
    if stamp.exists() and stamp.read_text() == wanted:
        return True
    say(f"building {build.folder} into {place.relative_to(HOME)}")
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(source, place)
    done = subprocess.run(build.command, cwd=place, capture_output=True, text=True)
    if done.returncode:
        why = (done.stderr or done.stdout).strip()[-300:]
        say(f"{build.folder} is left out: it could not be built: {why}")
        return False
    stamp.write_text(wanted)
    return True


def install_peers(say: Callable[[str], None]) -> None:
    """Make each peer's own environment, once and again when its requirements change."""
    for folder in sorted({Path(peer.command[1]).parent for peer in PEERS}):
        wanted = (folder / "requirements.txt").read_text()
        place = ENVIRONMENTS / folder.name
        stamp = place / "installed.txt"
        if stamp.exists() and stamp.read_text() == wanted:
            continue
        say(f"installing {folder.name} into {place.relative_to(HOME)}")
        subprocess.run([sys.executable, "-m", "venv", "--clear", place], check=True)
        pip = [place / "bin" / "python", "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, "-r", folder / "requirements.txt"], check=True)
        stamp.write_text(wanted)


@dataclass(slots=True)
class Room:
    """Servers for one run, the sizes it works with, and where its progress is shown."""

    quick: bool
    peers: tuple[System, ...]
    console: Console
    others: tuple[System, ...] = ()
    tick: Callable[[str], None] = print
    _stack: ExitStack = field(default_factory=ExitStack)
    _postgres: PostgresServer | None = None
    _nats: NatsServer | None = None
    _mariadb: MariaDBServer | None = None
    _databases: int = 0

    def __enter__(self) -> Room:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def size(self, full: int, quick: int) -> int:
        return quick if self.quick else full

    @property
    def systems(self) -> tuple[System, ...]:
        return (OURS, *self.peers)

    @property
    def postgres(self) -> PostgresServer:
        if self._postgres is None:
            settings = {
                "track_commit_timestamp": "on",  # when a commit really was
                "max_wal_size": "8GB",  # a checkpoint in the middle would hit one system by chance
                "shared_buffers": "512MB",
            }
            server = PostgresServer(fsync=True, settings=settings)
            self._postgres = self._stack.enter_context(server)
        return self._postgres

    @property
    def nats(self) -> str:
        if self._nats is None:
            self._nats = self._stack.enter_context(NatsServer())
        return self._nats.url

    @property
    def mariadb(self) -> MariaDBServer:
        if self._mariadb is None:
            self._mariadb = self._stack.enter_context(MariaDBServer(fsync=True))
        return self._mariadb

    @contextmanager
    def database_of(self, kind: str) -> Iterator[str]:
        """An empty database of a kind, dropped at the end."""
        self._databases += 1
        name = f"bench_{self._databases}"
        if kind == "sqlite":
            folder = new_directory("sqlite")
            yield f"sqlite:///{folder}/{name}.db"
            shutil.rmtree(folder)
            return
        server = self.mariadb if kind == "mariadb" else self.postgres
        try:
            yield server.create_database(name)
        finally:
            server.drop_database(name)

    @contextmanager
    def database(self) -> Iterator[str]:
        """An empty database with a table for business rows, dropped at the end."""
        self._databases += 1
        name = f"bench_{self._databases}"
        url = self.postgres.create_database(name)
        asyncio.run(_execute(url, "CREATE TABLE business (n bigint)"))
        try:
            yield url
        finally:
            self.postgres.drop_database(name)

    def empty_stream(self) -> str:
        """JetStream with one empty stream on disk; returns its address."""
        asyncio.run(_empty_stream(self.nats))
        return self.nats

    def run(self, system: System, verb: str, *arguments: object, **options: object) -> Any:
        """Run a program to its end; returns what it found."""
        command = _command(system, verb, arguments, options)
        done = subprocess.run(command, env=_environment(), capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{system.name} {verb}:\n{done.stderr[-4000:]}")
        return json.loads(done.stdout.splitlines()[-1])

    @contextmanager
    def running(self, system: System, verb: str, **options: object) -> Iterator[Callable[[], Any]]:
        """Run a program until the function given is called, which returns what it found."""
        process = subprocess.Popen(
            _command(system, verb, (), options),
            env=_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout is not None
            assert process.stdout.readline(), f"{system.name} {verb} did not start"
            yield lambda: json.loads(process.communicate(timeout=120)[0].splitlines()[-1])
        finally:
            process.kill()
            process.wait()

    def server_cpu_seconds(self) -> tuple[float, float]:
        """The CPU that PostgreSQL and NATS have used so far."""
        return cpu_seconds(self._postgres), cpu_seconds(self._nats)


def cpu_seconds(server: Server | None) -> float:
    """The CPU that a server has used so far, with processes of it that have ended."""
    if sys.platform != "linux" or server is None:
        return 0.0
    return _cpu_ticks(server.pid, 4) / os.sysconf("SC_CLK_TCK")


def _cpu_ticks(pid: int, columns: int) -> int:
    """utime and stime of a process and its children, cutime and cstime of those that ended."""
    ticks = 0
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with suppress(FileNotFoundError, ProcessLookupError):  # then it is among those that ended
            ticks += _cpu_ticks(int(child), 2)
    numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return ticks + sum(map(int, numbers[11 : 11 + columns]))


def _command(system: System, verb: str, arguments: Any, options: dict[str, object]) -> list[str]:
    command = [*system.command, verb, *system.options, *map(str, arguments)]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    return command


def _environment() -> dict[str, str]:
    paths = [str(HERE / "peers"), str(HOME / "src"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONWARNINGS": "ignore"}


async def _execute(url: str, sql: str) -> None:
    connection = await asyncpg.connect(url)
    await connection.execute(sql)
    await connection.close()


async def _empty_stream(url: str) -> None:
    from nats.js.errors import NotFoundError

    client, js = await stage.jetstream(url)
    with suppress(NotFoundError):
        await js.delete_stream(stage.STREAM)
    await js.add_stream(name=stage.STREAM, subjects=[f"{stage.SUBJECT.split('.')[0]}.>"])
    await client.close()
