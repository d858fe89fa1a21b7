"""The ledger: entered with its message, finished with the settle of it, and honest in between."""

import asyncio
import json
from contextlib import closing
from typing import Any

import pytest
from ledger_tools import (
    LEDGER,
    NOT_THERE,
    PATIENT,
    Askable,
    Receiver,
    accept,
    accept_many,
    drain,
    entry,
    find,
    history,
    leave_behind,
    long_ago,
    relay,
    step,
)
from relaying import Post, note
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from helpers import eventually_async
from postroom.brokers.base import DELIVERED, Delivered, Permanent, Transient, Unknown
from postroom.databases.caller import carry_out
from postroom.dead_letters import store as letters
from postroom.errors import InvalidMessage, WouldCommitAlone
from postroom.ops import repairs
from postroom.ops.desk import desk
from postroom.outbox.requests import Request
from postroom.outbox.requests import accept as request_accept
from postroom.outbox.store import Store

BUSY = Transient("busy", "try later")
REFUSED = Permanent("no_such_symbol", "we do not know it")
SILENT = Unknown("timeout", "no answer")


# ── Accepting ──────────────────────────────────────────────────────────────────────────────────


def test_a_request_and_its_message_are_one_commit(post: Post) -> None:
    accept(post, commit=False)
    assert (post.count("ledger"), post.count("outbox")) == (0, 0)
    receipt = accept(post)
    assert (receipt.new, receipt.conflict) == (True, False)
    assert (post.count("ledger"), post.count("outbox")) == (1, 1)
    ((id, headers),) = post.sql("SELECT id, headers FROM {p}outbox")
    assert str(id) == receipt.entry.id == entry(post).id
    assert json.loads(headers) == {"postroom-ledger": "k1"}


def test_a_key_is_accepted_once(post: Post) -> None:
    first = accept(post, document={"a": 1, "b": 100})
    same = accept(post, document={"b": 100.0, "a": 1})
    other = accept(post, document={"a": 2})
    assert (same.new, same.conflict, same.entry.id) == (False, False, first.entry.id)
    assert (other.new, other.conflict, other.entry.id) == (False, True, first.entry.id)
    assert json.loads(other.entry.request) == {"a": 1, "b": 100}
    assert (post.count("ledger"), post.count("outbox")) == (1, 1)
    assert find(post, "k2") is None


def test_the_same_request_carried_out_again_finds_itself(post: Post) -> None:
    """The answer to its commit was lost, and it is tried again on another connection."""
    request = Request.of({"n": 1}, key="k1", scope="requests", type="t", topic="orders")
    for _ in range(2):
        with closing(post.connect()) as tx:
            receipt = carry_out(tx, request_accept(request), what="request", instead="")
            tx.commit()
        assert (receipt.new, receipt.conflict, receipt.entry.id) == (True, False, request.wish.id)
    assert (post.count("ledger"), post.count("outbox")) == (1, 1)


def test_an_old_snapshot_does_not_hide_what_was_accepted_meanwhile(post: Post) -> None:
    """MariaDB looks beyond the snapshot; the others end a transaction that cannot."""
    begin = {
        "postgresql": "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ",
        "mariadb": "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ",
        "sqlite": "BEGIN",
    }[post.dialect]
    table = "postroom.ledger" if post.dialect == "postgresql" else "postroom_ledger"
    wish: dict[str, Any] = {"key": "k1", "type": "order.place", "topic": "orders"}
    with closing(post.connect()) as tx, closing(tx.cursor()) as cursor:
        if post.dialect == "mariadb":
            cursor.execute("ROLLBACK")
        cursor.execute(begin)
        cursor.execute(f"SELECT count(*) FROM {table}")
        assert cursor.fetchall()[0][0] == 0
        first = accept(post)
        if post.dialect == "mariadb":
            again = LEDGER.accept(tx, {"n": 1}, **wish)
            assert (again.new, again.entry.id) == (False, first.entry.id)
        else:
            with pytest.raises(Exception, match=r"serialize|locked"):
                LEDGER.accept(tx, {"n": 1}, **wish)
        tx.rollback()
    assert (post.count("ledger"), post.count("outbox")) == (1, 1)


def test_scopes_do_not_see_each_other(post: Post) -> None:
    with closing(post.connect()) as tx:
        wishes: dict[str, Any] = {"key": "k", "type": "t", "topic": "orders"}
        assert LEDGER.accept(tx, {"n": 1}, scope="ada", **wishes).new
        assert LEDGER.accept(tx, {"n": 2}, scope="bob", **wishes).new
        assert LEDGER.find(tx, "k", scope="cyd") is None
        tx.commit()


async def test_a_hundred_at_once_are_one(post: Post) -> None:
    receipts = await asyncio.gather(*(asyncio.to_thread(accept, post) for _ in range(100)))
    assert [receipt.new for receipt in receipts].count(True) == 1
    assert len({receipt.entry.id for receipt in receipts}) == 1
    assert (post.count("ledger"), post.count("outbox")) == (1, 1)


def test_on_a_session_it_shares_the_fate_of_the_change(post: Post) -> None:
    engine = create_engine(
        post.url.replace("postgresql://", "postgresql+psycopg://").replace(
            "mysql://", "mysql+pymysql://"
        )
    )
    with Session(engine) as session:
        LEDGER.accept(session, {"n": 1}, key="k1", type="t", topic="orders")
        session.rollback()
        assert LEDGER.find(session, "k1") is None
        LEDGER.accept(session, {"n": 1}, key="k1", type="t", topic="orders")
        session.commit()
    engine.dispose()
    assert entry(post).state == "accepted"


def test_alone_it_is_refused(post: Post) -> None:
    with closing(post.connect(autocommit=True)) as tx, pytest.raises(WouldCommitAlone):
        LEDGER.accept(tx, {}, key="k", type="t", topic="orders")
    with closing(post.connect()) as tx, pytest.raises(InvalidMessage, match="key must be text"):
        LEDGER.accept(tx, {}, key="", type="t", topic="orders")


# ── Finishing ──────────────────────────────────────────────────────────────────────────────────


async def test_a_yes_is_written_with_the_answer(post: Post) -> None:
    accept(post)
    receiver = Receiver(Delivered('{"order": 7}'))
    await drain(post, relay(post, receiver))
    done = entry(post)
    assert (done.state, done.answer, done.attempts) == ("succeeded", '{"order": 7}', 1)
    assert done.finished
    assert done.adapter == "memory://receiver"
    assert post.empty()
    (told,) = post.of("request.settled")
    known = {"idempotency_key": "k1", "status": "succeeded", "attempts": 1}
    assert (
        known | {"last_error_code": None, "adapter": "memory://receiver"}
    ).items() <= told.items()


async def test_a_no_is_a_failure_and_a_dead_letter_with_its_reason(post: Post) -> None:
    accept(post)
    await drain(post, relay(post, Receiver(REFUSED)))
    done = entry(post)
    assert (done.state, done.error_code, done.error) == (
        *("failed", "no_such_symbol"),
        "we do not know it",
    )
    assert post.count("dead_letter") == 1


async def test_while_it_waits_it_is_accepted_and_says_why(post: Post) -> None:
    accept(post)
    receiver = Receiver(BUSY)
    worker = relay(post, receiver, retry=PATIENT)
    await step(post, worker)
    waiting = entry(post)
    assert (waiting.state, waiting.attempts, waiting.error_code) == ("accepted", 1, "busy")
    assert not waiting.finished
    await step(post, worker)
    assert (entry(post).state, entry(post).attempts, entry(post).error_code) == (
        *("succeeded", 2),
        None,
    )


async def test_attempts_spent_on_refusals_are_a_failure(post: Post) -> None:
    accept(post)
    await drain(post, relay(post, Receiver(BUSY, BUSY, BUSY)), times=3)
    assert (entry(post).state, entry(post).attempts) == ("failed", 3)
    assert post.count("dead_letter") == 1


async def test_what_may_have_arrived_has_not_failed(post: Post) -> None:
    """The last try was refused, the first may have arrived, and nobody can be asked."""
    accept(post)
    worker = relay(post, Receiver(SILENT, BUSY, BUSY), retry=PATIENT)
    await step(post, worker)
    assert (entry(post).state, entry(post).finished) == ("unknown", False)
    await step(post, worker, times=2)
    assert (entry(post).state, entry(post).finished) == ("unknown", True)
    assert post.count("dead_letter") == 1


async def test_a_refusal_of_the_second_try_says_nothing_of_the_first(post: Post) -> None:
    """It may be refused because the first arrived, and nobody can be asked."""
    accept(post)
    await drain(post, relay(post, Receiver(SILENT, REFUSED)), times=2)
    assert (entry(post).state, entry(post).finished) == ("unknown", True)
    assert post.count("dead_letter") == 1


async def test_messages_outside_the_ledger_are_settled_as_ever(
    post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a batch without requests costs no statement more: on PostgreSQL one for all of it."""
    alone = []
    settle_at_once = Store._settle_at_once

    async def counted(self: Store, *rest: Any) -> Any:
        alone.append(1)
        return await settle_at_once(self, *rest)

    monkeypatch.setattr(Store, "_settle_at_once", counted)
    post.publish(*(note(f"key-{n}", n, headers={"x": "y"}) for n in range(20)))
    await drain(post, relay(post, Receiver(*[DELIVERED] * 20)))
    assert post.empty()
    assert bool(alone) == (post.dialect == "postgresql")
    assert not post.of("request.settled")


async def test_beside_other_messages_it_is_finished_too(post: Post) -> None:
    post.publish(*(note(None, n) for n in range(10)))
    keys = [f"k{n}" for n in range(10)]
    accept_many(post, keys)
    await drain(post, relay(post, Receiver()))
    assert {entry(post, key).state for key in keys} == {"succeeded"}
    assert post.empty()


async def test_a_lane_that_was_lost_says_nothing(post: Post) -> None:
    accept(post)

    class Slow(Receiver):
        async def send(self, batch: Any, *, epoch: int = 0) -> Any:
            await post.change("UPDATE {p}lane SET epoch = epoch + 1, owner = 'other'")
            return await super().send(batch)

    await drain(post, relay(post, Slow()))
    assert entry(post).state == "accepted"
    assert post.count("outbox") == 1


async def test_a_late_copy_changes_nothing(post: Post) -> None:
    first = accept(post)
    await drain(post, relay(post, Receiver(Delivered("first"))))
    headers = {"postroom-ledger": "k1"}
    post.publish(note(None, 1, id=first.entry.id, headers=headers))
    await drain(post, relay(post, Receiver(REFUSED)))
    assert (entry(post).state, entry(post).answer) == ("succeeded", "first")


async def test_an_expired_request_has_failed(post: Post) -> None:
    accept(post)
    post.sql(f"UPDATE {{p}}outbox SET expires_at = {long_ago(post)}")
    receiver = Receiver()
    await drain(post, relay(post, receiver))
    assert (entry(post).state, entry(post).error_code, receiver.sent) == ("failed", "expired", [])


async def test_an_answer_is_kept_without_secrets_and_not_too_long(post: Post) -> None:
    accept(post)
    answer = "see https://u:canary-pa55@h/x \x00" + "é" * 200_000
    await drain(post, relay(post, Receiver(Delivered(answer))))
    kept = entry(post).answer
    assert kept is not None
    assert "canary-pa55" not in kept
    assert len(kept) == 64_000


# ── Doubt: asked before it is sent again ───────────────────────────────────────────────────────


async def test_one_that_arrived_is_not_sent_again(post: Post) -> None:
    accept(post)
    receiver = Askable(SILENT, found=[Delivered("booked")])
    await drain(post, relay(post, receiver))
    assert (entry(post).state, entry(post).answer) == ("succeeded", "booked")
    assert len(receiver.sent) == 1


async def test_one_that_was_refused_is_not_sent_again(post: Post) -> None:
    accept(post)
    receiver = Askable(SILENT, found=[REFUSED])
    await drain(post, relay(post, receiver))
    assert (entry(post).state, len(receiver.sent)) == ("failed", 1)


async def test_one_that_was_on_its_way_is_found_before_it_is_sent_again(post: Post) -> None:
    """Not there when asked at once, there when asked before the next try."""
    accept(post)
    receiver = Askable(SILENT, found=[NOT_THERE, Delivered("late")])
    worker = relay(post, receiver, retry=PATIENT)
    await step(post, worker)
    assert (entry(post).state, history(post)[-1]["doubt"]) == ("unknown", True)
    await step(post, worker)
    assert (entry(post).state, entry(post).answer) == ("succeeded", "late")
    assert (len(receiver.sent), len(receiver.asked)) == (1, 2)


async def test_one_that_never_arrived_is_sent_again(post: Post) -> None:
    accept(post)
    receiver = Askable(SILENT, found=[NOT_THERE])
    await drain(post, relay(post, receiver), times=2)
    assert (entry(post).state, len(receiver.sent)) == ("succeeded", 2)


async def test_while_nobody_knows_it_is_not_sent_again(post: Post) -> None:
    accept(post)
    receiver = Askable(SILENT, found=[Unknown("still_unknown", "cannot tell")])
    await drain(post, relay(post, receiver), times=3)
    done = entry(post)
    assert (done.state, done.finished, len(receiver.sent)) == ("unknown", True, 1)
    assert post.count("dead_letter") == 1


async def test_what_a_dead_relay_was_sending_is_asked_for_first(post: Post) -> None:
    accept(post)
    leave_behind(post)
    receiver = Askable(found=[Delivered("by the dead one")])
    await drain(post, relay(post, receiver))
    assert (entry(post).state, entry(post).answer) == ("succeeded", "by the dead one")
    assert receiver.sent == []


async def test_what_was_sent_when_the_database_was_lost_is_asked_for_first(
    post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a relay without the receipt, as when the send was cut off before its answer."""
    accept(post)
    receiver = Askable(found=[Delivered("before the loss")])
    worker = relay(post, receiver)
    monkeypatch.setattr(worker.settling, "keep", lambda verdicts, epoch: None)
    settle = Store.settle
    losses = [1]

    async def lose(self: Store, link: Any, changes: Any) -> Any:
        if losses and any(change.delivered for change in changes):
            losses.pop()
            await link.close()
        return await settle(self, link, changes)

    monkeypatch.setattr(Store, "settle", lose)

    async def finished() -> bool:
        return (await asyncio.to_thread(entry, post)).finished

    async with worker:
        await eventually_async(finished, 120)
    assert not losses
    assert (entry(post).state, len(receiver.sent)) == ("succeeded", 1)
    assert receiver.asked


# ── People ─────────────────────────────────────────────────────────────────────────────────────


async def retry(post: Post, id: str) -> None:
    async with desk(post.url) as link:
        await link.transact(letters.retry(id, who="ada", why="try again"))


async def test_redrive_reopens_a_failure(post: Post) -> None:
    id = accept(post).entry.id
    receiver = Receiver(REFUSED)
    worker = relay(post, receiver)
    await drain(post, worker)
    await retry(post, id)
    assert (entry(post).state, entry(post).finished) == ("accepted", False)
    await drain(post, worker)
    assert (entry(post).state, entry(post).finished) == ("succeeded", True)


async def test_redrive_of_what_may_have_arrived_asks_first(post: Post) -> None:
    id = accept(post).entry.id
    nothing = Unknown("still_unknown", "cannot tell")
    receiver = Askable(SILENT, found=[nothing, nothing, nothing, DELIVERED])
    worker = relay(post, receiver)
    await drain(post, worker, times=3)
    await retry(post, id)
    assert (entry(post).state, entry(post).finished) == ("unknown", False)
    await drain(post, worker)
    assert (entry(post).state, len(receiver.sent)) == ("succeeded", 1)


@pytest.mark.parametrize("first", [BUSY, SILENT], ids=["refused", "silent"])
async def test_taken_back_by_a_person(post: Post, first: Any) -> None:
    id = accept(post).entry.id
    await step(post, relay(post, Receiver(first), retry=PATIENT))
    async with desk(post.url) as link:
        await link.transact(repairs.cancel(id, who="ada", why="not wanted"))
    done = entry(post)
    assert (done.state, done.error_code, done.finished) == (
        "failed" if first is BUSY else "unknown",
        "cancelled",
        True,
    )
