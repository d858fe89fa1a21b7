"""Many keys, each sent many times at once: one of each is carried out, all answers are equal.

At full size (`POSTROOM_GUARANTEES=big`) 1,000 keys, and a hundred clients that send each of them at
the same time.
"""

import http.client
import json
import os
import threading
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest
from frameworks import PATH, starlette
from test_resume import open_rides
from test_same_transaction import open_shop

from postroom.idempotency import Policy
from stages import Stage

BIG = os.environ.get("POSTROOM_GUARANTEES") == "big"
KEYS, COPIES = (1000, 100) if BIG else (25, 8)
PATIENCE_SECONDS = 300


class Clients:
    """As many threads as a key has copies, with a connection each; key after key, so that those of
    one key are on their way together."""

    def __init__(self, address: str, path: str) -> None:
        self._address = urlsplit(address)
        self._path = path
        self._own = threading.local()
        self.answers = defaultdict[str, Counter[tuple[int, bytes]]](Counter)
        self.replayed = self.again = 0
        self._turn = threading.Lock()

    def send_all(self) -> None:
        with ThreadPoolExecutor(COPIES) as threads:
            wishes = [f"k{n}" for n in range(KEYS) for _ in range(COPIES)]
            list(threads.map(self._send, wishes))

    def _send(self, key: str) -> None:
        try:
            self._once(key)
        except (http.client.HTTPException, ConnectionError):
            # An idle connection was closed: that is what keys are for.
            del self._own.connection
            with self._turn:
                self.again += 1
            self._once(key)

    def _once(self, key: str) -> None:
        if not hasattr(self._own, "connection"):
            place = self._address
            self._own.connection = http.client.HTTPConnection(
                str(place.hostname), place.port, timeout=PATIENCE_SECONDS
            )
        connection = self._own.connection
        headers = {"Idempotency-Key": key, "X-User": "ada", "Content-Type": "application/json"}
        connection.request("POST", self._path, json.dumps({"name": key, "do": ""}), headers)
        answer = connection.getresponse()
        body = answer.read()
        with self._turn:
            self.answers[key][answer.status, body] += 1
            self.replayed += answer.getheader("Idempotent-Replayed") == "true"


def race(address: str, path: str, what: str) -> None:
    """Send all; everybody with a key is told the same, and one of them was the first."""
    begun, clients = time.perf_counter(), Clients(address, path)
    clients.send_all()
    seconds = time.perf_counter() - begun
    requests = sum(sum(told.values()) for told in clients.answers.values())
    print(
        f"{what}: {requests} requests with {len(clients.answers)} keys, {COPIES} at once, in "
        f"{seconds:.0f} s; {clients.replayed} answered from memory"
    )
    assert len(clients.answers) == KEYS
    for key, told in clients.answers.items():
        assert len(told) == 1, (key, told)
        assert next(iter(told))[0] == 201, (key, told)
    assert requests == KEYS * COPIES
    assert 0 <= clients.replayed - KEYS * (COPIES - 1) <= clients.again


def test_in_the_transaction_of_the_route(stage: Stage) -> None:
    with open_shop(stage) as shop:
        race(shop.address, "/orders", f"{stage.database}, same transaction")
    assert stage.things() == sorted(f"k{n}" for n in range(KEYS))
    assert len(stage.messages()) == KEYS


@pytest.mark.parametrize("wait_seconds", [PATIENCE_SECONDS])
def test_outside_of_the_database(stage: Stage, wait_seconds: float) -> None:
    with starlette(stage.url, Policy(wait_seconds=wait_seconds)) as service:
        race(service.address, PATH, f"{stage.database}, external")
    assert service.charged == {f"k{n}": 1 for n in range(KEYS)}


def test_from_point_to_point(stage: Stage) -> None:
    policy = Policy(mode="resume", required=True, wait_seconds=PATIENCE_SECONDS)
    with open_rides(stage, policy) as (rides, address):
        race(address, "/rides", f"{stage.database}, resume")
    assert rides.runs == KEYS
    assert rides.charges == {f"shared:rides.create:k{n}:charged": 1 for n in range(KEYS)}
    assert stage.things() == sorted(f"k{n}" for n in range(KEYS))
    assert len(stage.messages()) == KEYS
