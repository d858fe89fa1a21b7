"""Waiting for an order to be finished: who may, how many at a time, and for how long."""

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import pytest
from gateway_tools import PATIENT, House, place

from helpers import eventually
from postroom.gateway import service
from served import Served

ADA, BOB = ({"Authorization": f"Bearer {name}"} for name in ("ada", "bob"))
Wait = Callable[..., socket.socket]


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MOST_WAITING", 8)


@pytest.fixture
def wait() -> Iterator[Wait]:
    """Begins to wait for an order, and reads no answer."""
    with ExitStack() as stack:

        def begin(client: httpx.Client, headers: dict[str, str] | None = None) -> socket.socket:
            host, port = client.base_url.host, client.base_url.port
            caller = stack.enter_context(socket.create_connection((host, port or 0)))
            lines = ["GET /do/order/k1?wait=30 HTTP/1.1", f"Host: {host}"]
            lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
            caller.sendall("\r\n".join([*lines, "", ""]).encode())
            return caller

        yield begin


def waits(client: httpx.Client, headers: dict[str, str] | None = None) -> bool:
    """Whether an order that nobody sends keeps its client waiting."""
    answer = client.get("/do/order/k1", params={"wait": 2}, headers=headers)
    assert answer.status_code == 200
    return answer.elapsed.total_seconds() >= 2


def answered(caller: socket.socket) -> bool:
    caller.setblocking(False)
    try:
        return bool(caller.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return False


def test_one_client_leaves_room_for_the_others(sqlite_house: House, wait: Wait) -> None:
    with sqlite_house.gateway(None, tokens={"ada": "ada", "bob": "bob"}) as client:
        for headers in (ADA, BOB):
            place(client, headers=headers)
        callers = [wait(client, ADA) for _ in range(20)]
        eventually(lambda: sum(map(answered, callers)) == 16, 30)
        assert not waits(client, ADA), "she has had her share"
        assert waits(client, BOB)


def test_the_only_client_has_all_of_it(sqlite_house: House, wait: Wait) -> None:
    with sqlite_house.gateway(None) as client:
        place(client)
        callers = [wait(client) for _ in range(20)]
        eventually(lambda: sum(map(answered, callers)) == 12, 30)


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_who_hangs_up_waits_no_more(sqlite_house: House, method: str, wait: Wait) -> None:
    with sqlite_house.gateway(None) as client:
        place(client)
        if method == "GET":
            callers = [wait(client) for _ in range(9)]
            eventually(lambda: sum(map(answered, callers)) == 1, 30)
            for caller in callers:
                caller.close()
        else:
            for _ in range(8):
                with pytest.raises(httpx.TimeoutException):
                    place(client, params={"wait": 30}, timeout=0.2)
        eventually(lambda: waits(client), 15)


def test_an_application_may_be_opened_again(sqlite_house: House) -> None:
    """Each time on another event loop, with as many who ask at once."""
    app = service.create_app(sqlite_house.stage.url, **PATIENT)
    for _ in range(3):
        served = Served(app)
        try:
            with httpx.Client(base_url=served.url, timeout=120) as client:
                place(client)

                def ask(number: int, client: httpx.Client = client) -> int:
                    path, wait = f"/do/order/k{number % 2}", {"wait": number % 2}
                    return client.get(path, params=wait).status_code

                with ThreadPoolExecutor(16) as threads:
                    statuses = set(threads.map(ask, range(64)))
                assert statuses == {200, 404}
                assert waits(client)
        finally:
            served.stop()
