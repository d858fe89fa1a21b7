"""A broker that outlives its processes: a SQLite file. Whoever subscribes last receives.

For consumers that are killed: what they have not acknowledged is handed to the next one, in order.
"""

import asyncio
import sqlite3
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from postroom.brokers.base import DELIVERED, Capabilities, Outcome
from postroom.brokers.receiving import Delivery, delivery
from postroom.messages import Message

_TABLES = """
CREATE TABLE IF NOT EXISTS box (number INTEGER PRIMARY KEY, id TEXT, key TEXT, type TEXT,
    payload BLOB, acked INTEGER DEFAULT 0, seen INTEGER DEFAULT 0);
CREATE TABLE IF NOT EXISTS owner (token TEXT, claim INTEGER);
"""


class Postbox:
    """What lies in the file, from outside and as a broker."""

    def __init__(self, path: Path | str) -> None:
        self.capabilities = Capabilities()
        self._path = str(path)
        with self._open() as file:
            file.executescript(_TABLES)
            if not file.execute("SELECT 1 FROM owner").fetchall():
                file.execute("INSERT INTO owner VALUES ('', 0)")

    def _open(self) -> sqlite3.Connection:
        return sqlite3.connect(self._path, isolation_level=None, timeout=30)

    def ask(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        connection = self._open()
        try:
            return connection.execute(statement, values).fetchall()
        finally:
            connection.close()

    def put(self, facts: Sequence[tuple[str, str | None, str, bytes]]) -> None:
        connection = self._open()
        connection.executemany(
            "INSERT INTO box (id, key, type, payload) VALUES (?, ?, ?, ?)", facts
        )
        connection.close()

    def left(self) -> int:
        return int(self.ask("SELECT COUNT(*) FROM box WHERE NOT acked")[0][0])

    def clear(self) -> None:
        self.ask("DELETE FROM box")

    async def receive(self, topics: Sequence[str], *, consumer: str) -> "Reader":
        token = uuid.uuid4().hex
        self.ask("UPDATE owner SET token = ?, claim = claim + 1", token)
        return Reader(self, token, topics[0])

    async def send(self, batch: Sequence[Message], *, epoch: int = 0) -> list[Outcome]:
        self.put([(m.id, m.key, m.type, m.payload) for m in batch])
        return [DELIVERED] * len(batch)

    async def ping(self) -> None:
        """It is always there."""

    async def close(self) -> None:
        """Nothing to close."""


class Reader:
    """One process's way of receiving, until another subscribes."""

    exclusive = True
    extend_seconds = None

    def __init__(self, box: Postbox, token: str, topic: str) -> None:
        self._box, self._token, self._topic = box, token, topic
        self._out: set[int] = set()

    async def take(self, most: int) -> list[Delivery]:
        until = time.monotonic() + 1
        while time.monotonic() < until:
            ((token, claim),) = self._box.ask("SELECT token, claim FROM owner")
            rows = self._box.ask("SELECT * FROM box WHERE NOT acked ORDER BY number")
            rows = [row for row in rows if row[0] not in self._out][:most]
            if rows and token == self._token:
                for row in rows:
                    self._out.add(row[0])
                    self._box.ask("UPDATE box SET seen = seen + 1 WHERE number = ?", row[0])
                return [self._delivery(row, claim) for row in rows]
            await asyncio.sleep(0.02)
        return []

    def _delivery(self, row: tuple[Any, ...], claim: int) -> Delivery:
        number, id, key, type, payload, _, seen = row
        headers = {"ce-id": id, "ce-type": type, "content-type": "application/json"}
        return delivery(
            headers,
            payload,
            topic=self._topic,
            key=key,
            source=self._topic,
            claim=claim,
            receipt=number,
            unnamed=str(number),
            seen=seen,
        )

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        ((token, _),) = self._box.ask("SELECT token, claim FROM owner")
        if token == self._token:
            for each in deliveries:
                self._box.ask("UPDATE box SET acked = 1 WHERE number = ?", each.receipt)

    async def give_back(self, deliveries: Sequence[Delivery]) -> None:
        self._out -= {each.receipt for each in deliveries}

    async def extend(self, deliveries: Sequence[Delivery]) -> None:
        """Nobody takes them away."""

    async def close(self) -> None:
        self._out.clear()
