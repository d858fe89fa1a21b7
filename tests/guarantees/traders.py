"""A gateway in a process of its own, and an exchange that takes every copy for another order.

The exchange books the same client order id again if it is sent again, so only that the relay asks
before it sends again keeps its book right.
"""

import asyncio
import json
import os
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
from worlds import World

from postroom.gateway import adapter
from postroom.gateway.exchange import Book, Manners, create_exchange
from postroom.gateway.service import create_app
from postroom.gateway.serving import listening, serving
from postroom.retry import RetryPolicy
from served import Served

ADAPTER = f"call:{adapter.__name__}:send"
ORDER = {"side": "buy", "quantity": 100, "order_type": "market"}
QUICK: dict[str, Any] = {
    "lease_seconds": 6,
    "send_timeout_seconds": 2,
    "poll_max_seconds": 0.05,
    "retry": RetryPolicy((0.05,), attempts=50),
    "rebind": True,
}
# A key, what the exchange does to its order, and how it must end.
WISHES = {
    "plain": ("AAPL", "succeeded"),
    "refused": ("REJECT", "failed"),
    "quiet": ("SILENT", "succeeded"),
    "gone": ("LOST", "succeeded"),
}


def trader(url: str, *, exchange: str, answers: str) -> int:
    """One life of a gateway: takes orders over HTTP, and ends when each has come to its end."""
    os.environ |= {"POSTROOM_EXCHANGE_URL": exchange, "POSTROOM_EXCHANGE_TIMEOUT_SECONDS": "0.5"}
    asyncio.run(_trade(url, Path(answers)))
    return 0


async def _trade(url: str, answers: Path) -> None:
    app = create_app(url, ADAPTER, patience_seconds=60, **QUICK)
    async with (
        serving(app, listening("127.0.0.1", 0)) as at,
        httpx.AsyncClient(base_url=at, timeout=120) as client,
    ):
        wishes = WISHES.items()
        told = await asyncio.gather(*(_place(client, key, symbol) for key, (symbol, _) in wishes))
    answers.write_text(json.dumps(told))


async def _place(client: httpx.AsyncClient, key: str, symbol: str) -> dict[str, Any]:
    while True:
        answer = await client.post(
            "/do/order",
            json=ORDER | {"symbol": symbol},
            headers={"Idempotency-Key": key},
            params={"wait": 20},
        )
        assert answer.status_code in (200, 202, 503), answer.text
        if answer.status_code < 300 and answer.json()["finished"]:
            told: dict[str, Any] = answer.json()
            return told
        await asyncio.sleep(0.05)


class Market:
    """An exchange of this test's, the traders it has seen, and what they were told."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.book = world.folder / f"book-{world._runs}.db"
        self.answers = world.folder / f"orders-{world._runs}.json"
        app = create_exchange(str(self.book))
        floor = app.state.floor
        floor.manners_of = lambda order: Manners(
            refuses_copies=False,
            hang_seconds=1.0,
            rejects=float(order["symbol"] == "REJECT"),
            silent=float(order["symbol"] == "SILENT"),
            lost=float(order["symbol"] == "LOST" and floor.book.counts()["submissions"] < 5),
        )
        self._served = Served(app)

    def __enter__(self) -> "Market":
        return self

    def __exit__(self, *_: object) -> None:
        self._served.stop()

    def trader(self, failpoints: str = "", log: Path | None = None) -> Any:
        """Start one, in whose place nobody else is any more."""
        self.world.tables.query("UPDATE {p}lane SET owner = NULL, lease_until = NULL")
        environment = {"POSTROOM_FAILPOINTS": failpoints} if failpoints else {}
        if log is not None:
            environment["POSTROOM_FAILPOINTS_LOG"] = str(log)
        url, answers = self._served.url, str(self.answers)
        return self.world._start("trader", environment, exchange=url, answers=answers)

    def judge(self) -> None:
        """Each order ended as it must, and stands in the book once."""
        told = {each["idempotency_key"]: each for each in json.loads(self.answers.read_text())}
        states = {key: each["status"] for key, each in told.items()}
        assert states == {key: state for key, (_, state) in WISHES.items()}
        with closing(Book(str(self.book))) as book:
            entries = Counter(book.ids())
        assert entries == {each["client_order_id"]: 1 for each in told.values()}
