"""Engines, a mapped class and short calls for the session tests."""

from typing import Any

from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.pool import NullPool

from doors import sqlalchemy_url
from postroom import Outbox
from stages import Stage

DRIVERS = {
    "asyncpg": "postgresql",
    "psycopg": "postgresql",
    "asyncmy": "mariadb",
    "aiosqlite": "sqlite",
}
outbox = Outbox()


class Base(DeclarativeBase): ...


class Thing(Base):
    __tablename__ = "thing"
    name: Mapped[str] = mapped_column(primary_key=True)


def begin_for_real(engine: AsyncEngine) -> None:
    """SQLAlchemy's recipe for SQLite: savepoints work only if BEGIN is sent by hand."""

    @event.listens_for(engine.sync_engine, "connect")
    def connect(connection: Any, record: Any) -> None:
        connection.isolation_level = None

    @event.listens_for(engine.sync_engine, "begin")
    def begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN")


def make_engine(stage: Stage, driver: str, **options: Any) -> AsyncEngine:
    options = {"poolclass": NullPool} | options
    engine = create_async_engine(sqlalchemy_url(stage.url, driver), **options)
    if driver == "aiosqlite" and "isolation_level" not in options:
        begin_for_real(engine)
    return engine


def put(session: Any, payload: bytes, **wishes: Any) -> Any:
    return outbox.publish(session, payload, type="t", **wishes)


async def put_now(session: Any, payload: bytes, **wishes: Any) -> Any:
    return await outbox.publish_async(session, payload, type="t", **wishes)
