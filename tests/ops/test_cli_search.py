"""`messages list` and `messages find`: what waits, and what was, wherever it is."""

import asyncio
import datetime as dt
from typing import Any

import pytest
import receivers
from commands import Here
from counter import publish, refused, said

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
    """A message of every state, by its state."""
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
        "pending": pending,
        "held": held,
        "delayed": delayed,
        "delivered": delivered,
        "dead": dead,
        "discarded": cancelled,
    }


def found(here: Here, *arguments: str) -> set[tuple[str, str]]:
    return {(message["state"], message["id"]) for message in said(here, "messages", *arguments)}


def test_list_shows_what_waits(here: Here, database_url: str, everywhere: dict[str, str]) -> None:
    url = ("--database", database_url)
    waiting = {(s, everywhere[s]) for s in ("pending", "held", "delayed")}
    assert found(here, "list", *url) == waiting
    for state, id in everywhere.items():
        assert found(here, "list", "--state", state, *url) == {(state, id)}
    both = ("--state", "dead", "--state", "delivered")
    assert {state for state, _ in found(here, "list", *both, *url)} == {"dead", "delivered"}
    assert found(here, "list", "--topic", "notes", "--key", "c", *url) == {
        ("pending", everywhere["pending"])
    }
    assert found(here, "list", "--topic", "other", *url) == set()
    assert len(said(here, "messages", "list", "--limit", "1", *url)) == 1
    shown = here("messages", "list", *url)
    assert all(everywhere[state] in shown.stdout for state in ("pending", "held", "delayed"))
    assert "Nothing found." in here("messages", "list", "--topic", "other", *url).stdout


@pytest.mark.parametrize(
    ("wanted", "states"),
    [
        (("--type", "poison.v1"), {"dead"}),
        (("--key", "b"), {"dead", "held"}),
        (("--aggregate-id", "17"), {"delivered"}),
        (("--aggregate-type", "order"), {"delivered"}),
        (("--error-code", "unreadable"), {"dead"}),
        (("Grüße",), {"pending", "held", "delayed", "delivered", "dead", "discarded"}),
        (('"is":"held"',), {"held"}),
        (("--since", "1h"), {"pending", "held", "delayed", "delivered", "dead", "discarded"}),
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
