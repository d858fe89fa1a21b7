"""Clients of the gateway and their secrets: what is refused at the start, and who is let in."""

import hashlib
from typing import Any

import httpx
import pytest
from gateway_tools import ORDER, PATIENT, House, place

from postroom.errors import ConfigurationError
from postroom.gateway import create_app, tokens_from

CANARY = "canary-s3cr3t"


def test_while_a_secret_is_replaced_both_are_good(sqlite_house: House) -> None:
    with sqlite_house.gateway(None, tokens=tokens_from("ada=old bob=other ada=new")) as client:
        old, new, other = ({"Authorization": f"Bearer {word}"} for word in ("old", "new", "other"))
        assert place(client, headers=old).status_code == 202
        assert place(client, headers=new).status_code == 200, "the same client, the same order"
        assert client.get("/do/order/k1", headers=other).status_code == 404


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ({"ada": []}, "ada has no secret"),
        ({"ada": "good", "bob": []}, "bob has no secret"),
        ({"ada": ""}, "ada has no secret"),
        ({"ada": ["good", " \t"]}, "ada has no secret"),
        ({"ada": None}, "ada has no secret"),
        ({"": CANARY}, "has no name"),
        ({" ": CANARY}, "has no name"),
        ({"ada": f"{CANARY}-pässwört"}, "ada holds what no HTTP header can"),
        ({"ada": f"{CANARY} two"}, "ada holds what no HTTP header can"),
        ({"ada": f"{CANARY}\n"}, "ada holds what no HTTP header can"),
        ({"ada": 7}, "ada holds what no HTTP header can"),
    ],
)
def test_secrets_that_let_in_anybody_or_nobody_are_refused_at_the_start(
    tokens: Any, says: str
) -> None:
    with pytest.raises(ConfigurationError, match=says) as error:
        create_app("sqlite:///gateway.db", tokens=tokens)
    assert CANARY not in str(error.value)


@pytest.mark.parametrize("given", ["Bearer ", "Bearer", "Bearer \t", "bearer  ", "", "ada-secret"])
async def test_no_token_is_nobodys(sqlite_house: House, given: str) -> None:
    app = create_app(sqlite_house.stage.url, tokens={"ada": "ada-secret"}, **PATIENT)
    # As if an empty secret had come in some other way.
    app.state.gateway._tokens.append(("bob", hashlib.sha256(b"").digest()))
    headers = {"Idempotency-Key": "k1", "Authorization": given}
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client,
    ):
        assert (await client.post("/do/order", json=ORDER, headers=headers)).status_code == 401
    assert sqlite_house.entries() == {}


@pytest.mark.parametrize("text", ["bob={0} ada={0}", "bob=x cid=y bob={0} ada=z ada={0}"])
def test_two_clients_with_one_secret_are_refused_at_the_start(text: str) -> None:
    tokens = tokens_from(text.format(CANARY))
    with pytest.raises(ConfigurationError, match="bob and ada have the same secret") as error:
        create_app("sqlite:///gateway.db", tokens=tokens)
    assert CANARY not in str(error.value)
    create_app("sqlite:///gateway.db", tokens={"ada": ["x", "x"], "bob": "y"})
