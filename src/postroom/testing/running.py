"""Flows on what a test has: its own session or connection, or the URL of its database."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from postroom.databases.database import Database, DatabaseLost, WorkerLink
from postroom.databases.kinds import bare, kind_of
from postroom.errors import WrongCall, with_article
from postroom.flow import Flow, run, run_async

__all__ = ["on_connection", "on_connection_async", "on_database", "wait_for"]

T = TypeVar("T")


def on_connection(tx: Any, flow: Flow[T], call: str) -> T:
    """Carry a flow out on a synchronous session or connection; `call` is named to others."""
    tx = bare(tx)
    kind = kind_of(tx)
    if kind.is_async:
        flow.close()
        raise WrongCall(f"{with_article(kind.name)} is asynchronous: write `await {call}(...)`")
    return run(flow, kind.link(tx))


async def on_connection_async(tx: Any, flow: Flow[T]) -> T:
    """Carry a flow out on any session or connection."""
    tx = bare(tx)
    kind = kind_of(tx)
    if not kind.is_async:
        return run(flow, kind.link(tx))
    return await run_async(flow, kind.link(tx))


async def on_database(url: str, flow: Flow[T]) -> T:
    """Carry a flow out in a transaction of its own and commit it."""
    database = Database(url)
    link: WorkerLink = await database.connect()
    try:
        return await link.transact(flow)
    except DatabaseLost as error:
        raise database.explain(error) from error
    finally:
        await link.close()


def wait_for(work: Coroutine[Any, Any, T]) -> T:
    """Do asynchronous work from synchronous code, even inside somebody's event loop."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()
