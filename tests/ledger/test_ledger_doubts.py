"""What may have arrived is asked for before it is sent again, whatever happened in between."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ledger_tools import (
    NOT_THERE,
    PATIENT,
    URL,
    Askable,
    Receiver,
    accept,
    accept_many,
    drain,
    entry,
    history,
    leave_behind,
    long_ago,
    relay,
    step,
    until_finished,
)
from relaying import Post, forbidden

from helpers_messages import make_message
from postroom.brokers.base import (
    BrokerOptions,
    Capabilities,
    Delivered,
    Outcome,
    Permanent,
    Transient,
    Unknown,
)
from postroom.brokers.call import CallBroker, LookUpCallBroker
from postroom.config import Routes
from postroom.errors import PostroomError
from postroom.messages import Message
from postroom.outbox.rules import UNSENT
from postroom.outbox.sending import Sender
from postroom.outbox.store import Store
from postroom.retry import RetryPolicy

BUSY = Transient("busy", "try later")
REFUSED = Permanent("duplicate_id", "there is one already")
SILENT = Unknown("timeout", "no answer")
OTHER = "memory://other"


class Away(Askable):
    """An exchange that cannot be reached until `back`; then it has what the dead relay sent."""

    def __init__(self) -> None:
        super().__init__(found=[Delivered("by the dead one")])
        self.back = False

    async def send(self, batch: Any, *, epoch: int = 0) -> list[Outcome]:
        if not self.back:
            return [Transient("unreachable", "refused", down="broker") for _ in batch]
        return await super().send(batch)

    async def lookup(self, message: Message) -> Outcome:
        if not self.back:
            self.asked.append(message.id)
            return Unknown("no_answer", "nobody there", down="broker")
        return await super().lookup(message)


async def test_an_answer_that_could_not_be_written_down_is_not_asked_for_again(post: Post) -> None:
    """The relay that has it lives: it needs neither a second send nor a look-up."""
    sent = accept(post).entry.id
    receiver = Askable(Delivered("done"), found=[NOT_THERE])
    worker = relay(post, receiver)
    async with forbidden(post, "archive"):
        for _ in range(2):
            with pytest.raises(PostroomError, match="not allowed"):
                await worker.drain_once()
    await worker.drain_once()
    assert (receiver.sent, receiver.asked) == ([sent], [])
    assert (entry(post).state, entry(post).answer) == ("succeeded", "done")


# ── The doubt goes along ───────────────────────────────────────────────────────────────────────


async def test_a_suspect_that_waits_for_its_exchange_is_asked_for(post: Post) -> None:
    """Another broker lives, so what is for this one is set aside without having been tried."""
    first = accept(post, "k1").entry.id
    leave_behind(post)
    accept_many(post, (f"other-{number}" for number in range(40)))
    exchange = Away()
    brokers = {URL: exchange, OTHER: Receiver()}
    worker = post.relay({"other": OTHER, "*": URL}, brokers=brokers)
    await drain(post, worker)
    assert entry(post).state == "unknown"
    exchange.back = True
    exchange.asked.clear()
    await until_finished(post, worker)
    assert (entry(post).state, entry(post).answer) == ("succeeded", "by the dead one")
    assert first in exchange.asked
    assert first not in exchange.sent


async def test_a_suspect_behind_a_suspect_is_asked_for(post: Post) -> None:
    ids = [accept(post, key, order_key="account").entry.id for key in ("a", "b", "c")]
    leave_behind(post)
    exchange = Away()
    worker = relay(post, exchange, retry=PATIENT)
    await step(post, worker)
    assert {entry(post, key).state for key in ("a", "b", "c")} == {"unknown"}
    exchange.back = True
    await step(post, worker, times=6)
    assert {entry(post, key).state for key in ("a", "b", "c")} == {"succeeded"}
    assert exchange.sent == []
    assert set(ids) <= set(exchange.asked)


async def test_nothing_passes_what_nobody_can_say_anything_of(post: Post) -> None:
    """Though its exchange takes what is of one key as one, in order."""
    for key in ("a", "b"):
        accept(post, key, order_key="account")
    leave_behind(post)
    accept(post, "c", order_key="account")
    away = Unknown("no_answer", "nobody there", down="broker")
    exchange = Askable(found=[away, Delivered("by the dead one"), Unknown("odd", "cannot tell")])
    exchange.capabilities = Capabilities(ordered_pipeline=True)
    await step(post, relay(post, exchange, retry=PATIENT), times=2)
    assert [entry(post, key).state for key in "abc"] == ["succeeded", "unknown", "accepted"]
    assert (len(exchange.asked), exchange.sent) == (3, [])


async def test_a_suspect_behind_a_key_that_is_held_is_asked_for(post: Post) -> None:
    accept(post, "a", order_key="account")
    exchange = Askable(BUSY, found=[Delivered("by the dead one")])
    worker = relay(post, exchange, retry=PATIENT)
    await step(post, worker)
    second = accept(post, "b", order_key="account").entry.id
    leave_behind(post)
    await worker.drain_once()
    assert entry(post, "b").state == "unknown"
    await step(post, worker, times=3)
    assert (entry(post, "b").state, exchange.asked) == ("succeeded", [second])
    assert second not in exchange.sent


async def test_a_look_up_that_finds_nobody_leaves_the_doubt(post: Post) -> None:
    accept(post)
    leave_behind(post)
    away = Unknown("no_answer", "nobody there", down="broker")
    exchange = Askable(found=[away, Delivered("by the dead one")])
    brokers = {URL: exchange, OTHER: Receiver()}
    worker = post.relay({"other": OTHER, "*": URL}, brokers=brokers, retry=PATIENT)
    await step(post, worker)
    assert (entry(post).state, entry(post).finished) == ("unknown", False)
    await step(post, worker)
    assert (entry(post).state, exchange.sent) == ("succeeded", [])


async def test_a_suspect_that_expired_is_unknown(post: Post) -> None:
    accept(post)
    leave_behind(post)
    post.sql(f"UPDATE {{p}}outbox SET expires_at = {long_ago(post)}")
    await drain(post, relay(post, Receiver()))
    assert (entry(post).state, entry(post).error_code) == ("unknown", "expired")


async def test_silence_of_a_whole_broker_is_a_doubt_too(post: Post) -> None:
    """No attempt is spent, and it is not forgotten that it was sent."""
    accept(post)
    receiver = Receiver(*[Unknown("timeout", "no answer", down="broker")] * 100)
    worker = relay(post, receiver)
    await drain(post, worker)
    assert (entry(post).state, entry(post).attempts) == ("unknown", 0)
    receiver.outcomes = [REFUSED]
    await until_finished(post, worker)
    assert (entry(post).state, entry(post).finished) == ("unknown", True)


async def test_what_was_sent_is_asked_for_though_the_relay_dies_after_a_reconnect(
    post: Post, tmp_path: Path
) -> None:
    """Sent, the database lost before the settle, connected again, killed."""
    id = accept(post).entry.id
    book = tmp_path / "book"
    script = Path(__file__).parent / "dying_relay.py"
    paths = [*sys.path, str(Path(__file__).parent), str(Path(__file__).parents[1] / "outbox")]
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, str(script), post.url, str(book)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        timeout=600,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    assert book.read_text().split() == [id]
    assert post.count("lane_batch") == 1
    post.sql(f"UPDATE {{p}}lane SET lease_until = {long_ago(post)} WHERE owner IS NOT NULL")
    exchange = Askable(found=[Delivered("by the dead one")])
    await drain(post, relay(post, exchange))
    assert (entry(post).state, exchange.sent) == ("succeeded", [])


async def test_what_was_sent_and_not_settled_outlives_a_reconnect(
    post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database is lost before the settle, twice, and then the process ends."""
    accept(post)
    first = Askable(found=[NOT_THERE])
    settle = Store.settle

    async def lose(self: Store, link: Any, changes: Any) -> Any:
        if any(change.delivered for change in changes):
            await link.close()
        return await settle(self, link, changes)

    monkeypatch.setattr(Store, "settle", lose)
    worker = relay(post, first)
    for _ in range(2):
        with pytest.raises(Exception, match="connection"):
            await worker.drain_once()
    monkeypatch.setattr(Store, "settle", settle)
    second = Askable(found=[Delivered("by the first")])
    post.sql(f"UPDATE {{p}}lane SET lease_until = {long_ago(post)} WHERE owner IS NOT NULL")
    await until_finished(post, relay(post, second))
    assert (entry(post).state, second.sent) == ("succeeded", [])


# ── The doubt stays ────────────────────────────────────────────────────────────────────────────


async def test_not_arrived_ends_the_doubt_for_no_later_try(post: Post) -> None:
    """Silent, not there, sent again and refused for now; then the first arrives."""
    accept(post)
    exchange = Askable(SILENT, BUSY, found=[NOT_THERE, NOT_THERE, Delivered("the first")])
    worker = relay(post, exchange, retry=PATIENT)
    await step(post, worker, times=2)
    assert (entry(post).state, history(post)[-1].get("doubt")) == ("unknown", True)
    await step(post, worker)
    assert (entry(post).state, entry(post).answer) == ("succeeded", "the first")
    assert (len(exchange.sent), len(exchange.asked)) == (2, 3)


@pytest.mark.parametrize(
    ("last", "state"),
    [
        (Delivered("late"), "succeeded"),
        (Permanent("no_such_symbol", "refused"), "failed"),
        (NOT_THERE, "failed"),
        (Unknown("still_unknown", "cannot tell"), "unknown"),
        (OSError("nobody there"), "unknown"),
    ],
    ids=["yes", "no", "not there", "nobody knows", "nobody answers"],
)
async def test_what_is_in_doubt_is_asked_for_before_it_is_given_up(
    post: Post, last: Any, state: str
) -> None:
    """The first try was silent, the others were refused for now."""
    accept(post)
    exchange = Askable(SILENT, BUSY, BUSY, found=[NOT_THERE, NOT_THERE, NOT_THERE, last])
    await drain(post, relay(post, exchange), times=3)
    assert (entry(post).state, entry(post).finished) == (state, True)
    assert (len(exchange.sent), len(exchange.asked)) == (3, 4)


@pytest.mark.parametrize(
    ("last", "state", "finished"),
    [
        (Delivered("the first"), "succeeded", True),
        (Permanent("no_such_symbol", "refused"), "failed", True),
        (NOT_THERE, "failed", True),
        (OSError("nobody there"), "unknown", False),
    ],
    ids=["yes", "no", "not there", "nobody answers"],
)
async def test_a_refusal_in_doubt_is_asked_for_before_it_is_believed(
    post: Post, last: Any, state: str, finished: bool
) -> None:
    """It may be refused because the first try has just arrived."""
    accept(post)
    exchange = Askable(SILENT, REFUSED, found=[NOT_THERE, NOT_THERE, last])
    await step(post, relay(post, exchange, retry=PATIENT), times=2)
    assert (entry(post).state, entry(post).finished) == (state, finished)
    assert (len(exchange.sent), len(exchange.asked)) == (2, 3)


async def test_a_last_try_without_an_answer_is_unknown_though_it_is_not_there_yet(
    post: Post,
) -> None:
    accept(post)
    exchange = Askable(SILENT, SILENT, SILENT, found=[NOT_THERE])
    await drain(post, relay(post, exchange), times=3)
    assert (entry(post).state, entry(post).finished) == ("unknown", True)


@pytest.mark.parametrize(
    "answer",
    [
        Transient("unreachable", "refused", down="broker"),
        Transient("busy", "ask later"),
        Transient("not_arrived", "so says a proxy", down="broker"),
    ],
    ids=["unreachable", "busy", "down"],
)
async def test_only_not_arrived_means_so(post: Post, answer: Outcome) -> None:
    accept(post)
    exchange = Askable(SILENT, found=[answer])
    await drain(post, relay(post, exchange), times=3)
    assert (entry(post).state, len(exchange.sent)) == ("unknown", 1)


async def test_an_outage_of_the_look_up_spends_no_attempt(post: Post) -> None:
    accept(post)
    exchange = Askable(SILENT, found=[*[OSError("no route to host")] * 8, Delivered("there")])
    worker = relay(post, exchange, retry=PATIENT)
    await step(post, worker, times=6)
    done = entry(post)
    assert (done.state, done.finished, done.attempts) == ("unknown", False, 1)
    assert post.count("dead_letter") == 0
    await step(post, worker, times=3)
    assert (entry(post).state, len(exchange.sent)) == ("succeeded", 1)


async def test_the_lease_is_looked_at_again_after_asking() -> None:
    """A look-up takes its time, and another relay may own the lane by then."""
    answers = [True, False]

    async def may_send() -> bool:
        return answers.pop(0)

    exchange = Askable(found=[NOT_THERE])
    sender = Sender(
        Routes((), URL),
        {URL: exchange},
        retry=RetryPolicy((1,)),
        options=BrokerOptions(send_timeout_seconds=1),
    )
    verdicts = await sender.send([make_message()], epoch=1, may_send=may_send, suspect=True)
    assert (verdicts, len(exchange.asked), exchange.sent) == ([UNSENT], 1, [])


# ── What a call says ───────────────────────────────────────────────────────────────────────────


class ReadTimeout(Exception):
    """As libraries have their own, which is no TimeoutError."""


@pytest.mark.parametrize("wrong", [{"status": "booked"}, False, 200, ReadTimeout("no answer")])
async def test_a_call_that_ran_and_said_nothing_is_looked_up(post: Post, wrong: Any) -> None:
    accept(post)
    book: list[str] = []

    async def send(message: Message) -> Any:
        book.append(message.id)
        if isinstance(wrong, Exception):
            raise wrong
        return wrong

    broker = LookUpCallBroker(send, lambda message: message.id in book)
    await drain(post, relay(post, broker), times=2)  # type: ignore[arg-type]
    assert (entry(post).state, len(book)) == ("succeeded", 1)


@pytest.mark.parametrize("wrong", [{"status": "booked"}, ReadTimeout("no answer")])
async def test_without_a_look_up_it_is_unknown_and_never_failed(post: Post, wrong: Any) -> None:
    accept(post)

    async def send(message: Message) -> Any:
        if isinstance(wrong, Exception):
            raise wrong
        return wrong

    await drain(post, relay(post, CallBroker(send)), times=3)  # type: ignore[arg-type]
    assert (entry(post).state, entry(post).finished) == ("unknown", True)
