"""What an idempotency key costs a FastAPI endpoint, and how fast a replay is, in one run.

The endpoint inserts a row and publishes a message in one transaction. The same endpoint is asked
without keys (its own session and commit), with a new key each time (`same_transaction`), and with
one key over and over (replays). All in one process, without a network, so that nothing hides the
difference. Rounds are short and many, and each is compared with its neighbour: a machine that is
slow for ten seconds is slow for both.
"""

import asyncio
import time
import uuid
from collections.abc import Callable
from typing import Annotated, Any

import httpx
from fastapi import Depends, FastAPI
from pydantic import BaseModel
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from bench.figures import Figures, at_least, median
from bench.room import Room
from postroom import Outbox
from postroom.databases import migrate
from postroom.idempotency import SHARED, Keys, Policy
from postroom.idempotency.fastapi import keyed_session, protect

REQUESTS = (1000, 60)
TURNS = (15, 1)
AT_ONCE = 4
PLAIN, KEYED, REPLAY = "without a key", "same transaction", "replay"
TABLE = "CREATE TABLE purchase (id text PRIMARY KEY, total text NOT NULL)"


class Purchase(BaseModel):
    id: str
    total: str


def keys(room: Room) -> Figures:
    """Requests a second, the three ways taking turns on one database."""
    count = room.size(*REQUESTS)
    turns = room.size(*TURNS)
    figures = Figures(f"Idempotency keys, {turns} rounds of {count:,}, {AT_ONCE} at once")
    with room.database() as url:
        found = asyncio.run(_measure(url, count, turns, room.tick))
    rates = {name: median(each) for name, each in found.items()}
    figures.numbers["rates"] = rates
    figures.add(PLAIN, f"{rates[PLAIN]:,.0f} requests/s")
    for name, least in ((KEYED, 0.7), (REPLAY, 1)):
        ratio = median([a / b for a, b in zip(found[name], found[PLAIN], strict=True)])
        figures.add(name, f"{rates[name]:,.0f} requests/s", ratio, to=PLAIN, bar=at_least(least))
    return figures


async def _measure(
    url: str, count: int, turns: int, tick: Callable[[str], None]
) -> dict[str, list[float]]:
    await migrate.install(url)
    engine = create_async_engine(url.replace("://", "+asyncpg://", 1), pool_size=AT_ONCE)
    async with engine.begin() as connection:
        await connection.execute(text(TABLE))
    app = _app(url, engine)
    found: dict[str, list[float]] = {PLAIN: [], KEYED: [], REPLAY: []}
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
        one = uuid.uuid4().hex
        await _post(client, "/keyed", one, one)
        for path in ("/plain", "/keyed"):
            await _rate(client, path, count // 2, None)
        for _ in range(turns):
            for name, rates in found.items():
                tick(name)
                path = "/plain" if name == PLAIN else "/keyed"
                same = one if name == REPLAY else None
                rates.append(await _rate(client, path, count, same))
    await engine.dispose()
    return found


def _app(url: str, engine: Any) -> FastAPI:
    app, outbox = FastAPI(), Outbox()
    protect(app, Keys(url, scope=SHARED, policies={"POST /keyed": Policy(mode="same_transaction")}))

    async def own_session() -> Any:
        async with AsyncSession(engine, expire_on_commit=False) as session:
            yield session

    async def write(session: AsyncSession, purchase: Purchase) -> dict[str, str]:
        values = {"id": purchase.id, "total": purchase.total}
        await session.execute(text("INSERT INTO purchase VALUES (:id, :total)"), values)
        message = await outbox.publish_async(session, values, type="bought", topic="purchases")
        return {"id": purchase.id, "message": message.id}

    @app.post("/plain", status_code=201)
    async def plain(
        purchase: Purchase, session: Annotated[AsyncSession, Depends(own_session)]
    ) -> dict[str, str]:
        answer = await write(session, purchase)
        await session.commit()
        return answer

    @app.post("/keyed", status_code=201)
    async def keyed(
        purchase: Purchase, session: Annotated[AsyncSession, Depends(keyed_session(engine))]
    ) -> dict[str, str]:
        return await write(session, purchase)

    return app


async def _rate(client: httpx.AsyncClient, path: str, count: int, same: str | None) -> float:
    names = iter([same or uuid.uuid4().hex for _ in range(count)])

    async def work() -> None:
        for name in names:
            await _post(client, path, name, name)

    begun = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    return count / (time.perf_counter() - begun)


async def _post(client: httpx.AsyncClient, path: str, key: str, id: str) -> None:
    headers = {"Idempotency-Key": key}
    answer = await client.post(path, json={"id": id, "total": "9.90"}, headers=headers)
    assert answer.status_code == 201, answer.text
