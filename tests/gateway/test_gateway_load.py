"""Many orders at once: what reaches the exchange side by side, and the script that sends a load."""

import asyncio
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gateway_tools import House, place
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from helpers import eventually
from postroom.gateway.load import Load
from postroom.gateway.serving import free_port
from served import Served

SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "gateway-load"
AT_ONCE = 4
ORDERS = 3 * AT_ONCE


class Counting:
    """An exchange that answers nobody until it is told to, and counts who stands at the counter."""

    def __init__(self) -> None:
        self.now = self.most = self.came = 0
        self.opened = False
        self.app = Starlette(routes=[Route("/orders", self.book, methods=["POST"])])

    async def book(self, request: Request) -> Any:
        order = await request.json()
        self.came += 1
        self.now += 1
        self.most = max(self.most, self.now)
        while not self.opened:
            await asyncio.sleep(0.01)
        self.now -= 1
        return JSONResponse({"status": "booked", "client_order_id": order["client_order_id"]})


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counting]:
    counting = Counting()
    served = Served(counting.app)
    monkeypatch.setenv("POSTROOM_EXCHANGE_URL", served.url)
    monkeypatch.setenv("POSTROOM_EXCHANGE_TIMEOUT_SECONDS", "100")
    yield counting
    counting.opened = True
    served.stop()


def test_four_orders_are_under_way_at_once_and_no_more(
    sqlite_house: House, counting: Counting
) -> None:
    keys = [f"k{number}" for number in range(ORDERS)]
    with sqlite_house.gateway(lease_seconds=300, send_timeout_seconds=100) as client:
        for key in keys:
            assert place(client, key).status_code == 202
        eventually(lambda: counting.now >= AT_ONCE, 120)
        time.sleep(0.5)  # ten polls of the relay: a fifth would be there
        assert (counting.now, counting.came) == (AT_ONCE, AT_ONCE)
        counting.opened = True
        eventually(lambda: set(sqlite_house.entries().values()) == {"succeeded"}, 120)
    assert (counting.most, counting.came) == (AT_ONCE, ORDERS)


# ── scripts/gateway-load ───────────────────────────────────────────────────────────────────────


def load(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | environment,
    )


def test_a_small_load_from_end_to_end(sqlite_house: House) -> None:
    with sqlite_house.gateway() as client:
        some = ("--orders", "30", "--concurrency", "6", "--repeats", "1", "--conflicts", "1")
        done = load(f"{client.base_url}", *some, "--seed", "7")
        assert (done.returncode, done.stderr) == (0, ""), done
        first, *counts = done.stdout.splitlines()
        assert re.fullmatch(r"90 requests in \d+\.\d s: \d+/s", first)
        assert [line.split() for line in counts[:3]] == [
            ["200", "30"],
            ["202", "30"],
            ["409", "30"],
        ]
        assert re.fullmatch(r"  p50 \d+\.\d ms, p99 \d+\.\d ms", counts[3])
        eventually(lambda: set(sqlite_house.entries().values()) == {"succeeded"}, 120)
    assert (len(sqlite_house.entries()), len(sqlite_house.booked())) == (30, 30)


def test_the_same_seed_places_the_same_orders_again(sqlite_house: House) -> None:
    """Whoever is faster among those who place them, and however many are sent again."""

    def counts(done: subprocess.CompletedProcess[str]) -> dict[str, int]:
        assert (done.returncode, done.stderr) == (0, ""), done
        return {status: int(count) for status, count in re.findall(r"  (\d+) +(\d+)", done.stdout)}

    with sqlite_house.gateway(None) as client:
        url, seed = f"{client.base_url}", ("--seed", "7", "--conflicts", "0.3")
        first = counts(load(url, *seed, "--orders", "60", "--concurrency", "8"))
        some = ("--orders", "60", "--concurrency", "5")
        again = counts(load(url, *seed, *some))
        assert again == {"200": first["200"] + 60, "409": first["409"]}
        assert first == {"202": 60, "200": first["200"], "409": first["409"]}
        often = counts(load(url, *seed, *some, "--repeats", "1"))
        assert often == {"200": 120, "409": first["409"]}
    assert len(sqlite_house.entries()) == 60


def test_a_load_that_is_refused_says_so_and_fails(sqlite_house: House) -> None:
    with sqlite_house.gateway(None, tokens={"ada": "secret"}) as client:
        done = load(f"{client.base_url}", "--orders", "2", "--repeats", "0", "--conflicts", "0")
    assert done.returncode == 1, done
    assert len(re.findall("WRONG .*: 401 ", done.stdout)) == 2
    assert sqlite_house.entries() == {}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "url"),
        (("127.0.0.1:8080",), "'127.0.0.1:8080' is no address such as http://127.0.0.1:8080"),
        (("ftp://127.0.0.1:8080",), "'ftp://127.0.0.1:8080' is no address"),
        (("http://",), "'http://' is no address"),
        (("http://127.0.0.1:x",), "'http://127.0.0.1:x' is no address"),
        (("http://ä.example:80",), "'http://ä.example:80' is no address"),
        (("http://a..b:80",), "'http://a..b:80' is no address"),
        ((f"http://{'a' * 64}.example",), "is no address"),
        (("http://127.0.0.1:9/a b",), "'http://127.0.0.1:9/a b' is no address"),
        (("http://127.0.0.1:9", "--orders", "0"), "must be a whole number above 0"),
        (("http://127.0.0.1:9", "--concurrency", "-1"), "must be a whole number above 0"),
        (("http://127.0.0.1:9", "--repeats", "1.5"), "must be from 0 to 1"),
        (("http://127.0.0.1:9", "--conflicts", "nan"), "must be from 0 to 1"),
        *(
            (("http://127.0.0.1:9", f"--patience={seconds}"), "must be from 0 to 3600 seconds")
            for seconds in ("nan", "inf", "-inf", "-1", "soon")
        ),
    ],
)
def test_a_load_that_cannot_be_is_refused(words: tuple[str, ...], says: str) -> None:
    done = load(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("token", ["s3cr3t\nb", "s3cr3t ö", "s3cr3t two"])
def test_a_token_that_no_header_can_carry_is_refused(sqlite_house: House, token: str) -> None:
    with sqlite_house.gateway(None, tokens={"ada": "ada-secret"}) as client:
        done = load(f"{client.base_url}", "--orders", "2", GATEWAY_TOKEN=token)
    assert (done.returncode, done.stdout) == (2, "")
    assert "GATEWAY_TOKEN holds what no HTTP header can" in done.stderr
    assert "Traceback" not in done.stderr
    assert "s3cr3t" not in done.stderr


def test_a_token_may_end_with_a_line_break(sqlite_house: House) -> None:
    """As one that comes out of a file does."""
    with sqlite_house.gateway(None, tokens={"ada": "ada-secret"}) as client:
        done = load(f"{client.base_url}", "--orders", "2", GATEWAY_TOKEN="ada-secret\n")
    assert (done.returncode, done.stderr) == (0, ""), done


async def test_what_cannot_be_sent_is_not_tried_again() -> None:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        door.listen()
        url = f"http://127.0.0.1:{door.getsockname()[1]}/a b"
        load = Load(url, orders=3, repeats=0, conflicts=0)
        async with asyncio.timeout(30):
            told = await load.run()
    assert len(told.wrong) == 3
    assert "HTTP" in told.wrong[0]
    assert (told.again, told.ids) == (0, {})


def test_where_nobody_is_the_load_does_not_wait_for_ever() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    done = load(url, "--patience", "0.5")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"nobody answers at {url}" in done.stderr
    assert "Traceback" not in done.stderr
