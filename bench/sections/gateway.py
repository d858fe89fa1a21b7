"""The gateway's accept against an endpoint by hand that inserts the same two rows.

Both are served by uvicorn in a process of their own, on the same database and with as many
connections; the same clients place the same orders, each under a key of its own. By hand: a
Starlette route that reads the JSON, makes the digest and inserts the row of the ledger and the row
of the outbox in one transaction of asyncpg, with every check left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import AsyncIterator, Iterator

import asyncpg
import uuid_utils
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from bench.figures import Figures, at_least, median
from bench.room import Room
from postroom.databases import migrate

ORDERS = (6000, 200)
TURNS = (5, 1)
CLIENTS = 16
CONNECTIONS = 8
BAR = 0.6
ORDER = {"symbol": "AAPL", "side": "buy", "quantity": 100, "order_type": "market"}
ENTER = """
INSERT INTO postroom.ledger (id, scope, key, digest, state, request)
VALUES ($1, 'orders', $2, $3, 'accepted', $4) ON CONFLICT DO NOTHING
"""
PUBLISH = """
INSERT INTO postroom.outbox (lane, id, topic, type, content_type, headers, payload, size)
VALUES ($1, $2, 'orders.place', 'order.place.v1', 'application/json', $3, $4, $5)
"""


def gateway(room: Room) -> Figures:
    """Orders accepted a second, ours and by hand taking turns, each on an empty database."""
    count = room.size(*ORDERS)
    figures = Figures(f"Gateway accept, {count:,} orders over {CLIENTS} connections")
    found: dict[str, list[float]] = {"by hand": [], "gateway": []}
    for _ in range(room.size(*TURNS)):
        for name, rates in found.items():
            room.tick(name)
            with room.database() as url:
                asyncio.run(migrate.install(url))
                with _served(name, url) as port:
                    asyncio.run(_load(port, max(count // 10, 20), "warm"))
                    rates.append(asyncio.run(_load(port, count, "k")))
                asyncio.run(_check(url, count + max(count // 10, 20)))
    rates = {name: median(each) for name, each in found.items()}
    figures.numbers["rates"] = rates
    figures.add("by hand", f"{rates['by hand']:,.0f} orders/s")
    ratio = rates["gateway"] / rates["by hand"]
    figures.add(
        "gateway", f"{rates['gateway']:,.0f} orders/s", ratio, to="by hand", bar=at_least(BAR)
    )
    return figures


@contextlib.contextmanager
def _served(name: str, url: str) -> Iterator[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-m", __name__, name, url, str(port)])
    try:
        give_up_at = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > give_up_at:
                    raise
                time.sleep(0.05)
        yield port
    finally:
        process.terminate()
        process.wait(20)


async def _load(port: int, count: int, prefix: str) -> float:
    """Orders a second, over plain sockets that stay open: the client must cost little."""
    todo = iter(range(count))
    body = json.dumps(ORDER).encode()

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for number in todo:
            head = (
                "POST /do/order HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                f"Idempotency-Key: {prefix}-{number}\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            writer.write(head.encode() + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 202"), answer
            length = answer.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
            await reader.readexactly(int(length))
        writer.close()

    begun = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return count / (time.perf_counter() - begun)


async def _check(url: str, count: int) -> None:
    connection = await asyncpg.connect(url)
    for table in ("ledger", "outbox"):
        assert await connection.fetchval(f"SELECT count(*) FROM postroom.{table}") == count, table
    await connection.close()


# ── What is served ─────────────────────────────────────────────────────────────────────────────


def _by_hand(url: str) -> Starlette:
    pool: asyncpg.Pool

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        nonlocal pool
        pool = await asyncpg.create_pool(url, min_size=CONNECTIONS, max_size=CONNECTIONS)
        yield
        await pool.close()

    async def place(request: Request) -> Response:
        key = request.headers["idempotency-key"]
        order = await request.json()
        content = json.dumps(order, sort_keys=True, separators=(",", ":")).encode()
        digest = hashlib.sha256(content).hexdigest()
        id = str(uuid_utils.uuid7())
        headers = json.dumps({"postroom-ledger": key})
        lane = zlib.crc32(id.encode()) % 16
        async with pool.acquire() as connection, connection.transaction():
            await connection.execute(ENTER, id, key, digest, content)
            await connection.execute(PUBLISH, lane, id, headers, content, len(content))
        told = {"idempotency_key": key, "client_order_id": id, "status": "accepted"}
        return JSONResponse(told | {"order": order}, status_code=202)

    return Starlette(routes=[Route("/do/order", place, methods=["POST"])], lifespan=lifespan)


def _main(name: str, url: str, port: str) -> None:
    import uvicorn

    from postroom.gateway.service import create_app

    app = _by_hand(url) if name == "by hand" else create_app(url, connections=CONNECTIONS)
    os.environ.pop("POSTROOM_FAILPOINTS", None)
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning", access_log=False)


if __name__ == "__main__":
    _main(*sys.argv[1:])
