"""Many keys, each sent many times at once: one of each is carried out, all answers are equal."""

import os
import random
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from frameworks import PATH, starlette
from test_same_transaction import open_shop

from postroom.idempotency import Policy
from stages import Stage

BIG = os.environ.get("POSTROOM_GUARANTEES") == "big"
KEYS, COPIES = (1000, 100) if BIG else (25, 8)
AT_ONCE = 50


def send(address: str, path: str, user: str) -> dict[str, set[bytes]]:
    """Every key in an order of its own for each copy; the answers by key."""
    wishes = [f"k{n}" for n in range(KEYS)] * COPIES
    random.shuffle(wishes)
    mine, found = threading.local(), defaultdict[str, set[bytes]](set)

    def one(key: str) -> None:
        if not hasattr(mine, "client"):
            mine.client = httpx.Client(base_url=address, timeout=120)
        body = {"name": key, "do": ""} if path == PATH else {"name": key}
        answer = mine.client.post(path, json=body, headers={"Idempotency-Key": key, "X-User": user})
        assert answer.status_code == 201, answer.text
        found[key].add(answer.content)

    with ThreadPoolExecutor(AT_ONCE) as threads:
        list(threads.map(one, wishes))
    return found


def test_in_the_transaction_of_the_route(stage: Stage) -> None:
    with open_shop(stage) as shop:
        found = send(shop.address, "/orders", "ada")
    assert {len(answers) for answers in found.values()} == {1}
    assert len(found) == KEYS
    assert stage.things() == sorted(f"k{n}" for n in range(KEYS))
    assert len(stage.messages()) == KEYS


@pytest.mark.parametrize("wait_seconds", [60])
def test_outside_of_the_database(stage: Stage, wait_seconds: float) -> None:
    with starlette(stage.url, Policy(wait_seconds=wait_seconds)) as service:
        found = send(service.address, PATH, "ada")
    assert {len(answers) for answers in found.values()} == {1}
    assert set(service.charged.values()) == {1}
    assert len(service.charged) == KEYS
