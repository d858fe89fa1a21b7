"""`postroom ledger` and `postroom gateway`: seen, shown, resolved, and refused where it must be."""

import asyncio
import json
from contextlib import closing

import pytest
from commands import Here
from house_tools import House

from helpers import eventually_async
from postroom import Ledger
from postroom.brokers import memory
from postroom.brokers.base import Unknown
from postroom.config import RelaySettings, Routes
from postroom.ledger.rules import Entry
from postroom.ops.doctor import Check, Limits, examine
from postroom.outbox.relay import Relay
from postroom.retry import RetryPolicy

URL = "memory://silent"


class Silent:
    """Says nothing, ever."""

    text = "no answer"

    def __init__(self) -> None:
        from postroom.brokers.base import Capabilities

        self.capabilities = Capabilities()

    async def send(self, batch: object, *, epoch: int = 0) -> list[Unknown]:
        return [Unknown("timeout", self.text)] * len(batch)  # type: ignore[arg-type]

    async def ping(self) -> None: ...
    async def close(self) -> None: ...


class Deaf(Silent):
    """Cannot be asked either."""

    asked = 0

    async def lookup(self, message: object) -> Unknown:
        self.asked += 1
        raise OSError("no route to host")


def accept(house: House, key: str, scope: str = "requests") -> Entry:
    with closing(house.connect(autocommit=False)) as tx:
        receipt = Ledger().accept(tx, {"n": 1}, key=key, scope=scope, type="t", topic="orders")
        tx.commit()
    return receipt.entry


async def give_up(house: House, broker: Silent | None = None) -> None:
    """Let a relay try once, and bury what gets no answer."""
    brokers = {URL: broker or Silent()}
    relay = Relay(house.url, URL, brokers=brokers, retry=RetryPolicy((1.0,), attempts=1))  # type: ignore[dict-item]
    await relay.drain_once()


async def ledger_check(house: House) -> Check:
    checks = await examine(house.url, RelaySettings(), Routes(), Limits(age_seconds=0))
    (found,) = [check for check in checks if check.name == "ledger"]
    return found


async def warned(house: House) -> Check:
    """What doctor says of the ledger, once a request is old enough."""

    async def warning() -> Check | None:
        found = await ledger_check(house)
        return found if found.level == "warning" else None

    return await eventually_async(warning)  # type: ignore[return-value]


def test_listed_and_shown(house: House, here: Here) -> None:
    database = ("--database", house.url, "--json")
    assert json.loads(here("ledger", "list", *database).stdout) == []
    first, second = accept(house, "k1"), accept(house, "k2")
    listed = json.loads(here("ledger", "list", *database).stdout)
    assert {one["id"] for one in listed} == {first.id, second.id}
    assert {one["state"] for one in listed} == {"accepted"}
    assert json.loads(here("ledger", "list", "--state", "failed", *database).stdout) == []
    for name in ("k1", first.id):
        shown = json.loads(here("ledger", "show", name, *database).stdout)
        assert (shown["key"], shown["request"], shown["finished"]) == ("k1", {"n": 1}, False)
    assert "accepted" in here("ledger", "list", "--database", house.url).stdout


async def test_what_an_exchange_says_does_nothing_to_a_terminal(house: House, here: Here) -> None:
    accept(house, "k1")
    broker = Silent()
    broker.text = "\x1b[2J\x9b31m no\nk2 succeeded"
    await give_up(house, broker)
    done = await asyncio.to_thread(here, "ledger", "show", "k1", "--database", house.url)
    assert all(line.isprintable() for line in done.stdout.split("\n")), done.stdout
    assert r"\x1b[2J\x9b31m no\nk2 succeeded" in done.stdout


def test_a_key_of_two_scopes_needs_to_be_told(house: House, here: Here) -> None:
    accept(house, "k", "ada")
    accept(house, "k", "bob")
    both = here("ledger", "show", "k", "--database", house.url)
    assert (both.returncode, "--scope" in both.stderr) == (1, True)
    one = here("ledger", "show", "k", "--scope", "bob", "--database", house.url, "--json")
    assert json.loads(one.stdout)["scope"] == "bob"


async def test_what_nobody_knows_is_resolved_by_a_person(house: House, here: Here) -> None:
    database = ("--database", house.url)
    id = accept(house, "k1").id
    say = ("ledger", "resolve", "k1", "--as", "succeeded", "--reason", "seen on the statement")
    early = await asyncio.to_thread(here, *say, *database)
    assert (early.returncode, "being tried still" in early.stderr) == (1, True)
    assert f"`postroom messages cancel {id} --reason …`" in early.stderr
    await give_up(house)
    shown = await asyncio.to_thread(here, "ledger", "show", "k1", *database, "--json")
    assert json.loads(shown.stdout)["state"] == "unknown"
    done = await asyncio.to_thread(here, *say, *database)
    assert (done.returncode, done.stdout) == (0, "request k1 is succeeded.\n")
    told = json.loads(
        (await asyncio.to_thread(here, "ledger", "show", id, *database, "--json")).stdout
    )
    assert (told["state"], told["note"]) == ("succeeded", "seen on the statement")
    assert (told["error_code"], told["error"]) == (None, None), "it has succeeded"
    assert house.sql("SELECT state FROM {p}dead_letter") == [("discarded",)]
    audit = house.sql("SELECT what, why FROM {p}audit")
    assert ("ledger.resolve", "seen on the statement") in [tuple(row) for row in audit]
    again = await asyncio.to_thread(here, *say, *database)
    assert (again.returncode, "succeeded already" in again.stderr) == (1, True)


async def test_what_is_resolved_as_failed_keeps_its_last_error(house: House, here: Here) -> None:
    database = ("--database", house.url)
    accept(house, "k1")
    await give_up(house)
    show = ("ledger", "show", "k1", *database, "--json")
    before = json.loads((await asyncio.to_thread(here, *show)).stdout)
    say = ("ledger", "resolve", "k1", "--as", "failed", "--reason", "it is not there")
    assert (await asyncio.to_thread(here, *say, *database)).returncode == 0
    after = json.loads((await asyncio.to_thread(here, *show)).stdout)
    assert after["state"] == "failed"
    assert before["error_code"] is not None
    assert (after["error_code"], after["error"]) == (before["error_code"], before["error"])


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("ledger", "show", "nothing"), 1, "has no request 'nothing'"),
        (("ledger", "list", "--state", "odd"), 2, "a request is accepted"),
        (("ledger", "resolve", "k", "--as", "odd", "--reason", "x"), 2, "succeeded or as failed"),
        (("ledger", "resolve", "k", "--as", "failed", "--reason", " "), 2, "say why"),
    ],
)
def test_refusals(
    house: House, here: Here, arguments: tuple[str, ...], code: int, said: str
) -> None:
    done = here(*arguments, "--database", house.url)
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr


def test_a_gateway_that_others_could_reach_needs_tokens(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = ("--database", "sqlite:///x.db", "--broker", "call:json:loads", "--host", "0.0.0.0")
    open_to_all = here("gateway", *at)
    assert (open_to_all.returncode, "POSTROOM_GATEWAY_TOKENS" in open_to_all.stderr) == (2, True)
    monkeypatch.setenv("POSTROOM_GATEWAY_TOKENS", "canary-s3cr3t")
    malformed = here("gateway", *at)
    assert (
        malformed.returncode,
        "word 1 of POSTROOM_GATEWAY_TOKENS must be" in malformed.stderr,
    ) == (2, True)
    assert "canary" not in malformed.stderr


@pytest.mark.parametrize("option", [("--http", "0"), ("--rebind",)])
def test_a_gateway_without_a_relay_has_no_options_of_one(
    here: Here, option: tuple[str, ...]
) -> None:
    done = here("gateway", "--database", "sqlite:///x.db", "--no-relay", *option)
    assert (done.returncode, f"{option[0]} is for the relay" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--simulate", "--database", "sqlite:///x.db"), "leave out --database."),
        (("--simulate", "--broker", "call:json:loads"), "leave out --broker."),
        (("--simulate", "--config", "x.toml"), "leave out --config."),
        (("--simulate", "--host", "127.0.0.1", "--port", "8080"), "leave out --host and --port."),
        (("--simulate", "--no-relay"), "leave out --no-relay."),
        (("--simulate", "--relay"), "leave out --relay."),
        (("--simulate", "--rebind", "--connections", "8"), "out --rebind and --connections."),
        (("--simulate", "--http", "0"), "leave out --http."),
        (("--simulate", "--log-format", "json", "-v"), "leave out --log-format and --verbose."),
        (("--orders", "300"), "--orders is for --simulate"),
        (("--manners", "lost=1"), "--manners is for --simulate"),
        (("--seed", "1"), "--seed is for --simulate"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_a_real_gateway_and_a_played_one_have_options_of_their_own(
    here: Here, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], said: str
) -> None:
    async def never(*args: object, **how: object) -> bool:
        raise AssertionError("it was started")

    monkeypatch.setattr("postroom.ops.gateway_show.play", never)
    monkeypatch.setattr("postroom.ops.cli_gateway._serve", never)
    done = here("gateway", *arguments)
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr
    if "--database" in arguments:
        before = here(*arguments[1:], "gateway", arguments[0])
        assert (before.returncode, said in before.stderr) == (2, True), before.stderr


def test_the_manners_of_an_exchange(here: Here) -> None:
    odd = here("gateway", "--simulate", "--manners", "moody=1")
    assert (odd.returncode, "'moody' is none of an exchange's manners" in odd.stderr) == (2, True)


def test_a_replay_leaves_requests_alone_unless_told(house: House, here: Here) -> None:
    """They were carried out: to send them again is another effect."""
    database = ("--database", house.url)
    accept(house, "k1")
    broker = memory.broker("replayed")
    relay = Relay(house.url, "memory://replayed", keep_delivered_seconds=3600)
    asyncio.run(relay.drain_once())
    assert len(broker.messages) == 1
    replay = ("messages", "replay", "--since", "1h")
    counted = here(*replay, "--dry-run", *database).stdout
    assert "1 requests of the ledger are left out" in counted
    assert "0 messages" in counted
    assert "No delivered messages match" in here(*replay, "--json", *database).stderr
    told = json.loads(here(*replay, "--requests", "--json", *database).stdout)
    assert (told["total"], told["queued"]) == (1, 1)
    memory._brokers.pop("replayed", None)


async def test_a_request_that_an_old_relay_settled_is_found_and_resolved(
    house: House, here: Here
) -> None:
    """It knew of no ledger, so the request has no end and no message."""
    accept(house, "k1")
    house.sql("DELETE FROM {p}outbox")
    assert "1 requests have no end" in (await warned(house)).text
    resolve = ("ledger", "resolve", "k1", "--as", "succeeded", "--reason", "it is in the book")
    done = await asyncio.to_thread(here, *resolve, "--json", "--database", house.url)
    assert json.loads(done.stdout)["state"] == "succeeded"
    assert (await ledger_check(house)).level == "ok"


async def test_a_request_that_is_asked_for_in_vain_is_told_of_and_ended_by_a_person(
    house: House, here: Here
) -> None:
    """A look-up that always fails spends no attempt, so it would go on for ever."""
    id = accept(house, "k1").id
    deaf = Deaf()
    how = {"brokers": {URL: deaf}, "retry": RetryPolicy((0.01,), attempts=2)}
    relay = Relay(house.url, URL, **how)  # type: ignore[arg-type]

    async def asked_often() -> bool:
        await relay.drain_once()
        return deaf.asked > 3

    await eventually_async(asked_often)
    assert "1 requests accepted more than" in (await warned(house)).text
    database = ("--database", house.url, "--json")
    shown = json.loads((await asyncio.to_thread(here, "ledger", "show", "k1", *database)).stdout)
    assert (shown["state"], shown["finished"]) == ("unknown", False)
    assert "look-up failed: no route to host" in shown["error"]
    cancel = ("messages", "cancel", id, "--reason", "asked by phone")
    assert (await asyncio.to_thread(here, *cancel, *database)).returncode == 0
    shown = json.loads((await asyncio.to_thread(here, "ledger", "show", "k1", *database)).stdout)
    # The client is shown the error, and the reason is between ourselves.
    assert (shown["error_code"], shown["error"]) == ("cancelled", "an operator took it back")
    assert shown["note"] == "asked by phone"
    resolve = ("ledger", "resolve", "k1", "--as", "succeeded", "--reason", "they have it")
    done = await asyncio.to_thread(here, *resolve, *database)
    assert done.returncode == 0, done.stderr
    assert (await ledger_check(house)).level == "ok"
