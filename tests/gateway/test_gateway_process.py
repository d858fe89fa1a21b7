"""`postroom gateway` as a process: how it stops, what it does when its relay cannot go on, and who
is told."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_tools import House, place

from helpers import eventually
from postroom.errors import RoutingChanged
from postroom.outbox.office import Office
from served import Served

ADAPTER = """
def send(message):
    return "no_funds"

def lookup(message):
    return False
"""
# Its relay works until a file says that it may not.
ENDS = """
import asyncio, pathlib, sys
from postroom import errors
from postroom.ops.cli import main
from postroom.outbox.office import Office

async def work(office, stopping):
    while not pathlib.Path("end").exists():
        await asyncio.sleep(0.05)
    raise getattr(errors, sys.argv[1], RuntimeError)("the end")

Office.work = work
main(sys.argv[2:])
"""


class Process:
    """A gateway of its own process, with a database of its own."""

    def __init__(self, folder: Path, *arguments: str, program: tuple[str, ...] = ()) -> None:
        self.folder = folder
        (folder / "ad.py").write_text(ADAPTER)
        clean = {k: v for k, v in os.environ.items() if not k.startswith("POSTROOM_")}
        clean["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        database = ("--database", "sqlite:///app.db")
        arguments = ("gateway", "--port", "0", *database, *arguments)
        cli = ("-m", "postroom.ops.cli")
        install = [sys.executable, *cli, "db", "install", *database]
        subprocess.run(install, cwd=folder, env=clean, check=True, capture_output=True)
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *(program or cli), *arguments],
                cwd=folder,
                env=clean,
                stdout=log,
                stderr=log,
            )
        self.client = httpx.Client(base_url=self.said(r"takes orders at (http://\S+?)/do"))

    def said(self, pattern: str) -> str:
        """What its log says, as soon as it does."""
        return str(eventually(lambda: re.findall(pattern, self.log.read_text()), 60)[0])


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Any]:
    running: list[Process] = []

    def start(*arguments: str, **how: Any) -> Process:
        running.append(Process(tmp_path, *arguments, **how))
        return running[-1]

    yield start
    for each in running:
        each.client.close()
        if each.process.poll() is None:
            each.process.send_signal(signal.SIGKILL)
        each.process.wait()


class Waiter(threading.Thread):
    """Somebody who waits for an order to be finished."""

    def __init__(self, url: Any, method: str = "POST", **how: Any) -> None:
        super().__init__(daemon=True)
        self._url, self._how = url, how
        self._method = method
        self.answer: httpx.Response | None = None
        self.start()

    def run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=60, params={"wait": 30}) as client:
            post = self._method == "POST"
            self.answer = place(client, **self._how) if post else client.get("/do/order/k1")

    def status(self) -> int | None:
        self.join(60)
        return self.answer.status_code if self.answer else None


# ── Its relay ends ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("error", "code"), [("RoutingChanged", 2), ("SchemaError", 1), ("RuntimeError", 1)]
)
def test_with_its_relay_the_gateway_ends(started: Any, error: str, code: int) -> None:
    gateway = started("--broker", "call:ad:send", program=("-c", ENDS, error))
    assert place(gateway.client).status_code == 202
    (gateway.folder / "end").touch()
    assert gateway.process.wait(30) == code
    last = gateway.log.read_text().splitlines()[-1]
    assert last.startswith("postroom: "), last
    assert "the end" in last
    assert "Traceback" not in gateway.log.read_text()


def test_an_application_whose_relay_has_ended_is_not_healthy(
    sqlite_house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = threading.Event()

    async def work(office: Office, stopping: Any) -> None:
        while not ends.is_set():
            await asyncio.sleep(0.05)
        raise RoutingChanged("the end")

    monkeypatch.setattr(Office, "work", work)
    with sqlite_house.gateway() as client:
        assert client.get("/healthz").json() == {"ok": True}
        ends.set()
        eventually(lambda: client.get("/healthz").status_code == 503, 60)
        told = client.get("/healthz").json()
        assert not told["ok"]
        assert "the relay has ended" in told["problems"][0]
        assert client.get("/readyz").status_code == 503


# ── It is told to stop ─────────────────────────────────────────────────────────────────────────


def test_who_waits_when_it_stops_is_answered_at_once(started: Any) -> None:
    gateway = started("--no-relay")
    url = gateway.client.base_url
    assert place(gateway.client).status_code == 202
    new, again, look = Waiter(url, key="k2"), Waiter(url), Waiter(url, "GET")
    eventually(lambda: gateway.client.get("/do/order/k2").status_code == 200, 60)
    time.sleep(0.5)  # so that all three wait
    assert all(each.answer is None for each in (new, again, look))
    began = time.monotonic()
    gateway.process.send_signal(signal.SIGTERM)
    assert [new.status(), again.status(), look.status()] == [202, 200, 200]
    assert gateway.process.wait(30) == 0
    assert time.monotonic() - began < 8, "nobody was waited for"
    assert "Traceback" not in gateway.log.read_text()


HANGS = {
    "async": """
import asyncio, pathlib
async def send(message):
    pathlib.Path("sending").touch()
    await asyncio.sleep(300)
""",
    "in a thread": """
import pathlib, time
def send(message):
    pathlib.Path("sending").touch()
    time.sleep(300)
""",
}


@pytest.mark.parametrize("adapter", HANGS.values(), ids=HANGS)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda each: each.name)
def test_a_second_signal_ends_it_at_once(
    tmp_path: Path, started: Any, adapter: str, number: signal.Signals
) -> None:
    (tmp_path / "hangs.py").write_text(adapter)
    gateway = started("--broker", "call:hangs:send")
    assert place(gateway.client).status_code == 202
    eventually((tmp_path / "sending").exists, 60)
    gateway.process.send_signal(number)
    with pytest.raises(subprocess.TimeoutExpired):
        gateway.process.wait(1.5)  # it finishes what is under way
    began = time.monotonic()
    gateway.process.send_signal(number)
    assert gateway.process.wait(30) == 0
    assert time.monotonic() - began < 5, "it waited for the exchange"
    assert "Traceback" not in gateway.log.read_text()


def test_a_second_signal_does_not_wait_for_who_is_slow_to_ask(tmp_path: Path, started: Any) -> None:
    (tmp_path / "hangs.py").write_text(HANGS["async"])
    gateway = started("--broker", "call:hangs:send")
    assert place(gateway.client).status_code == 202
    eventually((tmp_path / "sending").exists, 60)
    at = gateway.client.base_url
    with socket.create_connection((at.host, at.port)) as slow:
        head = "POST /do/order HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        slow.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
        time.sleep(0.5)  # so that it is read
        gateway.process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            gateway.process.wait(1)
        began = time.monotonic()
        gateway.process.send_signal(signal.SIGTERM)
        assert gateway.process.wait(30) == 0
    assert time.monotonic() - began < 5


# ── Who is told ────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def hook() -> Iterator[Any]:
    """A web server that takes alerts; its `told` are those it got."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            server.told.append(json.loads(body)["alert"])  # type: ignore[attr-defined]
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.told = []  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_alerts_and_health_are_those_of_the_relay_command(
    tmp_path: Path, started: Any, hook: Any
) -> None:
    url = f"http://127.0.0.1:{hook.server_port}/"
    (tmp_path / "postroom.toml").write_text(
        f'[alerts]\nwebhook_url = "{url}"\n[relay]\nhttp = "0"\n'
    )
    gateway = started("--broker", "call:ad:send")
    place(gateway.client)
    eventually(lambda: "attempts_spent" in hook.told, 60)
    at = gateway.said(r"health and metrics at (http://\S+)")
    assert eventually(lambda: httpx.get(f"{at}/readyz").status_code == 200, 60)
    assert httpx.get(f"{at}/healthz").json()["status"] == "ok"
    assert "outbox_sent_total" in httpx.get(f"{at}/metrics").text
    gateway.process.send_signal(signal.SIGTERM)
    assert gateway.process.wait(30) == 0


def test_the_application_sends_alerts_too(
    sqlite_house: House, monkeypatch: pytest.MonkeyPatch, hook: Any
) -> None:
    import postroom.gateway as room

    sqlite_house.manners(rejects=1)
    monkeypatch.chdir(sqlite_house.folder)
    monkeypatch.setenv("POSTROOM_DATABASE_URL", sqlite_house.stage.url)
    monkeypatch.setenv("POSTROOM_BROKER_URL", "call:postroom.gateway.adapter:send")
    monkeypatch.setenv("POSTROOM_ALERTS_WEBHOOK_URL", f"http://127.0.0.1:{hook.server_port}/")
    served = Served(room.app)
    try:
        with httpx.Client(base_url=served.url, timeout=60) as client:
            place(client)
            eventually(lambda: "attempts_spent" in hook.told, 60)
    finally:
        served.stop()
