"""A load for the gateway: orders by the thousand, some of them sent again, some keys used twice.

It behaves as a client should: a request without a clear answer is sent again with the same key.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from postroom.errors import ConfigurationError, MissingDriver

__all__ = ["Load", "Told", "order"]

SYMBOLS = ("AAPL", "MSFT", "NVDA", "TSLA", "BTC-USD", "EUR/USD")
PATIENCE_SECONDS = 300.0


def order(number: int, dice: random.Random) -> dict[str, Any]:
    """An order that somebody might want to place."""
    document: dict[str, Any] = {
        "symbol": dice.choice(SYMBOLS),
        "side": dice.choice(("buy", "sell")),
        "quantity": dice.randint(1, 500),
        "order_type": "market",
        "account": f"acct-{number % 50}",
    }
    if dice.random() < 0.5:
        price = f"{dice.randint(1, 900)}.{dice.randint(0, 99):02}"
        document |= {"order_type": "limit", "limit_price": price}
    return document


@dataclass(slots=True)
class Told:
    """What the gateway has answered so far."""

    statuses: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    longest_seconds: float = 0.0  # from a first try to a clear answer
    ids: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    again: int = 0

    def percentile(self, share: float) -> float:
        """Seconds within which that share of requests was answered."""
        if not self.seconds:
            return 0.0
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Load:
    """Places orders at a gateway, so many at a time, until each has a clear answer.

    `repeats` is the share of orders that are sent a second time, `conflicts` that of keys that are
    used for another order too. With the same `seed` it is the same orders under the same keys, so a
    gateway that has them already says so of each.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        orders: int,
        concurrency: int = 32,
        repeats: float = 0.1,
        conflicts: float = 0.02,
        seed: int | None = None,
        token: str | None = None,
    ) -> None:
        try:
            import httpcore
        except ImportError as error:
            raise MissingDriver(
                "The load needs httpcore: pip install 'postroom[gateway]'."
            ) from error
        if token and not re.fullmatch(r"[!-~]+", token):  # it is not shown: it is a secret
            raise ConfigurationError(
                "GATEWAY_TOKEN holds what no HTTP header can: spaces, or letters that are not "
                "ASCII."
            )
        self._httpcore = httpcore
        self._urls = [url] if isinstance(url, str) else list(url)
        self._orders = orders
        self._concurrency = concurrency
        self._repeats, self._conflicts = repeats, conflicts
        # For what is nobody's order: addresses and pauses, as many as it takes.
        self._dice = random.Random(seed)
        self._run = f"{self._dice.getrandbits(32):08x}"
        self._token = token
        self.told = Told()

    def keys(self) -> list[str]:
        """The keys of all orders."""
        return [f"load-{self._run}-{number}" for number in range(self._orders)]

    async def run(self) -> Told:
        """Place all of them."""
        todo = iter(enumerate(self.keys()))
        async with self._httpcore.AsyncConnectionPool(
            max_connections=self._concurrency, keepalive_expiry=30
        ) as self._pool:

            async def work() -> None:
                for number, key in todo:
                    await self._place(number, key)

            async with asyncio.TaskGroup() as group:
                for _ in range(self._concurrency):
                    group.create_task(work())
        return self.told

    async def _place(self, number: int, key: str) -> None:
        # By its key, so that under one it is the same order whoever places it, and when.
        dice = random.Random(key)
        wish = order(number, dice)
        repeated, reused = dice.random() < self._repeats, dice.random() < self._conflicts
        await self._send(key, wish)
        if repeated:
            turned = dict(reversed(wish.items())) | {"quantity": float(wish["quantity"])}
            await self._send(key, turned)
        if reused:
            await self._send(key, wish | {"quantity": wish["quantity"] + 1}, conflict=True)

    async def _send(self, key: str, wish: dict[str, Any], *, conflict: bool = False) -> None:
        """Until it is answered: 503, silence and a closed door say nothing about the order."""
        first = time.monotonic()
        content, pause = json.dumps(wish).encode(), 0.02
        headers = [(b"content-type", b"application/json"), (b"idempotency-key", key.encode())]
        if self._token:
            headers.append((b"authorization", f"Bearer {self._token}".encode()))
        while True:
            begun = time.perf_counter()
            try:
                async with asyncio.timeout(15):
                    url = self._dice.choice(self._urls)
                    answer = await self._pool.request(
                        "POST", f"{url}/do/order", headers=headers, content=content
                    )
            except self._httpcore.LocalProtocolError:
                # It never left, nor would it the next time. The error may quote the token.
                self.told.statuses["not sent"] += 1
                self.told.wrong.append(f"{key}: the request is none that HTTP can carry")
                return
            except (self._httpcore.NetworkError, self._httpcore.ProtocolError, TimeoutError):
                self.told.statuses["no answer"] += 1
            except self._httpcore.TimeoutException:
                self.told.statuses["no answer"] += 1
            else:
                self.told.statuses[str(answer.status)] += 1
                if answer.status < 500:
                    self.told.seconds.append(time.perf_counter() - begun)
                    waited = time.monotonic() - first
                    self.told.longest_seconds = max(self.told.longest_seconds, waited)
                    self._check(key, answer.status, answer.content, conflict)
                    return
            if time.monotonic() > first + PATIENCE_SECONDS:
                self.told.wrong.append(f"{key}: no answer in {PATIENCE_SECONDS:g} s")
                return
            self.told.again += 1
            await asyncio.sleep(pause * (0.5 + self._dice.random()))
            pause = min(pause * 2, 1.0)

    def _check(self, key: str, status: int, content: bytes, conflict: bool) -> None:
        wanted = (409,) if conflict else (200, 202)
        if status not in wanted:
            self.told.wrong.append(f"{key}: {status} {content[:200]!r}")
        elif not conflict:
            id = json.loads(content)["client_order_id"]
            if self.told.ids.setdefault(key, id) != id:
                self.told.wrong.append(f"{key}: two orders, {self.told.ids[key]} and {id}")
