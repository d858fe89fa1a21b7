"""An adapter whose answers a test decides, and requests accepted as an application does it."""

import asyncio
import json
from collections.abc import Iterable, Sequence
from contextlib import closing
from typing import Any

from relaying import Post

from helpers import eventually_async
from postroom import Ledger
from postroom.brokers.base import Capabilities, Delivered, Outcome, Transient
from postroom.ledger.rules import Entry
from postroom.messages import Message
from postroom.outbox.requests import Receipt
from postroom.retry import RetryPolicy

URL = "memory://receiver"
PATIENT = RetryPolicy((600.0,), attempts=3)
LEDGER = Ledger()
WISH: dict[str, Any] = {"type": "order.place", "topic": "orders"}


class Receiver:
    """Answers what it is told to, one outcome a send; remembers what came."""

    def __init__(self, *outcomes: Outcome | Exception) -> None:
        self.capabilities = Capabilities(max_batch=4)
        self.outcomes = list(outcomes)
        self.sent: list[str] = []

    async def send(self, batch: Sequence[Message], *, epoch: int = 0) -> list[Outcome]:
        answers: list[Outcome] = []
        for message in batch:
            self.sent.append(message.id)
            outcome = self.outcomes.pop(0) if self.outcomes else Delivered('{"order": 1}')
            if isinstance(outcome, Exception):
                raise outcome
            answers.append(outcome)
        return answers

    async def ping(self) -> None: ...
    async def close(self) -> None: ...


class Askable(Receiver):
    """One that can be asked too: `found` is said in turn, the last for ever."""

    def __init__(
        self, *outcomes: Outcome | Exception, found: Sequence[Outcome | Exception]
    ) -> None:
        super().__init__(*outcomes)
        self.found = list(found)
        self.asked: list[str] = []

    async def lookup(self, message: Message) -> Outcome:
        self.asked.append(message.id)
        answer = self.found.pop(0) if len(self.found) > 1 else self.found[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


NOT_THERE = Transient("not_arrived", "not in the book")


def relay(post: Post, receiver: Receiver, **how: Any) -> Any:
    return post.relay(URL, brokers={URL: receiver}, **how)


def accept(
    post: Post, key: str = "k1", document: Any = None, *, commit: bool = True, **how: Any
) -> Receipt:
    how = WISH | how
    with closing(post.connect()) as tx:
        receipt = LEDGER.accept(tx, document or {"n": 1}, key=key, **how)
        if commit:
            tx.commit()
            LEDGER.committed(receipt)
        else:
            tx.rollback()
    return receipt


def accept_many(post: Post, keys: Iterable[str]) -> None:
    with closing(post.connect()) as tx:
        for key in keys:
            LEDGER.accept(tx, {"n": 1}, key=key, **WISH)
        tx.commit()


def find(post: Post, key: str = "k1") -> Entry | None:
    with closing(post.connect()) as tx:
        return LEDGER.find(tx, key)


def entry(post: Post, key: str = "k1") -> Entry:
    found = find(post, key)
    assert found is not None
    return found


def leave_behind(post: Post, *, alone: bool = False) -> None:
    """A relay died while it was sending all that is in the outbox, each by itself."""
    for number, (lane, position) in enumerate(post.sql("SELECT lane, position FROM {p}outbox")):
        post.sql(
            "INSERT INTO {p}lane_batch (lane, incarnation, batch, lo, hi, messages, alone, held)"
            " VALUES (%s, 'dead', %s, %s, %s, 1, %s, %s)",
            *(lane, number + 1, position, position, alone, False),
        )


def long_ago(post: Post) -> str:
    return {
        "postgresql": "now() - interval '1 day'",
        "mariadb": "UTC_TIMESTAMP(6) - INTERVAL 1 DAY",
        "sqlite": "1",
    }[post.dialect]


async def drain(post: Post, worker: Any, *, times: int = 1) -> None:
    for _ in range(times):
        await worker.drain_once()
        await asyncio.sleep(0.06)


async def step(post: Post, worker: Any, *, times: int = 1) -> None:
    """As `drain` with a relay that waits long between attempts: each turn is one, however slow the
    machine is."""
    for _ in range(times):
        post.sql(
            f"UPDATE {{p}}held SET next_attempt_at = {long_ago(post)}"
            " WHERE next_attempt_at IS NOT NULL"
        )
        await worker.drain_once()


async def until_finished(post: Post, worker: Any, key: str = "k1") -> None:
    """Drain until a request has come to its end."""

    async def finished() -> bool:
        await drain(post, worker)
        return entry(post, key).finished

    await eventually_async(finished, 120)


def history(post: Post) -> list[dict[str, Any]]:
    rows = post.sql("SELECT history FROM {p}held") or post.sql("SELECT history FROM {p}dead_letter")
    found: list[dict[str, Any]] = json.loads(rows[0][0])
    return found
