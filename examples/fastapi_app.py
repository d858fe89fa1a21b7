"""An order service on FastAPI whose relay lives and ends with the application.

    pip install 'postroom' fastapi uvicorn
    uvicorn fastapi_app:app

    curl -X POST localhost:8000/orders -H 'content-type: application/json' \
         -d '{"id": 1, "total": "9.90"}'

Every order is written and published in one transaction, and the relay in the same process sends it
on. Settings: SHOP_DATABASE_URL (SQLite by default), SHOP_BROKER_URL (standard output by default).
With several processes (`--workers 4`) each has a relay; they share the work among themselves.
"""

import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated

from fastapi import Depends, FastAPI, HTTPException
from pydantic import BaseModel, Field
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from postroom import Outbox, Relay, message
from postroom.databases import migrate

DATABASE_URL = os.environ.get("SHOP_DATABASE_URL", "sqlite+aiosqlite:///shop.db")
BROKER_URL = os.environ.get("SHOP_BROKER_URL", "stdout://")

logging.basicConfig(level="INFO")  # the relay's log; without it, warnings and errors alone
engine = create_async_engine(DATABASE_URL)
sessions = async_sessionmaker(engine, expire_on_commit=False)
outbox = Outbox()


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    total: Mapped[Decimal]


@message("order.placed.v1", topic="orders", key_field="order_id")
@dataclass
class OrderPlaced:
    order_id: int
    total: Decimal


class NewOrder(BaseModel):
    id: int
    total: Decimal = Field(gt=0, max_digits=10, decimal_places=2)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    # In a real service both belong to the deployment: `postroom db install`, and your migrations.
    await migrate.install(DATABASE_URL)
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    relay = Relay(DATABASE_URL, BROKER_URL)
    mount_health(app, relay)
    async with relay:  # leaving it finishes what is under way and gives the lanes back
        yield
    await engine.dispose()


def mount_health(app: FastAPI, relay: Relay) -> None:
    """`/ops/healthz`, `/ops/readyz` and `/ops/metrics`, where this version of Postroom has them."""
    try:
        from postroom.ops.health import asgi
    except ImportError:
        return
    app.mount("/ops", asgi(relay))


app = FastAPI(title="Orders", lifespan=lifespan)


async def session() -> AsyncIterator[AsyncSession]:
    async with sessions() as session:
        yield session


@app.post("/orders", status_code=201)
async def place(order: NewOrder, session: Annotated[AsyncSession, Depends(session)]) -> dict:
    session.add(Order(id=order.id, total=order.total))
    published = outbox.publish(session, OrderPlaced(order.id, order.total))
    try:
        await session.commit()  # the order and its message, or neither
    except IntegrityError:
        raise HTTPException(409, f"there is an order {order.id} already") from None
    return {"order": order.id, "message": published.id}
