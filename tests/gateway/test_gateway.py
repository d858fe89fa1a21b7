"""The gateway over HTTP: an order is accepted once and placed once, and whoever asks is told."""

import asyncio
import json
import logging
import os
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_tools import LIMIT, ORDER, PATIENT, WAIT, House, place

from helpers import eventually
from postroom.gateway import create_app
from postroom.gateway.exchange import REASONS
from postroom.ops.logs import JsonFormatter
from postroom.worker.vitals import Health
from served import Served

CANARY = "canary-s3cr3t"
JSON = {"Content-Type": "application/json"}
KEYS, EACH = (1000, 100) if os.environ.get("POSTROOM_GUARANTEES") == "big" else (1, 100)


def finished(client: httpx.Client, key: str = "k1") -> dict[str, Any]:
    def look() -> dict[str, Any]:
        told: dict[str, Any] = client.get(f"/do/order/{key}", params={"wait": 5}).json()
        assert told["finished"], told
        return told

    return eventually(look, 120)


def tried(client: httpx.Client, attempts: int, key: str = "k1") -> dict[str, Any]:
    told: dict[str, Any] = client.get(f"/do/order/{key}").json()
    assert told["attempts"] >= attempts
    return told


# ── The contract ───────────────────────────────────────────────────────────────────────────────


def test_first_202_then_200_and_another_order_409(house: House) -> None:
    with house.gateway(None) as client:
        first = place(client)
        assert first.status_code == 202
        assert house.entries() == {"k1": "accepted"}, "committed before it is said"
        assert first.headers["location"] == "/do/order/k1"
        told = first.json()
        assert (told["status"], told["finished"], told["result"]) == ("accepted", False, None)
        assert told["order"] == ORDER | {"time_in_force": "day"}
        again = place(client, order={**dict(reversed(ORDER.items())), "quantity": 100.0})
        assert (again.status_code, again.headers["idempotent-replayed"]) == (200, "true")
        assert again.json() == told
        other = place(client, order=ORDER | {"quantity": 101})
        assert other.status_code == 409
        assert other.headers["content-type"] == "application/problem+json"
        assert other.json()["type"] == "urn:postroom:problem:key-reused"
        assert house.entries() == {"k1": "accepted"}
        assert len(house.stage.messages()) == 1


def test_the_key_may_stand_in_the_body(house: House) -> None:
    with house.gateway(None) as client:
        body = ORDER | {"idempotency_key": "in-body"}
        assert place(client, None, body).status_code == 202
        assert place(client, "in-body", ORDER).status_code == 200
        assert place(client, '"in-body"', body).status_code == 200
        assert place(client, "other", body).status_code == 400
        missing = place(client, None)
        assert (missing.status_code, missing.json()["errors"][0]["field"]) == (
            400,
            "Idempotency-Key",
        )
        for bad in ("a\nb", "", "x" * 256, 7, "\ud800"):
            body_bytes = json.dumps(ORDER | {"idempotency_key": bad}).encode()
            kind = {"Content-Type": "application/json"}
            wrong = client.post("/do/order", content=body_bytes, headers=kind)
            assert wrong.status_code == 400, bad
        twice = [("Idempotency-Key", "in-body"), ("Idempotency-Key", "in-body")]
        assert client.post("/do/order", json=ORDER, headers=twice).status_code == 400
        assert list(house.entries()) == ["in-body"]


@pytest.mark.parametrize("key", ["a/b c?d=%2F#e", "Schlüssel-ключ-🗝", "x" * 255])
def test_any_printable_key_is_found_again_where_its_answer_says(house: House, key: str) -> None:
    with house.gateway() as client:
        first = client.post("/do/order", json=ORDER | {"idempotency_key": key}, params=WAIT)
        assert (first.status_code, first.json()["status"]) == (200, "succeeded")
        found = client.get(first.headers["location"])
        assert (found.status_code, found.content) == (200, first.content)
        assert found.json()["idempotency_key"] == key


def test_what_is_wrong_is_named_and_nothing_is_written(house: House) -> None:
    with house.gateway(None) as client:
        wrong = place(client, order=ORDER | {"side": "hold", "colour": "red"})
        assert wrong.status_code == 422
        assert {each["field"] for each in wrong.json()["errors"]} == {"side", "colour"}
        headers = {"Idempotency-Key": "k", "Content-Type": "application/json"}
        answers = {
            400: client.post("/do/order", content=b"{", headers=headers),
            413: client.post("/do/order", content=b"x" * 20_000, headers=headers),
            415: client.post(
                "/do/order", content=b"{}", headers=headers | {"Content-Type": "text/plain"}
            ),
            404: client.get("/do/order/nothing"),
            405: client.put("/do/order/nothing"),
        }
        assert {code: answer.status_code for code, answer in answers.items()} == {
            code: code for code in answers
        }
        for answer in answers.values():
            assert answer.headers["content-type"] == "application/problem+json"
            assert {"type", "title", "status", "detail"} <= answer.json().keys()
        assert client.get("/do/order/x", params={"wait": "nan"}).status_code == 400
        assert client.get("/do/order/x", params={"wait": "31"}).status_code == 400
        assert house.entries() == {}
        assert house.stage.messages() == []


def test_from_the_order_to_its_result(house: House) -> None:
    with house.gateway() as client:
        answer = place(client, order=LIMIT, params=WAIT)
        told = answer.json()
        assert (answer.status_code, told["status"]) == (200, "succeeded")
        assert told["result"]["client_order_id"] == told["client_order_id"]
        assert told["result"]["exchange_order_id"] == 1
        assert house.booked() == [told["client_order_id"]]
        again = [place(client, order=LIMIT) for _ in range(3)]
        got = client.get("/do/order/k1")
        assert {each.content for each in again} == {answer.content, got.content}
        assert house.booked() == [told["client_order_id"]]


def test_a_rejection_is_a_failure_with_its_reason(house: House) -> None:
    house.manners(rejects=1)
    with house.gateway() as client:
        place(client)
        told = finished(client)
        assert told["status"] == "failed"
        assert told["last_error"]["code"] in REASONS
        assert place(client).json() == told
    assert len(house.stage.messages("dead_letter")) == 1


def test_an_order_that_gets_no_answer_is_found_and_not_placed_again(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("postroom.gateway.adapter.TIMEOUT_SECONDS", 0.5)
    house.manners(silent=1, refuses_copies=False)
    with house.gateway() as client:
        place(client)
        told = finished(client)
    assert told["status"] == "succeeded"
    assert house.booked() == [told["client_order_id"]]


def test_an_order_that_was_lost_is_placed_again(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("postroom.gateway.adapter.TIMEOUT_SECONDS", 0.5)
    house.manners(lost=1)
    with house.gateway() as client:
        place(client)
        eventually(lambda: client.get("/do/order/k1").json()["status"] == "unknown", 120)
        house.manners()
        assert finished(client)["status"] == "succeeded"
    assert len(house.booked()) == 1


def test_a_copy_that_the_network_made_is_one_order(house: House) -> None:
    house.manners(twice=1)
    with house.gateway() as client:
        place(client)
        assert finished(client)["status"] == "succeeded"
    assert len(house.booked()) == 1


def test_six_attempts_with_waits_that_double_then_failed_and_a_dead_letter(house: House) -> None:
    """Waits as they are if nobody says otherwise; the test turns the clock on."""
    house.manners(busy=1)
    ago = {
        "postgresql": "now() - interval '1 second'",
        "mariadb": "UTC_TIMESTAMP(6) - INTERVAL 1 SECOND",
        "sqlite": "1",
    }[house.stage.database]

    def waits() -> list[float]:
        return [told["delay_seconds"] for name, told in house.heard if name == "message.held"]

    with house.gateway(retry=None) as client:
        place(client)
        for attempts in range(1, 6):
            told = eventually(lambda: tried(client, attempts), 120)  # noqa: B023
            assert (told["status"], told["finished"]) == ("accepted", False)
            house.stage.query(f"UPDATE {{p}}held SET next_attempt_at = {ago}")
        done = finished(client)
    assert waits() == [5, 10, 20, 40, 80]
    assert (done["status"], done["attempts"], done["last_error"]["code"]) == ("failed", 6, "busy")
    assert len(house.stage.messages("dead_letter")) == 1
    assert house.booked() == []


def test_while_the_exchange_is_away_no_attempt_is_spent(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = os.environ["POSTROOM_EXCHANGE_URL"]
    monkeypatch.setenv("POSTROOM_EXCHANGE_URL", "http://127.0.0.1:9")
    with house.gateway() as client:
        place(client)
        eventually(lambda: any(name == "destination.down" for name, _ in house.heard), 120)
        assert client.get("/do/order/k1").json()["attempts"] == 0
        monkeypatch.setenv("POSTROOM_EXCHANGE_URL", url)
        assert finished(client)["status"] == "succeeded"


async def test_a_hundred_at_once_are_one_order(house: House) -> None:
    keys = [f"k{number}" for number in range(KEYS)]
    answers: dict[str, Counter[bytes]] = {key: Counter() for key in keys}
    statuses: Counter[int] = Counter()
    with house.gateway(None) as client:
        limits = httpx.Limits(max_connections=EACH)
        async with httpx.AsyncClient(base_url=client.base_url, timeout=120, limits=limits) as many:

            async def one(key: str) -> None:
                headers = {"Idempotency-Key": key}
                answer = await many.post("/do/order", json=ORDER, headers=headers)
                statuses[answer.status_code] += 1
                answers[key][answer.content] += 1

            for key in keys:
                await asyncio.gather(*(one(key) for _ in range(EACH)))
    assert statuses == {202: KEYS, 200: KEYS * (EACH - 1)}
    assert {len(told) for told in answers.values()} == {1}
    ids = [json.loads(next(iter(answers[key])))["client_order_id"] for key in keys]
    with house.gateway() as client:
        for key in keys:
            finished(client, key)
    assert sorted(house.booked()) == sorted(ids)


# ── Who asks ───────────────────────────────────────────────────────────────────────────────────


def test_a_client_sees_its_own_orders_alone(house: House) -> None:
    tokens = {"ada": "ada-secret", "bob": "bob-secret"}
    with house.gateway(None, tokens=tokens) as client:
        ada, bob = ({"Authorization": f"Bearer {secret}"} for secret in tokens.values())
        assert place(client).status_code == 401
        assert place(client, headers={"Authorization": "Bearer nobody"}).status_code == 401
        assert place(client, headers={"Authorization": "Basic ada-secret"}).status_code == 401
        assert place(client, headers=ada).status_code == 202
        assert client.get("/do/order/k1", headers=bob).status_code == 404
        mine = place(client, headers=bob, order=ORDER | {"quantity": 5})
        assert mine.status_code == 202
        assert mine.json()["order"]["quantity"] == 5
        assert client.get("/do/order/k1", headers=ada).json()["order"]["quantity"] == 100
        assert client.get("/openapi.json").json()["security"] == [{"token": []}]


@pytest.mark.parametrize(
    ("headers", "status", "kind"),
    [
        ({}, 415, "not-json"),
        ({"Content-Type": "text/plain;charset=UTF-8"}, 415, "not-json"),
        ({"Content-Type": "application/jsonp"}, 415, "not-json"),
        ({**JSON, "Sec-Fetch-Site": "cross-site"}, 403, "cross-site"),
        ({**JSON, "Host": "rebind.example:8080"}, 421, "wrong-host"),
        ({**JSON, "Host": "127.0.0.1.rebind.example"}, 421, "wrong-host"),
        ({**JSON, "Host": "[::1"}, 421, "wrong-host"),
        ({**JSON, "Host": "Localhost:1"}, 202, None),
        ({**JSON, "Host": "[::1]:8080"}, 202, None),
        ({**JSON, "Sec-Fetch-Site": "same-origin"}, 202, None),
        ({"Content-Type": "application/vnd.order+json; charset=utf-8"}, 202, None),
    ],
)
def test_a_page_in_a_browser_places_no_order(
    sqlite_house: House, headers: dict[str, str], status: int, kind: str | None
) -> None:
    body = json.dumps(ORDER | {"idempotency_key": "k1"}).encode()
    with sqlite_house.gateway(None) as client:
        answer = client.post("/do/order", content=body, headers=headers)
        assert answer.status_code == status
        assert (
            str(status)
            in client.get("/openapi.json").json()["paths"]["/do/order"]["post"]["responses"]
        )
        if kind is not None:
            assert answer.headers["content-type"] == "application/problem+json"
            assert answer.json()["type"] == f"urn:postroom:problem:{kind}"
            assert sqlite_house.entries() == {}
        if status in (403, 421):
            assert client.get("/do/order/k1", headers=headers).status_code == status


@pytest.mark.parametrize(
    ("server", "status"),
    [
        (("10.0.0.7", 8080), 421),
        (("fe80::7", 8080), 421),
        (("orders.example", 443), 421),
        (("127.0.0.5", 8080), 202),
        (("::1", 8080), 202),
        (("/run/gateway.sock", None), 202),
        (None, 202),
    ],
    ids=str,
)
@pytest.mark.parametrize("host", [b"127.0.0.1", None])
async def test_without_tokens_nobody_else_on_the_network_places_an_order(
    sqlite_house: House, server: tuple[str, int | None] | None, status: int, host: bytes | None
) -> None:
    """However it is served: `uvicorn postroom.gateway:app --host 0.0.0.0` asks nobody."""
    app = create_app(sqlite_house.stage.url, **PATIENT)

    async def there(scope: Any, receive: Any, send: Any) -> None:
        headers = [(name, value) for name, value in scope["headers"] if name != b"host"]
        if host is not None:
            headers.append((b"host", host))
        await app({**scope, "server": server, "headers": headers}, receive, send)

    transport = httpx.ASGITransport(there)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://gateway") as client,
    ):
        headers = {"Idempotency-Key": "k1"}
        answer = await client.post("/do/order", json=ORDER, headers=headers)
        look = await client.get("/do/order/k1")
    assert (answer.status_code, look.status_code) == (status, 200 if status == 202 else 421)
    if status == 421:
        assert answer.json()["type"] == "urn:postroom:problem:tokens-needed"
        assert "POSTROOM_GATEWAY_TOKENS" in answer.json()["detail"]
        assert sqlite_house.entries() == {}


def test_with_tokens_it_may_be_called_by_any_name(sqlite_house: House) -> None:
    with sqlite_house.gateway(None, tokens={"ada": "ada-secret"}) as client:
        headers = {"Authorization": "Bearer ada-secret", "Host": "orders.example"}
        assert place(client, headers=headers).status_code == 202
        assert place(client, headers=headers | {"Sec-Fetch-Site": "cross-site"}).status_code == 403


def test_logs_have_their_fields_and_nothing_holds_a_secret(
    house: House, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger("postroom")
    monkeypatch.setattr(logger, "level", logging.DEBUG)
    logger.addHandler(handler)
    monkeypatch.setenv("POSTROOM_EXCHANGE_TOKEN", CANARY)
    house.manners(rejects=0.5)
    try:
        with house.gateway(tokens={"ada": CANARY}) as client:
            headers = {"Authorization": f"Bearer {CANARY}"}
            answers = [place(client, f"k{n}", headers=headers, params=WAIT) for n in range(8)]
            answers.append(place(client, headers={"Authorization": f"Bearer x{CANARY}"}))
            monkeypatch.setenv("POSTROOM_EXCHANGE_URL", f"http://ada:{CANARY}@127.0.0.1:9")
            answers.append(place(client, "away", headers=headers))
            eventually(lambda: any(name == "destination.down" for name, _ in house.heard), 120)
            answers.append(client.get("/do/order/away", headers=headers))
            answers += [client.get("/readyz", headers=headers), client.get("/openapi.json")]
    finally:
        logger.removeHandler(handler)
    text = capfd.readouterr().err
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    accepted = [line for line in lines if line.get("signal") == "request.accepted"]
    settled = [line for line in lines if line.get("signal") == "request.settled"]
    keys = {f"k{n}" for n in range(8)}
    assert {line["idempotency_key"] for line in accepted} == keys | {"away"}
    assert {line["idempotency_key"] for line in settled} == keys
    for line in accepted + settled:
        assert {"status", "attempts", "last_error_code", "adapter"} <= line.keys()
    assert CANARY not in text
    assert all(CANARY not in answer.text for answer in answers)
    for table in ("ledger", "outbox", "archive", "dead_letter", "held", "meta", "audit", "worker"):
        assert CANARY not in repr(house.stage.query(f"SELECT * FROM {{p}}{table}"))


# ── The house it lives in ──────────────────────────────────────────────────────────────────────


def test_health_and_what_it_is(house: House) -> None:
    with house.gateway() as client:
        assert client.get("/healthz").json() == {"ok": True}
        eventually(lambda: client.get("/readyz").status_code == 200, 120)
        shown = client.get("/openapi.json").json()
        assert set(shown["paths"]) == {"/do/order", "/do/order/{key}"}


@pytest.mark.parametrize("tokens", [{"ada": "ada-secret"}, None])
async def test_strangers_learn_whether_it_is_ready_and_nothing_else(
    sqlite_house: House, tokens: dict[str, str] | None
) -> None:
    """What is wrong names databases, users and routes."""
    app = create_app(sqlite_house.stage.url, tokens=tokens, **PATIENT)
    known = {"Authorization": "Bearer ada-secret"} if tokens else {"Host": "127.0.0.1"}
    strangers = [{"Host": "gateway"}, {"Host": "127.0.0.1", "Sec-Fetch-Site": "cross-site"}]
    if tokens:
        strangers += [{"Authorization": "Bearer nobody"}, {"Host": "127.0.0.1"}]

    class Relay:
        def health(self) -> Health:
            return Health((CANARY,), (CANARY,))

    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client,
    ):
        for headers in strangers:
            assert (await client.get("/readyz", headers=headers)).json() == {"ok": True}
        assert (await client.get("/readyz", headers=known)).json() == {"ok": True, "problems": []}
        app.state.gateway.relay = Relay()
        for path in ("/healthz", "/readyz"):
            for headers in strangers:
                told = await client.get(path, headers=headers)
                assert (told.status_code, told.json()) == (503, {"ok": False})
            told = await client.get(path, headers=known)
            assert (told.status_code, CANARY in told.json()["problems"]) == (503, True)
        sqlite_house.stage.query("ALTER TABLE {p}ledger RENAME TO ledger_away")
        try:
            for headers in strangers:
                told = await client.get("/readyz", headers=headers)
                assert (told.status_code, told.json()) == (503, {"ok": False})
        finally:
            sqlite_house.stage.query("ALTER TABLE ledger_away RENAME TO {p}ledger")


def test_importable_as_an_application(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    import postroom.gateway as room

    monkeypatch.setenv("POSTROOM_DATABASE_URL", house.stage.url)
    monkeypatch.chdir(Path(house.folder))

    served = Served(room.app)
    try:
        with httpx.Client(base_url=served.url, timeout=120) as client:
            eventually(lambda: place(client).status_code in (200, 202), 120)
    finally:
        served.stop()
