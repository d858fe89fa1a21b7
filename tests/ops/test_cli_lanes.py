"""`postroom lanes`, `keys-held` and `messages cancel`: mending by hand beside a relay at work."""

import asyncio
import datetime as dt
import json
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
import receivers
from commands import Here
from counter import arrived, audited, draft, publish, refused, said

from helpers import eventually
from postroom import Draft, failpoints
from postroom.messages import LANES, lane_of
from postroom.outbox.relay import Relay
from postroom.retry import RetryPolicy

QUICK: dict[str, Any] = {
    "lease_seconds": 6,
    "send_timeout_seconds": 1,
    "poll_max_seconds": 0.05,
}
MOMENT = dt.datetime(2031, 1, 1, tzinfo=dt.UTC)
LANE = str(lane_of("notes", "k", ""))


@pytest.fixture(autouse=True)
def _forget() -> None:
    receivers.received.clear()
    failpoints.clear()


@contextmanager
def relaying(url: str, broker: str = "call:receivers:take", **how: Any) -> Iterator[Relay]:
    """A relay at work in a thread of its own, until the block ends."""
    begun, made, failed = threading.Event(), [], []

    def work() -> None:
        async def run() -> None:
            relay = Relay(url, broker, rebind=True, **(QUICK | how))
            made.append((asyncio.get_running_loop(), relay))
            async with relay:
                begun.set()
                await relay.stopping.wait()

        try:
            asyncio.run(run())
        except BaseException as error:
            failed.append(error)
            begun.set()

    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(30)
    assert not failed, failed
    try:
        yield made[0][1]
    finally:
        loop, relay = made[0]
        loop.call_soon_threadsafe(relay.stop)
        thread.join(60)
    assert not failed, failed


def test_lanes_are_paused_and_go_on(here: Here, database_url: str) -> None:
    url = ("--database", database_url)
    publish(database_url)
    with relaying(database_url):
        eventually(lambda: all(lane["owner"] for lane in said(here, "lanes", "list", *url)))
        told = said(here, "lanes", "pause", LANE, "--reason", "broker moves", *url)
        assert told == {"lane": int(LANE), "paused": True, "changed": True, "sending": False}
        publish(database_url, draft("one"), draft("two", key="another"))
        eventually(lambda: arrived() == ["two"])
        lanes = said(here, "lanes", "list", *url)
        (paused,) = [lane for lane in lanes if lane["paused"]]
        assert (paused["lane"], paused["pending"]) == (int(LANE), 1)
        assert paused["owner"] is None, "it was taken from the relay, lest that send what it read"
        assert paused["oldest_seconds"] > 0
        shown = here("lanes", "list", *url)
        assert "paused" in shown.stdout
        assert not said(here, "lanes", "pause", LANE, *url)["changed"]
        assert said(here, "lanes", "resume", LANE, *url)["changed"]
        eventually(lambda: arrived() == ["two", "one"])
        assert not said(here, "lanes", "resume", LANE, *url)["changed"]
    what = [(row[1], row[2], row[3]) for row in audited(database_url)]
    assert what == [
        ("lanes.pause", f"lane {LANE}", "broker moves"),
        ("lanes.resume", f"lane {LANE}", None),
    ]


def test_a_lane_is_taken_from_a_relay_that_hangs(here: Here, database_url: str) -> None:
    url = ("--database", database_url)
    publish(database_url)
    with relaying(database_url):
        eventually(lambda: all(lane["owner"] for lane in said(here, "lanes", "list", *url)))
        before = said(here, "lanes", "list", *url)
        answers = here("lanes", "release", "--all", "--json", *url).stdout.splitlines()
        told = [json.loads(line) for line in answers]
        assert told == [{"lane": lane, "released": True} for lane in range(LANES)]
        publish(database_url, draft("one"))
        eventually(lambda: arrived() == ["one"])
        eventually(lambda: all(lane["owner"] for lane in said(here, "lanes", "list", *url)))
        after = said(here, "lanes", "list", *url)
        assert all(b["epoch"] >= a["epoch"] + 2 for a, b in zip(before, after, strict=True))
    assert said(here, "lanes", "release", LANE, *url) == {"lane": int(LANE), "released": False}


def test_keys_are_skipped_and_released(here: Here, database_url: str) -> None:
    url = ("--database", database_url)
    poison, _ = publish(database_url, draft("poison"), draft("behind"))
    said(here, "relay", "--once", *url, "--broker", "call:receivers:refuse_poison")
    (held,) = said(here, "keys-held", "list", *url)
    assert (held["topic"], held["key"], held["id"]) == ("notes", "k", poison)
    assert (held["dead"], held["messages"], held["error_code"]) == (True, 2, "unreadable")
    shown = here("keys-held", "list", *url)
    assert "by hand" in shown.stdout
    done = said(here, "keys-held", "skip", "notes", "k", "--reason", "garbage", *url)
    assert done == {"id": poison, "state": "discarded", "may_have_arrived": True}
    relay = ("relay", "--once", *url, "--broker", "call:receivers:take", "--rebind")
    assert said(here, *relay)["delivered"] == 1
    assert arrived() == ["behind"]
    (letter,) = said(here, "dead", "list", "--state", "discarded", *url)
    assert letter["id"] == poison
    assert said(here, "keys-held", "list", *url) == []
    assert "No key is held." in here("keys-held", "list", *url).stdout
    (skipped, rebound) = [row[1:] for row in audited(database_url)]
    assert skipped == ("keys-held.skip", f"notes k {poison}", "garbage")
    assert rebound[0] == "relay.rebind"


def test_a_back_off_is_ended_or_given_up(here: Here, database_url: str) -> None:
    url = ("--database", database_url)
    first, _, third = publish(database_url, draft("a"), draft("b"), draft("c"))
    slow = {"retry": RetryPolicy((3600.0,), attempts=9)}
    with relaying(database_url, "call:receivers:busy", **slow):
        eventually(lambda: len(said(here, "keys-held", "list", *url)) == 1)
    (held,) = said(here, "keys-held", "list", *url)
    assert (held["dead"], held["messages"], held["attempts"]) == (False, 3, 1)
    assert 3500 < held["retry_in_seconds"] <= 3600
    done = said(here, "keys-held", "skip", "notes", "k", "--reason", "too old", *url)
    assert done["id"] == first
    state = said(here, "messages", "show", first, *url)
    assert (state["state"], state["attempts"]) == ("aborted", 1)
    said(here, "messages", "cancel", third, "--reason", "not wanted", *url)
    assert said(here, "keys-held", "release", "notes", "k", *url)["state"] == "queued"
    with relaying(database_url):
        eventually(lambda: arrived() == ["b"])
    assert said(here, "status", *url)["held"] == 0


def test_a_released_dead_letter_is_retried_in_its_place(here: Here, database_url: str) -> None:
    url = ("--database", database_url)
    poison, _ = publish(database_url, draft("poison"), draft("behind"))
    said(here, "relay", "--once", *url, "--broker", "call:receivers:refuse_poison")
    assert said(here, "keys-held", "release", "notes", "k", *url)["id"] == poison
    with relaying(database_url):
        eventually(lambda: arrived() == ["poison", "behind"])
    (letter,) = said(here, "dead", "list", "--state", "resolved", *url)
    assert letter["id"] == poison


@pytest.mark.parametrize("place", ["outbox", "delayed"])
def test_a_waiting_message_is_taken_back(here: Here, database_url: str, place: str) -> None:
    url = ("--database", database_url)
    later = {"deliver_at": MOMENT} if place == "delayed" else {}
    one = Draft(payload={"is": "one"}, type="note.v1", topic="notes", key="k", **later)
    id, other = publish(database_url, one, draft("two"))
    done = said(here, "messages", "cancel", id, "--reason", "typo", *url)
    assert done == {"id": id, "state": "discarded", "may_have_arrived": False}
    with relaying(database_url):
        eventually(lambda: arrived() == ["two"])
    kept = said(here, "dead", "show", id, *url)
    assert (kept["payload"], kept["note"]) == ({"is": "one"}, "typo")
    assert (kept["state"], kept["error_code"]) == ("discarded", "cancelled")
    assert said(here, "messages", "show", id, *url)["state"] == "aborted"
    for wrong, sentence in (
        (id, "is discarded, so it cannot be taken back"),
        (other, "is delivered, so it cannot be taken back"),
        ("00000000-0000-4000-8000-000000000000", "there is no message"),
    ):
        assert sentence in refused(here, 1, "messages", "cancel", wrong, "--reason", "x", *url)
    assert [row[1:] for row in audited(database_url)] == [("messages.cancel", id, "typo")]


def test_what_was_taken_back_is_never_sent_by_a_relay_that_had_read_it(
    here: Here, database_url: str
) -> None:
    """The relay has read the whole lane and waits at its first message; the last is taken back."""
    url = ("--database", database_url)
    ids = publish(database_url, *(draft(f"{n}") for n in range(40)))
    receivers.gate.clear()
    with relaying(
        database_url,
        "call:receivers:gated",
        concurrency=1,
        lease_seconds=30,
        send_timeout_seconds=15,
    ):
        eventually(lambda: len(receivers.received) == 1)
        sentence = refused(here, 1, "messages", "cancel", ids[-1], "--reason", "x", *url)
        assert "is being sent right now" in sentence
        receivers.gate.set()
        eventually(lambda: len(receivers.received) == 40)
    assert arrived() == [f"{n}" for n in range(40)]


def writable(url: str) -> bool:
    """Whether nobody is inside a writing transaction; only SQLite makes others wait for it."""
    if not url.startswith("sqlite"):
        return True
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"), timeout=0)) as connection:
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return False
        connection.rollback()
    return True


@contextmanager
def stopped_after_its_read(url: str) -> Iterator[tuple[str, str, str, threading.Event]]:
    """A relay that stands still between its read and the journal, having read two messages: the id
    and content of the first, the content of the second, and what lets the relay go on."""
    point = "sql.journal_write.before" if url.startswith("postgresql") else "sql.read_lane.after"
    has_read, go_on = threading.Event(), threading.Event()

    def stop() -> None:
        if has_read.is_set():
            return
        time.sleep(0.2)  # what the relay has begun already gets where it will stand
        if writable(url):
            has_read.set()
            go_on.wait(20)

    publish(url)
    with relaying(url, lease_seconds=30):
        failpoints.arm(point, stop)
        # Where the relay was inside a transaction of its own, the next messages will do.
        for number in range(20):
            first, second = f"first {number}", f"second {number}"
            id, _ = publish(url, draft(first), draft(second))
            if has_read.wait(2):
                break
        yield id, first, second, go_on
        go_on.set()


def test_a_relay_that_has_read_it_finds_its_fence_gone(here: Here, database_url: str) -> None:
    with stopped_after_its_read(database_url) as (id, unwanted, wanted, go_on):
        done = said(here, "messages", "cancel", id, "--reason", "x", "--database", database_url)
        assert not done["may_have_arrived"]
        go_on.set()
        eventually(lambda: wanted in arrived())
    assert unwanted not in arrived()


def test_a_paused_lane_sends_nothing_of_what_was_read_before(here: Here, database_url: str) -> None:
    url = ("--database", database_url)
    with stopped_after_its_read(database_url) as (_, first, second, go_on):
        told = said(here, "lanes", "pause", LANE, *url)
        assert not told["sending"]
        before = arrived()
        go_on.set()
        # Its fence is gone: it says so, and the lane stays without an owner.
        publish(database_url, draft("elsewhere", key="another"))
        eventually(lambda: "elsewhere" in arrived())
        assert [what for what in arrived() if what != "elsewhere"] == before
        said(here, "lanes", "resume", LANE, *url)
        eventually(lambda: {first, second} <= set(arrived()))


def test_messages_taken_back_under_load_do_not_arrive(here: Here, database_url: str) -> None:
    """Half of what waits is taken back while a relay works: what was said to be taken back and
    not yet tried never arrives, everything else does, in order."""
    url = ("--database", database_url)
    ids = publish(database_url, *(draft(f"{n}") for n in range(120)))
    by_id = {id: f"{n}" for n, id in enumerate(ids)}
    taken: set[str] = set()
    with relaying(database_url, "call:receivers:slow", batch_rows=10, concurrency=1):
        for id in reversed(ids[60:]):
            done = here("messages", "cancel", id, "--reason", "x", "--json", *url)
            if done.returncode == 0 and not json.loads(done.stdout)["may_have_arrived"]:
                taken.add(by_id[id])
            if len(taken) >= 12:
                break
        eventually(lambda: set(arrived()) | taken >= set(by_id.values()), timeout=60)
    assert len(taken) >= 12
    assert not taken & set(arrived())
    first = list(dict.fromkeys(arrived()))
    assert first == sorted(first, key=int)


WRONG = [
    (2, ("lanes", "pause"), "by their numbers, or --all"),
    (2, ("lanes", "pause", "3", "--all"), "by their numbers, or --all"),
    (2, ("lanes", "resume", "16"), "there is no lane 16: they are 0 to 15"),
    (2, ("lanes", "release", "x"), "LANE"),
    (2, ("keys-held", "skip", "notes", "k"), "--reason"),
    (2, ("keys-held", "skip", "notes", "k", "--reason", " "), "say why"),
    (1, ("keys-held", "skip", "notes", "none", "--reason", "x"), "nothing of key 'none'"),
    (1, ("keys-held", "release", "notes", "none"), "nothing of key 'none'"),
    (2, ("messages", "cancel", "7", "--reason", "x"), "an id is a UUID"),
    (2, ("keys-held", "list", "--limit", "0"), "--limit"),
]


@pytest.mark.parametrize(("code", "arguments", "sentence"), WRONG, ids=lambda w: str(w)[:60])
def test_wrong_input(
    here: Here, database_url: str, code: int, arguments: tuple[str, ...], sentence: str
) -> None:
    publish(database_url)
    assert sentence in refused(here, code, *arguments, "--database", database_url)
    assert audited(database_url) == []
