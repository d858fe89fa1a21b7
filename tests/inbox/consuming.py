"""A database with the inbox installed, a broker in memory, and consumers in a hurry."""

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import text

from helpers_messages import make_message
from postroom import Consumer, signals
from postroom.brokers import memory
from postroom.brokers.base import DELIVERED
from postroom.brokers.memory import MemoryBroker
from postroom.messages import Message
from postroom.retry import RetryPolicy
from stages import Stage

QUICK: dict[str, Any] = {"poll_seconds": 0.02, "grace_seconds": 10, "stuck_seconds": 30}
QUICK_RETRY = RetryPolicy((0.02,), attempts=3)
EFFECT = {
    "postgresql": "CREATE TABLE effect (place bigserial PRIMARY KEY, who text, k text, n int)",
    "mariadb": "CREATE TABLE effect (place BIGINT AUTO_INCREMENT PRIMARY KEY, who VARCHAR(99),"
    " k VARCHAR(99), n INT)",
    "sqlite": "CREATE TABLE effect (place INTEGER PRIMARY KEY, who TEXT, k TEXT, n INTEGER)",
}
APPLY = text("INSERT INTO effect (who, k, n) VALUES (:who, :k, :n)")


def note(key: str | None, number: int, **wishes: Any) -> Message:
    """A message that says which of its key it is."""
    content = json.dumps({"key": key, "n": number}).encode()
    return make_message(content, **{"key": key, "type": "note"} | wishes)


def notes(keys: int, each: int) -> list[Message]:
    """So many of each of so many keys, taking turns."""
    return [note(f"k{key}", number) for number in range(each) for key in range(keys)]


async def apply(tx: Any, event: Any, who: str = "billing") -> None:
    """The effect of a message: one row of a table of the user's."""
    await tx.execute(APPLY, {"who": who, "k": event["key"], "n": event["n"]})


@dataclass
class House:
    """One database, one broker."""

    stage: Stage
    broker: MemoryBroker
    heard: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def consumer(self, name: str = "billing", **how: Any) -> Consumer:
        how = QUICK | {"retry": QUICK_RETRY, "topics": ["orders"], "gives": "session"} | how
        return Consumer(name, self.stage.url, f"memory://{self.broker.name}", **how)

    def applying(self, name: str = "billing", **how: Any) -> Consumer:
        """A consumer that writes down each message it handles."""
        consumer = self.consumer(name, **how)

        @consumer.on("note")
        async def handle(event: Any, tx: Any) -> None:
            await apply(tx, event, name)

        return consumer

    async def send(self, *messages: Message) -> None:
        assert await self.broker.send(messages) == [DELIVERED] * len(messages)

    def effects(self, who: str = "billing") -> list[tuple[str | None, int]]:
        return [
            (row[0], row[1])
            for row in self.stage.query(
                "SELECT k, n FROM effect WHERE who = %s ORDER BY place", who
            )
        ]

    def by_key(self, who: str = "billing") -> dict[str | None, list[int]]:
        keys: dict[str | None, list[int]] = {}
        for key, number in self.effects(who):
            keys.setdefault(key, []).append(number)
        return keys

    def inbox(self, who: str = "billing") -> list[str]:
        rows = self.stage.query("SELECT message_id FROM {p}inbox WHERE consumer = %s", who)
        return [row[0] for row in rows]

    def held(self, who: str = "billing") -> list[dict[str, Any]]:
        key = "`key`" if self.stage.database == "mariadb" else "key"
        names = ("message_id", "key", "attempts", "error_code", "blocked", "aside")
        rows = self.stage.query(
            f"SELECT message_id, {key}, attempts, error_code, blocked, aside, next_attempt_at"
            " FROM {p}inbox_held WHERE consumer = %s ORDER BY position",
            who,
        )
        return [
            dict(zip(names, row[:6], strict=True)) | {"armed": row[6] is not None} for row in rows
        ]

    def letters(self) -> list[dict[str, Any]]:
        names = ("id", "source", "state", "error_code", "error", "attempts", "holds_key", "history")
        rows = self.stage.query(
            f"SELECT {', '.join(names)} FROM {{p}}dead_letter ORDER BY position"
        )
        return [
            dict(zip(names, row, strict=True)) | {"id": str(row[0]), "history": json.loads(row[7])}
            for row in rows
        ]

    def said(self, name: str) -> list[dict[str, Any]]:
        return [fields for told, fields in self.heard if told == name]


def make_house(stage: Stage) -> Iterator[House]:
    stage.query("DROP TABLE IF EXISTS effect")
    stage.query(EFFECT[stage.database])
    house = House(stage, memory.broker(f"inbox-{uuid.uuid4().hex[:8]}"))
    stop = signals.listen(lambda name, fields: house.heard.append((name, fields)))
    yield house
    stop()
    house.broker.clear()
