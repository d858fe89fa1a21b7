"""Health over HTTP: a stuck relay is told from a waiting one, and each tells why."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from commands import COMMAND, Here
from starlette.applications import Starlette
from starlette.routing import Mount

from helpers import eventually, eventually_async
from postroom import Relay
from postroom.databases import migrate
from postroom.ops.health import asgi, serve
from postroom.worker import vitals as vitals_module
from postroom.worker.vitals import Vitals
from servers import MariaDBServer, NatsServer, PostgresServer

STUCK = """
import asyncio, pathlib, time

async def block(message):
    time.sleep(json_seconds(message))

def json_seconds(message):
    return float(message.payload)
"""
PUBLISH = """
import sqlite3, sys
from postroom import Outbox
connection = sqlite3.connect("app.db", timeout=30)
Outbox().publish(connection, float(sys.argv[1]), type="wait.v1")
connection.commit()
"""


def get(url: str, method: str = "GET") -> tuple[int, Any]:
    request = urllib.request.Request(url, method=method)
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.status, json.loads(answer.read() or b"null")
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read() or b"null")


class Process:
    """A relay process that answers over HTTP."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [COMMAND, "relay", "--http", "0", *arguments],
                cwd=folder,
                stderr=log,
                stdout=log,
                env={k: v for k, v in os.environ.items() if not k.startswith("POSTROOM_")}
                | {"POSTROOM_DEBUG": "1"},
            )

    @property
    def base(self) -> str:
        return eventually(
            lambda: re.findall(r"health and metrics at (http://\S+)", self.log.read_text()), 30
        )[0]

    def is_healthy(self) -> bool:
        return get(f"{self.base}/healthz")[0] == 200

    def is_ready(self) -> bool:
        return get(f"{self.base}/readyz")[0] == 200


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Any]:
    running: list[Process] = []

    def start(*arguments: str) -> Process:
        running.append(Process(tmp_path, *arguments))
        return running[-1]

    yield start
    for each in running:
        if each.process.poll() is None:
            each.process.send_signal(signal.SIGKILL)
        each.process.wait()


def test_a_stuck_loop_is_told_from_outside_it(tmp_path: Path, started: Any) -> None:
    (tmp_path / "stuck.py").write_text(STUCK)
    url = f"sqlite:///{tmp_path}/app.db"
    asyncio.run(migrate.install(url))
    relay = started("--database", url, "--broker", "call:stuck:block")
    eventually(relay.is_ready, 30)
    assert relay.is_healthy()
    status, text = 0, ""
    with urllib.request.urlopen(f"{relay.base}/metrics", timeout=5) as answer:
        status, text = answer.status, answer.read().decode()
    assert status == 200
    assert "outbox_sent_total 0.0" in text
    subprocess.run([sys.executable, "-c", PUBLISH, "12"], cwd=tmp_path, check=True)
    eventually(lambda: not relay.is_healthy(), 10)
    code, said = get(f"{relay.base}/healthz")
    assert (code, said["status"]) == (503, "failing")
    assert re.fullmatch(r"the event loop has not turned for \d+ s", said["reasons"][0])
    assert get(f"{relay.base}/readyz")[0] == 503
    eventually(relay.is_healthy, 30)
    eventually(relay.is_ready, 30)
    relay.process.send_signal(signal.SIGTERM)
    assert relay.process.wait(30) == 0


@pytest.mark.parametrize("kind", ["postgres", "mariadb"])
def test_a_lost_database_is_not_a_sick_relay(
    kind: str, started: Any, request: pytest.FixtureRequest
) -> None:
    server: PostgresServer | MariaDBServer = request.getfixturevalue(kind)
    server.require_private()
    url = server.create_database(f"health_{uuid.uuid4().hex[:8]}")
    asyncio.run(migrate.install(url))
    relay = started("--database", url, "--broker", "stdout://")
    eventually(relay.is_ready, 30)
    server.kill()
    eventually(lambda: not relay.is_ready(), 10)
    assert get(f"{relay.base}/healthz") == (200, {"status": "ok", "reasons": []})
    assert get(f"{relay.base}/readyz")[1]["reasons"][0].startswith("database: ")
    server.start()
    eventually(relay.is_ready, 30)
    # One that answers nothing is no better, and no fault of the relay's.
    with server.paused():
        eventually(lambda: not relay.is_ready(), 15)
        for _ in range(20):
            assert relay.is_healthy(), get(f"{relay.base}/healthz")
            asyncio.run(asyncio.sleep(0.6))
        assert not relay.is_ready()
    eventually(relay.is_ready, 40)


def test_a_lost_broker_is_not_a_sick_relay(
    tmp_path: Path, started: Any, nats_server: NatsServer
) -> None:
    nats_server.require_private()
    url = f"sqlite:///{tmp_path}/app.db"
    asyncio.run(migrate.install(url))
    address = nats_server.url.replace("nats://", "nats://relay:canary-pa55@")
    relay = started("--database", url, "--broker", address)
    eventually(relay.is_ready, 30)
    nats_server.kill()
    # Without a single message to send.
    eventually(lambda: not relay.is_ready(), 30)
    code, said = get(f"{relay.base}/readyz")
    assert code == 503
    assert said["reasons"][0].startswith("broker nats://relay:***@127.0.0.1:")
    assert "canary" not in json.dumps(said)
    assert relay.is_healthy()
    nats_server.start()
    eventually(relay.is_ready, 30)


@pytest.mark.parametrize("name", ["keep lanes", "keep house", "watch", "beat", "ping"])
async def test_a_background_task_that_ends_is_noticed(tmp_path: Path, name: str) -> None:
    url = f"sqlite:///{tmp_path}/app.db"
    await migrate.install(url)
    relay = Relay(url, "memory://health")
    assert relay.health().healthy
    assert relay.health().unready == ("not started yet",)
    running = asyncio.create_task(relay.run())
    try:
        with serve(relay, "127.0.0.1", 0) as (host, port):
            base = f"http://{host}:{port}"
            await eventually_async(lambda: relay.health().ready)
            (task,) = [each for each in asyncio.all_tasks() if each.get_name() == name]
            task.cancel()
            await eventually_async(lambda: not relay.health().healthy)
            code, said = await asyncio.to_thread(get, f"{base}/healthz")
            assert code == 503
            assert "ended" in said["reasons"][0]
    finally:
        relay.stop()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_background_task_that_does_not_move_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vitals_module, "TASK_SECONDS", 2.0)
    url = f"sqlite:///{tmp_path}/app.db"
    await migrate.install(url)
    relay = Relay(url, "memory://health")
    async with relay:
        await eventually_async(lambda: relay.health().ready)
        release = asyncio.Event()
        assert relay._office is not None
        monkeypatch.setattr(relay._office, "_share", release.wait)
        await eventually_async(lambda: not relay.health().healthy, 10)
        assert "'keep lanes' has not moved" in relay.health().unhealthy[0]
        release.set()
        await eventually_async(lambda: relay.health().healthy, 10)
    assert relay.health().unhealthy == ("the relay has ended: it was told to stop",)


async def test_a_broker_that_does_not_let_go_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = asyncio.Event()

    class Hog:
        from postroom.brokers.base import Capabilities

        capabilities = Capabilities()

        async def send(self, batch: Any, *, epoch: int = 0) -> list[Any]:
            from postroom.brokers.base import DELIVERED

            while not release.is_set():
                try:
                    await release.wait()
                except asyncio.CancelledError:
                    continue
            return [DELIVERED] * len(batch)

        async def ping(self) -> None: ...

        async def close(self) -> None: ...

    from postroom.outbox import relay as relay_module

    monkeypatch.setattr(relay_module, "SILENT_SECONDS", 0.5)
    url = f"sqlite:///{tmp_path}/app.db"
    await migrate.install(url)
    (tmp_path / "publish.py").write_text(PUBLISH)
    subprocess.run([sys.executable, "publish.py", "1"], cwd=tmp_path, check=True)
    relay = Relay(
        url,
        "hog://user:canary-pa55@host",
        brokers={"hog://user:canary-pa55@host": Hog()},
        send_timeout_seconds=0.5,
    )
    async with relay:
        await eventually_async(lambda: not relay.health().healthy, 10)
        assert relay.health().unhealthy == (
            "a send to hog://user:***@host does not end, though its time is over",
        )
        release.set()
        await eventually_async(lambda: relay.health().healthy, 10)


def test_who_waits_for_the_database_is_not_stuck() -> None:
    now = 100.0
    vitals = Vitals(clock=lambda: now)

    class Link:
        lost = False
        asked_at: float | None = None

    class Task:
        def get_name(self) -> str:
            return "keep"

        def done(self) -> bool:
            return False

    link = Link()
    vitals.add(Task(), lambda: link)  # type: ignore[arg-type,return-value]
    vitals.beat("keep")
    assert vitals.wrong() == []
    now = 120.0
    assert vitals.wrong() == ["the background task 'keep' has not moved for 20 s"]
    link.asked_at = 101.0
    assert vitals.wrong() == []
    link.asked_at, link.lost = None, True
    assert vitals.wrong() == []


async def test_as_an_application_to_mount(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/app.db"
    await migrate.install(url)
    relay = Relay(url, "memory://health")
    app = Starlette(routes=[Mount("/relay", app=asgi(relay))])
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://app") as client:
        assert (await client.get("/relay/readyz")).status_code == 503
        async with relay:
            await eventually_async(lambda: relay.health().ready)
            answer = await client.get("/relay/readyz")
            assert (answer.status_code, answer.json()["status"]) == (200, "ok")
            assert answer.headers["cache-control"] == "no-store"
            assert (await client.get("/relay/metrics")).text.startswith("# HELP")
            assert (await client.get("/relay/nothing")).status_code == 404
            refused = await client.post("/relay/healthz")
            assert (refused.status_code, refused.headers["allow"]) == (405, "GET, HEAD")
            assert (await client.head("/relay/healthz")).content == b""


async def test_other_paths_and_methods(tmp_path: Path) -> None:
    relay = Relay(f"sqlite:///{tmp_path}/app.db", "memory://health")
    with serve(relay, "127.0.0.1", 0) as (host, port):
        base = f"http://{host}:{port}"
        for method, path, code in (
            ("GET", "/", 404),
            ("GET", "/healthz/x", 404),
            ("POST", "/nothing", 404),
            ("POST", "/healthz", 405),
            ("DELETE", "/metrics", 405),
            ("HEAD", "/healthz", 200),
            ("GET", "/healthz?from=probe", 200),
            ("GET", "/readyz", 503),
        ):
            assert (await asyncio.to_thread(get, base + path, method))[0] == code, (method, path)


def test_a_port_in_use_is_one_sentence(here: Here, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/app.db"
    asyncio.run(migrate.install(url))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = here("relay", "--database", url, "--broker", "stdout://", "--http", address)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f"cannot be served at {address}: Address already in use" in done.stderr


@pytest.mark.parametrize("wrong", ["somewhere", "127.0.0.1:x", ":70000", "127.0.0.1:"])
def test_a_wrong_address_is_one_sentence(here: Here, tmp_path: Path, wrong: str) -> None:
    url = f"sqlite:///{tmp_path}/app.db"
    done = here("relay", "--database", url, "--broker", "stdout://", "--http", wrong)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "HOST:PORT" in done.stderr
