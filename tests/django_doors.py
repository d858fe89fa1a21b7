"""Django's connections behind the face of `doors`, each in a thread of its own, as Django has them.

Of two drivers of one database Django takes the first it finds, so a process has one of them:
psycopg 3 and PyMySQL here, unless POSTROOM_TEST_DJANGO names psycopg2 or mysqlclient.
"""

import asyncio
import os
import sqlite3
import sys
import uuid
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from importlib import import_module
from typing import Any
from urllib.parse import unquote, urlsplit

import django
import psycopg.rows
import pymysql
from django.conf import settings

from postroom import framework
from postroom.databases.kinds import link_of
from postroom.inbox import giving

DRIVERS = os.environ.get("POSTROOM_TEST_DJANGO", "psycopg,pymysql").split(",")
DRIVER = {
    "postgresql": "psycopg2" if "psycopg2" in DRIVERS else "psycopg",
    "mysql": "MySQLdb" if "mysqlclient" in DRIVERS else "pymysql",
    "sqlite": "sqlite3",
}
ENGINES = {"postgresql": "postgresql", "mysql": "mysql", "sqlite": "sqlite3"}


def _choose_drivers() -> None:
    if "mysqlclient" not in DRIVERS:
        pymysql.install_as_MySQLdb()
    if "psycopg2" in DRIVERS:
        modules = {n: m for n, m in sys.modules.items() if n.partition(".")[0] == "psycopg"}
        for name in modules:
            del sys.modules[name]
        sys.modules["psycopg"] = None  # type: ignore[assignment]
        import_module("django.db.backends.postgresql.base")
        sys.modules.update(modules)


def entry(url: str) -> dict[str, Any]:
    """An entry of DATABASES for a URL."""
    parts = urlsplit(url)
    engine = f"django.db.backends.{ENGINES[parts.scheme]}"
    if parts.scheme == "sqlite":
        return {"ENGINE": engine, "NAME": url.removeprefix("sqlite:///")}
    return {
        "ENGINE": engine,
        "NAME": parts.path[1:],
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": parts.hostname or "",
        "PORT": str(parts.port or ""),
        # Which Django 4.2 does not choose by itself.
        "OPTIONS": {"charset": "utf8mb4"} if parts.scheme == "mysql" else {},
    }


if not settings.configured:
    settings.configure(
        INSTALLED_APPS=["postroom.django"],
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
        USE_TZ=True,
    )
    django.setup()
    _choose_drivers()

# Set up for its connections alone: other tests of this process are no Django project.
FRAMEWORK = framework.present()
framework._present = None
giving.is_set_up = lambda: False

from django.db import connections, transaction  # noqa: E402
from django.utils.connection import ConnectionProxy  # noqa: E402


class Thread:
    """Runs calls one by one in a thread that has no event loop."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)

    async def __call__(self, call: Callable[..., Any], *args: Any, **how: Any) -> Any:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, partial(call, *args, **how))

    def link(self, tx: Any) -> Any:
        """A link whose statements run in the thread, where the connection lives."""
        return _ThreadLink(self, tx)

    def close(self) -> None:
        self._pool.shutdown()


class _ThreadLink:
    def __init__(self, thread: Thread, tx: Any) -> None:
        self._thread, self._tx = thread, tx

    async def execute(self, statement: Any) -> Any:
        return await self._thread(lambda: link_of(self._tx).execute(statement))


class _Blocks:
    """The `atomic()` blocks of one connection, or its commits by hand. Runs in the thread."""

    def __init__(self, alias: str, by_hand: bool) -> None:
        self.alias = alias
        self.by_hand = by_hand
        self.open: list[Any] = []

    @property
    def connection(self) -> Any:
        return connections[self.alias]

    def begin(self) -> None:
        if self.by_hand:
            self.connection.set_autocommit(False)
            return
        block = transaction.atomic(using=self.alias)
        block.__enter__()
        self.open.append(block)

    def end(self, *, commit: bool) -> None:
        if self.by_hand:
            self.connection.commit() if commit else self.connection.rollback()
            return
        if not commit:
            self.connection.set_rollback(True)
        self.open.pop().__exit__(None, None, None)

    def again(self, *, commit: bool) -> None:
        self.end(commit=commit)
        self.begin()

    def run(self, statement: str) -> None:
        with self.connection.cursor() as cursor:
            cursor.execute(statement)

    def close(self) -> None:
        while self.open:
            self.end(commit=False)
        self.connection.close()
        del connections[self.alias]


def _strange_rows(connection: Any) -> None:
    """What an application may set on the driver's connection when it is made."""
    connection.ensure_connection()
    assert type(connection.connection).__module__.partition(".")[0] == DRIVER[connection.vendor]
    if connection.vendor == "sqlite":
        connection.connection.row_factory = sqlite3.Row
    elif hasattr(connection.connection, "row_factory"):
        connection.connection.row_factory = psycopg.rows.dict_row


@asynccontextmanager
async def opened(
    url: str, make: Callable[..., Any], *, by_hand: bool, proxy: bool, alone: bool
) -> AsyncIterator[Any]:
    alias = f"door_{uuid.uuid4().hex[:12]}"
    both = {"default": connections.settings["default"], alias: entry(url)}
    connections.settings[alias] = connections.configure_settings(both)[alias]
    thread, blocks = Thread(), _Blocks(alias, by_hand)
    try:
        tx = await thread(lambda: connections[alias])
        await thread(_strange_rows, tx)
        if not alone:
            await thread(blocks.begin)
        yield make(thread, blocks, ConnectionProxy(connections, alias) if proxy else tx)
    finally:
        await thread(blocks.close)
        thread.close()
        del connections.settings[alias]
