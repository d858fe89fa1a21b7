"""Somebody else who is at a key."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from serving import SYNC_DRIVERS, with_driver
from sqlalchemy import create_engine

from postroom.databases.sqlalchemy import SQLAlchemyLink
from postroom.flow import run
from postroom.idempotency import Name, store
from stages import Stage


@contextmanager
def somebody_at(stage: Stage, name: Name) -> Iterator[Callable[[], None]]:
    """Another transaction that has this key: whoever claims it waits until it is let go."""
    engine = create_engine(with_driver(stage.url, SYNC_DRIVERS))
    with engine.connect() as connection:
        claim = store.claim(name, "f" * 64, "same_transaction", keep_seconds=60)
        run(claim, SQLAlchemyLink(connection))
        yield connection.rollback
    engine.dispose()
