"""A gateway that dies at any point places each order once, at an exchange that would take it twice.

The exchange here books the same client order id again if it is sent again, so only that the relay
asks before it sends again keeps the book right.
"""

import json
import os
import queue
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from gateway_tools import Served

from postroom.databases import migrate
from postroom.gateway.exchange import Book, Manners, create_exchange
from servers import MariaDBServer, PostgresServer
from stages import Stage

pytestmark = pytest.mark.guarantee

PROGRAM = Path(__file__).with_name("gateway_program.py")
WISHES = {"plain": "AAPL", "refused": "REJECT", "quiet": "SILENT", "gone": "LOST"}
CAREFUL = ("gateway.", "relay.", "tx.commit", "sql.enter", "sql.finish", "sql.progress")
ALWAYS = {"gateway.accept.after", "relay.send.after", "relay.lookup.after", "relay.settle.after"}
WORLDS = 3
SOME = 2
SEED = int(os.environ.get("POSTROOM_SEED") or random.randrange(10**6))
KILLED = -9


def full_size() -> bool:
    return os.environ.get("POSTROOM_SWEEP") == "full"


@dataclass
class World:
    """A database and an exchange of its own."""

    stage: Stage
    folder: Path
    template: Path | None

    def life(self, exchange: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run the gateway until its orders have ended, or it dies."""
        wishes = [f"{key}={symbol}" for key, symbol in WISHES.items()]
        paths = os.pathsep.join([str(PROGRAM.parent), str(PROGRAM.parent.parent), *sys.path])
        return subprocess.run(
            [sys.executable, str(PROGRAM), self.stage.url, *wishes],
            env={
                **os.environ,
                "PYTHONPATH": paths,
                "POSTROOM_EXCHANGE_URL": exchange,
                "POSTROOM_EXCHANGE_TIMEOUT_SECONDS": "0.5",
                **environment,
            },
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def clear(self) -> None:
        if self.template is not None:
            self.stage.connection.close()
            del self.stage.__dict__["connection"]
            for tail in ("", "-wal", "-shm"):
                Path(f"{self.stage.url.removeprefix('sqlite:///')}{tail}").unlink(missing_ok=True)
            shutil.copy(self.template, self.stage.url.removeprefix("sqlite:///"))
        else:
            self.stage.clear()
            self.stage.query("DELETE FROM {p}lane_batch")
            self.stage.query("DELETE FROM {p}worker")
        self.stage.query("DELETE FROM {p}meta WHERE name = 'routes'")
        self.free()

    def free(self) -> None:
        """As if the lease of the dead had ended."""
        self.stage.query("UPDATE {p}lane SET owner = NULL, lease_until = NULL")


class Exchange(Served):
    """One that does what a symbol says, and takes every copy for another order."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "book.db"
        for old in folder.glob("book.db*"):
            old.unlink()
        app = create_exchange(str(self.path))
        floor = app.state.floor
        floor.manners_of = lambda order: Manners(
            refuses_copies=False,
            hang_seconds=1.0,
            rejects=float(order["symbol"] == "REJECT"),
            silent=float(order["symbol"] == "SILENT"),
            lost=float(order["symbol"] == "LOST" and floor.book.counts()["submissions"] < 5),
        )
        super().__init__(app)


def make_worlds(
    kind: str, request: pytest.FixtureRequest, folder: Path
) -> Iterator[queue.Queue[World]]:
    import asyncio

    worlds: queue.Queue[World] = queue.Queue()
    made: list[World] = []
    for number in range(WORLDS):
        at = folder / str(number)
        at.mkdir()
        template = None
        if kind == "sqlite":
            url = f"sqlite:///{at / 'gateway.db'}"
            asyncio.run(migrate.install(url))
            template = at / "template.db"
            shutil.copy(at / "gateway.db", template)
        else:
            fixture = {"postgresql": "postgres", "mariadb": "mariadb"}[kind]
            server: PostgresServer | MariaDBServer = request.getfixturevalue(fixture)
            url = server.create_database(f"sweep_{number}_{random.randrange(10**9)}")
            asyncio.run(migrate.install(url))
        stage = Stage(kind, url)
        if kind != "sqlite":
            stage.query("CREATE TABLE thing (name VARCHAR(100))")
        made.append(World(stage, at, template))
        worlds.put(made[-1])
    yield worlds
    for world in made:
        world.stage.connection.close()


@pytest.fixture(params=["sqlite", "postgresql", "mariadb"])
def worlds(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Any]]:
    if request.param == "sqlite":
        for made in make_worlds("sqlite", request, tmp_path):
            yield "sqlite", made
        return
    for made in make_worlds(request.param, request, tmp_path):
        yield request.param, made


def run_case(world: World, case: str | None, log: Path | None = None) -> str:
    """Kill at a point, begin again, and compare the books; returns how the first life ended."""
    world.clear()
    exchange = Exchange(world.folder)
    try:
        told = {"POSTROOM_FAILPOINTS_LOG": str(log)} if log else {}
        told |= {"POSTROOM_FAILPOINTS": case} if case else {}
        first = world.life(exchange.url, **told)
        if first.returncode == KILLED:
            world.free()
            last = world.life(exchange.url)
        else:
            last = first
        assert last.returncode == 0, f"{case}: {last.stderr[-3000:]}"
        check(json.loads(last.stdout.splitlines()[-1]), exchange, str(case))
        return "killed" if first.returncode == KILLED else "not reached"
    finally:
        exchange.stop()


def check(told: dict[str, Any], exchange: Exchange, case: str) -> None:
    states = {key: each["status"] for key, each in told.items()}
    wanted = {"plain": "succeeded", "refused": "failed", "quiet": "succeeded", "gone": "succeeded"}
    assert states == wanted, f"{case}: {states}"
    book = Book(str(exchange.path))
    entries = Counter(book.ids())
    book.close()
    assert entries == {each["client_order_id"]: 1 for each in told.values()}, f"{case}: {entries}"


def test_a_kill_at_every_point_places_each_order_once(
    worlds: tuple[str, queue.Queue[World]], tmp_path: Path
) -> None:
    kind, free = worlds
    world = free.get()
    log = tmp_path / "points"
    run_case(world, None, log)
    free.put(world)
    points = Counter(log.read_text().split())
    assert set(points) >= ALWAYS
    chosen = _chosen(points)
    cases = [f"{point}=kill@{at}" for point in chosen for at in _passes(points[point])]

    def one(case: str) -> str:
        mine = free.get()
        try:
            return run_case(mine, case)
        finally:
            free.put(mine)

    with ThreadPoolExecutor(WORLDS) as threads:
        futures = [threads.submit(one, case) for case in cases]
        failures = [str(error) for future in futures if (error := future.exception())]
    assert not failures, f"{len(failures)} of {len(cases)}:\n" + "\n\n".join(failures)[:10_000]
    ends = Counter(future.result() for future in futures)
    print(f"{kind}: {len(chosen)} of {len(points)} points, {len(cases)} runs: {dict(ends)}")
    assert ends["killed"] >= len(chosen) * 0.8


def _chosen(points: Counter[str]) -> list[str]:
    """All points; every day those that matter most, and some by a seed."""
    if full_size():
        return sorted(points)
    print(f"POSTROOM_SEED={SEED}")
    others = sorted(point for point in points if point.startswith(CAREFUL) and point not in ALWAYS)
    return sorted(ALWAYS) + random.Random(SEED).sample(others, min(SOME, len(others)))


def _passes(passes: int) -> list[int]:
    return sorted({1, 2, passes}) if full_size() and passes > 1 else [1]
