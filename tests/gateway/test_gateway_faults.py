"""What comes in broken, and what the gateway says when its own house is not in order."""

import json
from typing import Any

import httpx
import pytest
from gateway_tools import ORDER, House, place

from postroom.errors import ConfigurationError
from postroom.gateway.exchange import Manners


def post(client: httpx.Client, body: bytes, key: str = "k1") -> Any:
    headers = {"Idempotency-Key": key, "Content-Type": "application/json"}
    return client.post("/do/order", content=body, headers=headers)


def spelled(**change: str) -> bytes:
    """An order with some values spelled by hand."""
    fields = {name: json.dumps(value) for name, value in ORDER.items()} | change
    return ("{" + ",".join(f'"{name}":{value}' for name, value in fields.items()) + "}").encode()


def test_what_could_not_be_read_again_is_refused(house: House) -> None:
    note = spelled(client_note='"HALF"')
    bodies: list[tuple[bytes, str | None]] = [
        (note.replace(b"HALF", b"\xed\xa0\x80"), None),
        (note.decode().encode("utf-16"), None),
        (note.replace(b"HALF", b"\\ud800"), "client_note"),
        (note.replace(b"client_note", b"\\udfff"), "\\udfff"),
        (spelled(quantity="1e99999999999999999999"), "quantity"),
        (spelled(client_note='["x", {"y": 1e99999999999999999999}]'), "client_note"),
    ]
    with house.gateway(None) as client:
        for body, field in bodies:
            answer = post(client, body)
            assert answer.status_code == 400, (body, answer.text)
            told = [each["field"] for each in answer.json().get("errors", [])]
            assert told == ([field] if field else []), body
            assert client.get("/do/order/k1").status_code == 404
    assert house.entries() == {}


@pytest.mark.parametrize("key", [".", ".."])
def test_a_key_of_dots_is_found_where_its_answer_says(house: House, key: str) -> None:
    with house.gateway(None) as client:
        first = place(client, key)
        assert first.status_code == 202
        assert client.get(first.headers["location"]).json() == first.json()


def test_trouble_with_the_database_is_told_to_whoever_watches(house: House) -> None:
    with house.gateway(None) as client:
        assert client.get("/readyz").status_code == 200
        house.stage.query("ALTER TABLE {p}ledger RENAME TO ledger_away")
        away = "{p}ledger_away" if house.stage.database == "postgresql" else "ledger_away"
        name = "ledger" if house.stage.database == "postgresql" else "{p}ledger"
        try:
            assert place(client).status_code == 503
            assert client.get("/readyz").status_code == 503
        finally:
            house.stage.query(f"ALTER TABLE {away} RENAME TO {name}")
        assert client.get("/readyz").status_code == 200
    told = [fields for name, fields in house.heard if name == "gateway.trouble"]
    assert {fields["path"] for fields in told} == {"/do/order", "/readyz"}
    assert all("ledger" in fields["error"] for fields in told), told


def test_an_adapter_that_cannot_be_asked_is_warned_of(house: House) -> None:
    with house.gateway("call:gateway_tools:say_yes"):
        pass
    (told,) = [fields for name, fields in house.heard if name == "gateway.unasked"]
    assert told["adapter"] == "call:gateway_tools:say_yes"
    house.heard.clear()
    with house.gateway():
        pass
    assert not [name for name, _ in house.heard if name == "gateway.unasked"]


@pytest.mark.parametrize(
    "text",
    [
        *("seed=inf", "seed=nan", "seed=-1", "rejects=2", "rejects=-1", "rejects=nan", "rejects"),
        "latency_seconds=inf",
        "=1",
    ],
)
def test_manners_that_nobody_has(text: str) -> None:
    with pytest.raises(ConfigurationError):
        Manners.parse(text)
