"""The Flask example: a real request, a real relay."""

import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers import eventually

EXAMPLE = Path(__file__).parents[2] / "examples" / "flask_app.py"
POSTROOM = Path(sys.executable).parent / "postroom"
DATABASE = ("--database", "sqlite:///shop.db")


def postroom(folder: Path, *words: str) -> str:
    done = subprocess.run([POSTROOM, *words], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def post(port: int, body: dict[str, Any]) -> tuple[int, bytes]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/orders",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    """The port of the application, which runs in an empty directory."""
    postroom(tmp_path, "db", "install", *DATABASE)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "PORT": str(port)}
    environment.pop("DATABASE_URL", None)
    with (tmp_path / "flask.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, EXAMPLE], cwd=tmp_path, env=environment, stdout=log, stderr=log
        )
    try:
        eventually(
            lambda: socket.create_connection(("127.0.0.1", port), 1).close() is None,
            30,
            retry=(OSError,),
        )
        yield port
    finally:
        process.kill()
        process.wait()


def test_an_order_by_http_arrives_at_the_broker(port: int, tmp_path: Path) -> None:
    status, body = post(port, {"total": "9.90"})
    assert (status, json.loads(body)) == (201, {"id": 1})
    assert post(port, {"total": None})[0] == 500  # refused by the database: no order, no message
    output = postroom(tmp_path, "relay", "--once", "--broker", "stdout://", *DATABASE)
    sent = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert [(each["type"], each["topic"], each["key"], each["payload"]) for each in sent] == [
        ("order.placed.v1", "orders", "1", {"order_id": 1, "total": "9.90"})
    ]
