"""A simulated exchange: a book on disk behind HTTP, and all the bad manners real ones have.

    POST /orders                 books an order under its client_order_id, or rejects it
    GET  /orders/{id}            what became of it
    GET  /book                   how much it holds

It is slow, says nothing, loses orders, gets them twice and dies, as often as its `Manners` say.
What is in the book stays there: it is written down before an answer is given, and outlives a kill.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any

from postroom.errors import ConfigurationError, MissingDriver

try:
    from starlette.applications import Starlette
    from starlette.requests import Request as Call
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
except ImportError as error:
    raise MissingDriver(
        "The gateway needs Starlette and uvicorn: pip install 'postroom[gateway]'."
    ) from error

__all__ = ["Book", "Manners", "create_exchange"]

REASONS = ("insufficient_funds", "unknown_symbol", "market_closed")


# What is not a chance from 0 to 1.
_MOST = {"latency_seconds": 3600.0, "hang_seconds": 3600.0, "seed": 2.0**53}


@dataclass(frozen=True, slots=True)
class Manners:
    """How often things go wrong, each from 0 to 1, and how slow it is.

    `silent`: booked, and no answer comes. `lost`: not booked, and no answer comes. `twice`: the
    network brings it two times. `busy`: it says so. `crash`: booked, and the process dies.
    `refuses_copies` is off for an exchange that would book the same client order id again.
    """

    latency_seconds: float = 0.0
    rejects: float = 0.0
    silent: float = 0.0
    lost: float = 0.0
    twice: float = 0.0
    busy: float = 0.0
    crash: float = 0.0
    hang_seconds: float = 8.0
    refuses_copies: bool = True
    seed: int | None = None

    @classmethod
    def parse(cls, text: str) -> Manners:
        """From `rejects=0.1,silent=0.05`."""
        known = {spec.name for spec in fields(cls)}
        given: dict[str, Any] = {}
        for part in filter(None, text.split(",")):
            name, _, value = part.strip().partition("=")
            if name not in known:
                raise ConfigurationError(
                    f"{name!r} is none of an exchange's manners: {', '.join(sorted(known))}."
                )
            try:
                given[name] = float(value)
            except ValueError:
                raise ConfigurationError(f"{name} must be a number, not {value!r}.") from None
            most = _MOST.get(name, 1.0)
            if not 0 <= given[name] <= most:
                raise ConfigurationError(f"{name} must be from 0 to {most:g}, not {value!r}.")
        for name in ("refuses_copies", "seed"):
            if name in given:
                given[name] = (bool if name == "refuses_copies" else int)(given[name])
        return cls(**given)

    def spelled(self) -> str:
        """As `parse` reads it."""
        told = {name: value for name, value in asdict(self).items() if value is not None}
        return ",".join(f"{name}={float(value):g}" for name, value in told.items())


class Book:
    """What the exchange has written down."""

    def __init__(self, path: str) -> None:
        self._file = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        for command in (
            "PRAGMA journal_mode = WAL",
            "PRAGMA synchronous = NORMAL",
            "CREATE TABLE IF NOT EXISTS book (number INTEGER PRIMARY KEY, id TEXT NOT NULL,"
            " status TEXT NOT NULL, reason TEXT, content TEXT NOT NULL)",
            "CREATE INDEX IF NOT EXISTS book_id ON book (id)",
            "CREATE TABLE IF NOT EXISTS submission (id TEXT NOT NULL)",
        ):
            self._file.execute(command)

    def find(self, id: str) -> dict[str, Any] | None:
        """What became of an order."""
        row = self._file.execute(
            "SELECT number, id, status, reason FROM book WHERE id = ? ORDER BY number", (id,)
        ).fetchone()
        return None if row is None else _said(row)

    def seen(self, id: str) -> None:
        """Somebody sent this order, whatever becomes of it."""
        self._file.execute("INSERT INTO submission VALUES (?)", (id,))

    def enter(self, id: str, order: dict[str, Any], reason: str | None) -> dict[str, Any]:
        """Write an order down, booked or rejected."""
        status = "booked" if reason is None else "rejected"
        cursor = self._file.execute(
            "INSERT INTO book (id, status, reason, content) VALUES (?, ?, ?, ?)",
            (id, status, reason, json.dumps(order)),
        )
        return _said((cursor.lastrowid, id, status, reason))

    def counts(self) -> dict[str, int]:
        """How much it holds: orders, how many of them once, and how often any was sent."""
        one = self._file.execute(
            "SELECT count(*), count(DISTINCT id), coalesce(sum(status = 'rejected'), 0) FROM book"
        ).fetchone()
        sent = self._file.execute("SELECT count(*) FROM submission").fetchone()[0]
        names = ("entries", "orders", "rejected", "submissions")
        return dict(zip(names, (*one, sent), strict=True))

    def ids(self) -> list[str]:
        """Every entry's client order id."""
        return [id for (id,) in self._file.execute("SELECT id FROM book ORDER BY number")]

    def entries(self) -> list[tuple[str, str]]:
        """Every entry's client order id and status."""
        return self._file.execute("SELECT id, status FROM book ORDER BY number").fetchall()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _said(row: tuple[Any, ...]) -> dict[str, Any]:
    number, id, status, reason = row
    said = {"exchange_order_id": number, "client_order_id": id, "status": status}
    return said if reason is None else {**said, "reason_code": reason}


def create_exchange(path: str, manners: Manners | None = None) -> Starlette:
    """The exchange as an ASGI application, with its book in the file at `path`."""
    floor = Floor(path, manners or Manners())

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        floor.book.close()

    app = Starlette(
        routes=[
            Route("/orders", floor.place, methods=["POST"]),
            Route("/orders/{id}", floor.look, methods=["GET"]),
            Route("/book", floor.count, methods=["GET"]),
        ],
        lifespan=lifespan,
    )
    app.state.floor = floor
    return app


class Floor:
    """What the routes do. `manners` may be changed at any time."""

    def __init__(self, path: str, manners: Manners) -> None:
        self.book = Book(path)
        self.manners = manners
        self._dice = random.Random(manners.seed)

    async def place(self, call: Call) -> Response:
        """`POST /orders`"""
        order = await call.json()
        id = str(order.pop("client_order_id"))
        self.book.seen(id)
        manners = self.manners_of(order)
        await asyncio.sleep(manners.latency_seconds * (0.5 + self._dice.random()))
        if self._happens(manners.busy):
            return JSONResponse({"reason_code": "busy"}, 503, headers={"retry-after": "1"})
        if self._happens(manners.lost):
            await asyncio.sleep(manners.hang_seconds)
            return JSONResponse({"reason_code": "lost"}, 504)
        status, answer = self._take(id, order, manners)
        if self._happens(manners.twice):
            status, answer = self._take(id, order, manners)
        if self._happens(manners.crash):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._happens(manners.silent):
            await asyncio.sleep(manners.hang_seconds)
        return JSONResponse(answer, status)

    def manners_of(self, order: dict[str, Any]) -> Manners:
        """How it behaves toward this order."""
        return self.manners

    def _take(self, id: str, order: dict[str, Any], manners: Manners) -> tuple[int, dict[str, Any]]:
        known = self.book.find(id) if manners.refuses_copies else None
        if known is not None:
            return 409, known
        reason = self._dice.choice(REASONS) if self._happens(manners.rejects) else None
        return (200 if reason is None else 422), self.book.enter(id, order, reason)

    async def look(self, call: Call) -> Response:
        """`GET /orders/{id}`"""
        known = self.book.find(call.path_params["id"])
        if known is None:
            return JSONResponse({"reason_code": "no_such_order"}, 404)
        return JSONResponse(known)

    async def count(self, call: Call) -> Response:
        """`GET /book`"""
        return JSONResponse(self.book.counts())

    def _happens(self, chance: float) -> bool:
        return chance > 0 and self._dice.random() < chance


def main() -> None:
    """`python -m postroom.gateway.exchange FILE PORT [MANNERS]`"""
    import sys

    import uvicorn

    path, port, *manners = sys.argv[1:]
    app = create_exchange(path, Manners.parse(manners[0] if manners else ""))
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
