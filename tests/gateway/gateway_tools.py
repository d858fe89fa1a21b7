"""A gateway and an exchange behind real sockets, each in a thread with a loop of its own."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from postroom import signals
from postroom.gateway.exchange import Floor, Manners, create_exchange
from postroom.gateway.service import create_app
from postroom.messages import Message
from postroom.retry import RetryPolicy
from served import Served
from stages import Stage

ADAPTER = "call:postroom.gateway.adapter:send"
# Often, and however slow the machine is.
QUICK: dict[str, Any] = {
    "lease_seconds": 30,
    "send_timeout_seconds": 10,
    "poll_max_seconds": 0.05,
    "retry": RetryPolicy((0.05,), attempts=50),
    "rebind": True,
}
PATIENT = {"patience_seconds": 60.0}
WAIT = {"wait": 30}
ORDER = {"symbol": "AAPL", "side": "buy", "quantity": 100, "order_type": "market"}
LIMIT = {**ORDER, "order_type": "limit", "limit_price": "101.50"}


def say_yes(message: Message) -> bool:
    """An adapter whose exchange takes everything at once."""
    return True


@dataclass
class House:
    """One database, one exchange, and gateways that a test opens."""

    stage: Stage
    folder: Path
    exchange: Served
    heard: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    @property
    def floor(self) -> Floor:
        floor: Floor = self.exchange.app.state.floor
        return floor

    @contextlib.contextmanager
    def gateway(self, adapter: Any = ADAPTER, **how: Any) -> Iterator[httpx.Client]:
        """A gateway with a relay beside it, unless `adapter` is None."""
        settings = QUICK if adapter is not None else {}
        served = Served(create_app(self.stage.url, adapter, **{**PATIENT, **settings, **how}))
        try:
            with httpx.Client(base_url=served.url, timeout=120) as client:
                yield client
        finally:
            served.stop()

    def manners(self, **how: Any) -> None:
        self.floor.manners = Manners(hang_seconds=3, **how)

    def entries(self) -> dict[str, str]:
        """The ledger: keys and states."""
        column = "`key`" if self.stage.database == "mariadb" else "key"
        return dict(self.stage.query(f"SELECT {column}, state FROM {{p}}ledger"))

    def booked(self) -> list[str]:
        """The exchange's book, looked at from outside."""
        book = httpx.get(f"{self.exchange.url}/book", timeout=120).json()
        assert book["entries"] == book["orders"], book
        return [str(id) for id in _ids(self.folder / "book.db")]


def _ids(path: Path) -> list[str]:
    import sqlite3

    with contextlib.closing(sqlite3.connect(path)) as book:
        return [id for (id,) in book.execute("SELECT id FROM book ORDER BY number")]


def make_house(stage: Stage, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    stage.query("DELETE FROM {p}meta WHERE name = 'routes'")
    exchange = Served(create_exchange(str(folder / "book.db")))
    monkeypatch.setenv("POSTROOM_EXCHANGE_URL", exchange.url)
    house = House(stage, folder, exchange)
    unlisten = signals.listen(lambda name, fields: house.heard.append((name, fields)))
    yield house
    unlisten()
    exchange.stop()


def place(client: httpx.Client, key: str | None = "k1", order: Any = None, **how: Any) -> Any:
    headers = {"Idempotency-Key": key} if key is not None else {}
    headers |= how.pop("headers", {})
    return client.post("/do/order", json=order or ORDER, headers=headers, **how)
