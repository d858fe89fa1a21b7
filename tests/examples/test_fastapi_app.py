"""examples/fastapi_app.py in a process of its own, spoken to over HTTP."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from helpers import eventually
from servers import free_port

EXAMPLES = Path(__file__).parents[2] / "examples"
DRIVERS = {"postgresql": "asyncpg", "mysql": "asyncmy", "sqlite": "aiosqlite"}


def with_driver(url: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}+{DRIVERS[scheme]}://{rest}"


@contextmanager
def running(folder: Path, **environ: str) -> Iterator[tuple[str, Any]]:
    """The application, its address and what it has printed."""
    port = free_port()
    log = folder / "output.log"
    command = [sys.executable, "-m", "uvicorn", "fastapi_app:app", "--port", str(port)]
    clean = {k: v for k, v in os.environ.items() if not k.startswith("POSTROOM_")}
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*command, "--app-dir", str(EXAMPLES)],
            cwd=folder,
            env={**clean, "PYTHONUNBUFFERED": "1", **environ},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    address = f"http://127.0.0.1:{port}"

    def up() -> bool:
        assert process.poll() is None, log.read_text()
        return httpx.get(f"{address}/openapi.json").status_code == 200

    try:
        eventually(up, 60, retry=(httpx.TransportError,))
        yield address, log
        process.send_signal(signal.SIGTERM)
        # uvicorn ends by the signal it was sent, once it has shut down in good order.
        assert process.wait(30) in (0, -signal.SIGTERM)
        assert "Application shutdown complete" in log.read_text()
    finally:
        process.kill()
        process.wait()


def sent(log: Path) -> list[dict[str, Any]]:
    """What the relay has written to standard output."""
    lines = [line for line in log.read_text().splitlines() if line.startswith('{"id"')]
    return [json.loads(line) for line in lines]


def order(number: int, total: str = "9.90") -> dict[str, Any]:
    return {"id": number, "total": total}


def test_an_order_is_written_and_sent_on(tmp_path: Path, database_url: str) -> None:
    with running(tmp_path, SHOP_DATABASE_URL=with_driver(database_url)) as (address, log):
        answers = [httpx.post(f"{address}/orders", json=order(n)) for n in (1, 2, 3)]
        assert [each.status_code for each in answers] == [201, 201, 201]
        # Refused ones leave no order and no message.
        assert httpx.post(f"{address}/orders", json=order(2)).status_code == 409
        assert httpx.post(f"{address}/orders", json=order(4, "-1")).status_code == 422
        eventually(lambda: len(sent(log)) == 3, 30)
    found = sorted(sent(log), key=lambda each: each["key"])
    assert [each["payload"] for each in found] == [
        {"order_id": n, "total": "9.90"} for n in (1, 2, 3)
    ]
    assert {each["id"] for each in found} == {each.json()["message"] for each in answers}
    assert {each["type"] for each in found} == {"order.placed.v1"}


def test_it_runs_without_settings_and_goes_on_after_a_restart(tmp_path: Path) -> None:
    with running(tmp_path) as (address, log):
        assert httpx.post(f"{address}/orders", json=order(1)).status_code == 201
        eventually(lambda: len(sent(log)) == 1, 30)
    with running(tmp_path) as (address, log):
        assert httpx.post(f"{address}/orders", json=order(1)).status_code == 409
        assert httpx.post(f"{address}/orders", json=order(2)).status_code == 201
        eventually(lambda: len(sent(log)) == 2, 30)
    assert [each["key"] for each in sent(log)] == ["1", "2"]


def test_health_is_there_where_postroom_has_it(tmp_path: Path) -> None:
    from importlib.util import find_spec

    expected = 200 if find_spec("postroom.ops.health") else 404
    with running(tmp_path) as (address, _):
        eventually(lambda: httpx.get(f"{address}/ops/healthz").status_code == expected, 30)


@pytest.mark.parametrize("name", ["fastapi_app", "lambda_drain"])
def test_an_example_says_how_to_run_it(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    assert text.startswith('"""')
    assert name in text.partition('"""')[2].partition('"""')[0]
