"""`messages list` and `messages find`: what waits, and what was, wherever it is."""

import asyncio
import datetime as dt
import json
from pathlib import Path
from typing import Any

import pytest
import receivers
from commands import Here
from counter import publish, refused, said
from house_tools import House

from helpers import eventually
from postroom import Draft
from postroom.ops.search import Wanted, search

LATER = dt.datetime(2031, 1, 1, tzinfo=dt.UTC)


@pytest.fixture(autouse=True)
def _forget() -> None:
    receivers.received.clear()


def one(what: str, key: str | None, **more: Any) -> Draft:
    how = {"type": f"{what}.v1", "topic": "notes", "key": key} | more
    return Draft(payload={"is": what, "und": "Grüße"}, **how)


@pytest.fixture
def everywhere(here: Here, database_url: str) -> dict[str, str]:
    """A message in every place, by the word for it."""
    url = ("--database", database_url)
    delivered, dead, held = publish(
        database_url,
        one("delivered", "a", aggregate_type="order", aggregate_id="17"),
        one("poison", "b"),
        one("held", "b"),
    )
    said(here, "relay", "--once", *url, "--broker", "call:receivers:refuse_poison")
    pending, delayed, cancelled = publish(
        database_url,
        one("pending", "c"),
        one("delayed", "d", deliver_at=LATER),
        one("cancelled", None),
    )
    said(here, "messages", "cancel", cancelled, "--reason", "typo", *url)
    return {
        "outbox": pending,
        "held": held,
        "delayed": delayed,
        "archive": delivered,
        "dead": dead,
        "discarded": cancelled,
    }


def found(here: Here, *arguments: str) -> set[tuple[str, str]]:
    return {(message["place"], message["id"]) for message in said(here, "messages", *arguments)}


def test_list_shows_what_waits(here: Here, database_url: str, everywhere: dict[str, str]) -> None:
    url = ("--database", database_url)
    waiting = {(place, everywhere[place]) for place in ("outbox", "held", "delayed")}
    assert found(here, "list", *url) == waiting
    for place, id in everywhere.items():
        word = {"archive": "delivered"}.get(place, place)
        if word != "outbox":  # the old words still mean what they meant
            assert found(here, "list", "--state", word, *url) == {(place, id)}
    both = ("--state", "dead", "--state", "delivered")
    assert {place for place, _ in found(here, "list", *both, *url)} == {"dead", "archive"}
    assert found(here, "list", "--topic", "notes", "--key", "c", *url) == {
        ("outbox", everywhere["outbox"])
    }
    assert found(here, "list", "--topic", "other", *url) == set()
    assert len(said(here, "messages", "list", "--limit", "1", *url)) == 1
    shown = here("messages", "list", *url)
    assert all(everywhere[state] in shown.stdout for state in ("outbox", "held", "delayed"))
    assert "Nothing found." in here("messages", "list", "--topic", "other", *url).stdout


def test_the_five_states(here: Here, database_url: str, everywhere: dict[str, str]) -> None:
    """`list` and `show` use the same words: pending, sending, succeeded, failed and aborted."""
    url, house = ("--database", database_url), House(database_url)
    (failed,) = publish(database_url, one("late", "f", deliver_at=None))
    house.sql(
        "INSERT INTO {p}held (lane, position, id, topic, {key}, type, content_type, payload, size,"
        " attempts, created_at, next_attempt_at) SELECT lane, position, id, topic, {key}, type,"
        " content_type, payload, size, 2, created_at, created_at FROM {p}outbox WHERE id = %s",
        failed,
    )
    house.sql("DELETE FROM {p}outbox WHERE id = %s", failed)
    (sent,) = publish(database_url, one("sent", "g"))
    ((lane, position),) = house.sql("SELECT lane, position FROM {p}outbox WHERE id = %s", sent)
    house.sql("UPDATE {p}lane SET owner = 'w' WHERE lane = %s", lane)
    house.sql(
        "INSERT INTO {p}lane_batch (lane, incarnation, batch, lo, hi, messages, alone)"
        " VALUES (%s, 'w', 1, %s, %s, 1, false)",
        *(lane, position, position),
    )
    house.close()
    expected = {
        "pending": {everywhere["outbox"], everywhere["held"], everywhere["delayed"]},
        "sending": {sent},
        "succeeded": {everywhere["archive"]},
        "failed": {failed},
        "aborted": {everywhere["dead"], everywhere["discarded"]},
    }
    for state, ids in expected.items():
        listed = said(here, "messages", "list", "--state", state, *url)
        assert {message["id"] for message in listed} == ids, state
        assert {message["state"] for message in listed} == {state}
        for id in ids:
            assert said(here, "messages", "show", id, *url)["state"] == state
    waiting = expected["pending"] | expected["sending"] | expected["failed"]
    assert {message["id"] for message in said(here, "messages", "list", *url)} == waiting


@pytest.mark.parametrize(
    ("wanted", "states"),
    [
        (("--type", "poison.v1"), {"dead"}),
        (("--key", "b"), {"dead", "held"}),
        (("--aggregate-id", "17"), {"archive"}),
        (("--aggregate-type", "order"), {"archive"}),
        (("--error-code", "unreadable"), {"dead"}),
        (("Grüße",), {"outbox", "held", "delayed", "archive", "dead", "discarded"}),
        (('"is":"held"',), {"held"}),
        (("--since", "1h"), {"outbox", "held", "delayed", "archive", "dead", "discarded"}),
        (("--until", "1h"), set()),
        (("--since", "2031-01-01"), set()),
        (("Grüße", "--state", "delayed"), {"delayed"}),
    ],
    ids=lambda given: " ".join(sorted(given) if isinstance(given, set) else given) or "nothing",
)
def test_find_looks_everywhere(
    here: Here,
    database_url: str,
    everywhere: dict[str, str],
    wanted: tuple[str, ...],
    states: set[str],
) -> None:
    expected = {(state, everywhere[state]) for state in states}
    assert found(here, "find", *wanted, "--database", database_url) == expected


def test_a_page_is_bounded_and_nothing_between_pages_is_missed(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("postroom.ops.search.PAGE_ROWS", 7)
    ids = publish(database_url, *(one("x", f"k{n}") for n in range(100)))
    every = asyncio.run(search(database_url, Wanted(), limit=1000))
    assert {message["id"] for message in every.messages} == set(ids)
    assert (every.looked_at, every.complete) == (100, True)
    some = asyncio.run(search(database_url, Wanted(type="nothing.v1"), scan=21))
    assert some.messages == []
    assert not some.complete
    assert some.looked_at < 40


def test_what_was_not_looked_at_is_said(here: Here, database_url: str) -> None:
    publish(database_url, *(one("x", None) for _ in range(50)))
    done = here("messages", "find", "--type", "y", "--scan", "20", "--database", database_url)
    assert done.returncode == 0
    assert "not everything; see --limit and --scan" in done.stderr


def test_markup_and_control_characters_of_others_do_no_harm(here: Here, database_url: str) -> None:
    publish(database_url, one("x", "[bold red]k[/]"), one("x", "é\u202e"))
    shown = here("messages", "list", "--database", database_url).stdout
    assert "[bold red]k[/]" in shown
    plain = said(here, "messages", "list", "--database", database_url)
    assert {message["key"] for message in plain} == {"[bold red]k[/]", "é\u202e"}


@pytest.mark.parametrize(
    ("code", "arguments", "sentence"),
    [
        (2, ("find",), "say what to look for"),
        (2, ("find", "--since", "soon"), "--since must be a time such as"),
        (2, ("list", "--state", "lost"), "lost"),
        (2, ("list", "--limit", "0"), "--limit"),
        (2, ("list", "--scan", "x"), "--scan"),
    ],
    ids=str,
)
def test_wrong_input_of_search(
    here: Here, database_url: str, code: int, arguments: tuple[str, ...], sentence: str
) -> None:
    publish(database_url)
    assert sentence in refused(here, code, "messages", *arguments, "--database", database_url)


def test_expired_messages_are_listed_with_their_time(here: Here, database_url: str) -> None:
    url = ("--database", database_url)
    past = dt.datetime.now(dt.UTC) - dt.timedelta(minutes=1)
    late, _ = publish(database_url, one("late", "a", expires_at=past), one("good", "a"))
    said(here, "relay", "--once", *url, "--broker", "call:receivers:refuse_poison")
    (listed,) = said(here, "messages", "list", "--state", "expired", *url)
    assert (listed["id"], listed["place"], listed["error_code"]) == (late, "expired", "expired")
    assert listed["state"] == said(here, "messages", "show", late, *url)["state"] == "aborted"
    assert dt.datetime.fromisoformat(listed["at"]) > past
    assert said(here, "messages", "list", "--state", "resolved", *url) == []


def test_a_drain_tells_what_waits_and_for_what(here: Here, database_url: str) -> None:
    url = ("--database", database_url)
    publish(database_url, one("note", "a"), one("note", "a"), one("mail", "b", topic="mails"))
    once = ("relay", "--once", *url, "--config", "routes.toml")
    Path("routes.toml").write_text('[relay.routes]\nmails = "call:receivers:refuse_poison"\n')
    done = here(*once)
    assert done.returncode == 1
    assert done.stdout == (
        "1 delivered, 0 held for another try, 0 dead; 2 wait: topic notes is down.\n"
    )
    # A drain reads a waiting message again only after a moment, so not every drain counts it.
    document = eventually(
        lambda: (found := json.loads(here(*once, "--json").stdout))["waiting"] and found
    )
    assert (document["delivered"], document["waiting"]) == (0, 2)
    assert document["waits_for"] == ["topic notes"]
