"""examples/lambda_drain.py, called as a scheduler calls it: again and again in one process."""

import asyncio
import importlib.util
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from postroom import Outbox
from postroom.databases import migrate
from postroom.errors import Unreachable

EXAMPLE = Path(__file__).parents[2] / "examples" / "lambda_drain.py"
DRIVERS = {"postgresql": "+psycopg", "mysql": "+pymysql", "sqlite": ""}

RECEIVER = """
import httpx

def send(message):
    if message.payload == b'"refused"':
        return "bad_address"
    if message.payload == b'"slow"':
        import time
        time.sleep(0.4)
    answer = httpx.post("{address}/" + message.topic, content=message.payload)
    answer.raise_for_status()
"""


class Context:
    """What Lambda hands to a handler."""

    def __init__(self, seconds: float = 30.0) -> None:
        self.seconds = seconds

    def get_remaining_time_in_millis(self) -> int:
        return int(self.seconds * 1000)


@pytest.fixture
def received() -> Iterator[tuple[str, list[bytes]]]:
    """A real HTTP server on the other end, and what it was sent."""
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Nothing: the test looks at the bodies."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", bodies
        server.shutdown()


@pytest.fixture
def function(
    database_url: str,
    received: tuple[str, list[bytes]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Any]:
    asyncio.run(migrate.install(database_url))
    (tmp_path / "lambda_receiver.py").write_text(RECEIVER.format(address=received[0]))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("POSTROOM_DATABASE_URL", database_url)
    monkeypatch.setenv("POSTROOM_BROKER_URL", "call:lambda_receiver:send")
    spec = importlib.util.spec_from_file_location("lambda_drain", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "lambda_drain", module)
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("lambda_receiver", None)


def publish(url: str, *payloads: str, key: str = "k") -> None:
    scheme, _, rest = url.partition("://")
    engine = create_engine(f"{scheme}{DRIVERS[scheme]}://{rest}")
    with Session(engine) as session:
        for payload in payloads:
            Outbox().publish(session, payload, type="note", topic="mail", key=key)
        session.commit()
    engine.dispose()


def counts(delivered: int = 0, held: int = 0, dead: int = 0) -> dict[str, Any]:
    return {
        "delivered": delivered,
        "held": held,
        "dead": dead,
        "lanes_elsewhere": 0,
        "stopped_early": False,
    }


def test_each_call_delivers_what_is_there(
    function: Any, database_url: str, received: tuple[str, list[bytes]]
) -> None:
    assert function.handler({}, Context()) == counts()
    publish(database_url, "one", "two")
    assert function.handler({"source": "aws.events"}, Context()) == counts(delivered=2)
    publish(database_url, "three")
    publish(database_url, "refused", key="other")
    assert function.handler({}, None) == counts(delivered=1, dead=1)
    assert function.handler({}, Context()) == counts()
    assert received[1] == [b'"one"', b'"two"', b'"three"']


def test_a_call_leaves_no_connection_and_no_lane_behind(function: Any, database_url: str) -> None:
    publish(database_url, "one")
    function.handler({}, Context())
    again = function.handler({}, Context())
    assert again["lanes_elsewhere"] == 0
    if database_url.startswith("postgresql"):
        with psycopg.connect(database_url) as connection:
            others = connection.execute(
                "SELECT count(*) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            ).fetchone()
        assert others == (0,)


def test_calls_at_the_same_time_share_the_work(
    function: Any, database_url: str, received: tuple[str, list[bytes]]
) -> None:
    for n in range(40):
        publish(database_url, f"{n}", key=f"k{n}")
    with ThreadPoolExecutor(3) as threads:
        told = list(threads.map(lambda _: function.handler({}, Context()), range(3)))
    rest = function.handler({}, Context())
    assert sum(each["delivered"] for each in [*told, rest]) == 40
    assert sorted(received[1]) == sorted(f'"{n}"'.encode() for n in range(40))


def test_a_call_ends_before_its_limit(
    function: Any, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(function, "SPARE_SECONDS", 0.0)
    publish(database_url, *["slow"] * 20)
    first = function.handler({}, Context(seconds=1.2))
    assert first["stopped_early"]
    assert 0 < first["delivered"] < 20
    assert function.handler({}, Context())["delivered"] == 20 - first["delivered"]


def test_an_outage_is_raised(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTROOM_DATABASE_URL", "postgresql://postgres@127.0.0.1:9/none")
    with pytest.raises(Unreachable):
        function.handler({}, Context())


def test_the_receiver_is_real(received: tuple[str, list[bytes]]) -> None:
    assert httpx.post(f"{received[0]}/mail", content=b"x").status_code == 204
    assert received[1] == [b"x"]
