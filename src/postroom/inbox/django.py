"""Handlers on Django's own connection: one `transaction.atomic()` holds inbox row and effects.

Promise: changes through Django's ORM commit together with the inbox's row, or not at all.
Everything runs in a thread of the consumer, on that thread's connection of `DATABASES`. Hooks of
`transaction.on_commit` run after the commit; a hook that fails is logged by Django and undoes
nothing, and the hooks of other messages still run.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from django.db import close_old_connections, connections, transaction

from postroom import failpoints
from postroom.databases.django import DjangoLink
from postroom.errors import WrongCall
from postroom.flow import Flow, Statement, run
from postroom.inbox.store import ROOM
from postroom.inbox.transactions import DEADLOCK, GOODBYE_SECONDS, Transactions, is_closed

__all__ = ["DjangoTransaction", "DjangoTransactions", "check_usable", "hooks_are_robust"]

T = TypeVar("T")
_IN_ERROR = 3  # libpq's number of a transaction in which a statement has failed


class DjangoTransaction:
    """One `transaction.atomic()` for handlers; everything of it happens in one thread."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.committed = False
        self._link = DjangoLink(connection)
        self._block = transaction.atomic(using=connection.alias, durable=True)
        self._open = False

    def begin(self) -> None:
        """Open the block, with the isolation that the inbox needs in place of that in DATABASES."""
        self._block.__enter__()
        self._open = True
        self._link.execute(Statement(ROOM, "begin"))

    def carry_out(self, flow: Flow[T]) -> T:
        """Run a flow of ours in it."""
        return run(flow, self._link)

    def call(self, function: Callable[[Any], Any]) -> None:
        """Call a handler with Django's connection."""
        with self.connection.execute_wrapper(self._note_deadlock):
            function(self.connection)
        check_usable(self.connection)

    def _note_deadlock(self, execute: Callable[..., Any], *statement: Any) -> Any:
        """A deadlock has rolled back the whole transaction, also if the handler passes over it."""
        try:
            return execute(*statement)
        except Exception as error:
            if error.args[:1] == (DEADLOCK,):
                self.connection.needs_rollback = True
            raise

    def write_out(self) -> None:
        """Django's ORM holds nothing back."""

    def commit(self) -> None:
        """The one commit there is."""
        failpoints.hit("consumer.commit.before")
        hooks_are_robust(self.connection)
        self._leave()
        self.committed = True
        failpoints.hit("consumer.commit.after")

    def roll_back(self) -> None:
        """Undo it, unless it has ended."""
        if self._open:
            with suppress(Exception):  # a connection that fails here is closed by Django
                self.connection.needs_rollback = True
                self._leave()

    def _leave(self) -> None:
        self._open = False
        self._block.__exit__(None, None, None)

    @property
    def broken(self) -> bool:
        """Whether the connection is gone: an error on it is not the handler's fault."""
        return self.connection.connection is None or is_closed(self.connection.connection)


class DjangoTransactions(Transactions):
    """Transactions of handlers on Django's connections, and of our own on engines of our own."""

    def __init__(self, alias: str, *given: Any, **how: Any) -> None:
        super().__init__(*given, **how)
        self._alias = alias
        self._idle: set[Any] = set()
        self._told = threading.local()  # the driver's connection that has its settings

    @contextmanager
    def begin_sync(self) -> Iterator[DjangoTransaction]:
        """A block of this thread's connection, rolled back unless it is committed inside."""
        with self._turn_in_thread:
            connection = connections[self._alias]
            self._idle.discard(connection)
            self._prepare(connection)
            tx = DjangoTransaction(connection)
            try:
                tx.begin()
                yield tx
            finally:
                tx.roll_back()
                self._rest(connection)
                self._idle.add(connection)

    def prepare_for_threads(self) -> None:
        """Django has its driver already."""

    async def close(self) -> None:
        """As above; a connection that a thread still works on ends with its thread."""
        await super().close()
        with suppress(Exception):
            async with asyncio.timeout(GOODBYE_SECONDS):
                await asyncio.to_thread(self._close_idle)  # Django refuses to in an event loop

    def _close_idle(self) -> None:
        while self._idle:
            connection = self._idle.pop()
            with suppress(Exception):
                connection.inc_thread_sharing()  # its own thread is idle, or has ended
                connection.close()

    def _prepare(self, connection: Any) -> None:
        """Connect, with the limits that the connections of other handlers have too."""
        self._rest(connection)
        connection.ensure_connection()
        driver = connection.connection
        if getattr(self._told, "driver", None) is not driver:
            self._set_limits(driver)
            self._told.driver = driver

    @staticmethod
    def _rest(connection: Any) -> None:
        """Do what Django does between two requests. A connection that would end with its request
        (CONN_MAX_AGE = 0) stays, unless a pool of Django's lends it: else the consumer would
        connect for every transaction."""
        settings = connection.settings_dict
        if settings["CONN_MAX_AGE"] == 0 and not (settings.get("OPTIONS") or {}).get("pool"):
            connection.close_at = None
        close_old_connections()


def check_usable(connection: Any) -> None:
    """Raise `WrongCall` if a handler left a transaction that can only be rolled back."""
    info = getattr(connection.connection, "info", None)
    if connection.needs_rollback or getattr(info, "transaction_status", None) == _IN_ERROR:
        raise WrongCall(
            "the handler rolled its transaction back, or passed over an error of the database: "
            "raise an error instead, or write `with transaction.atomic():` around the part that "
            "may fail"
        )


def hooks_are_robust(connection: Any) -> None:
    """Let no hook of `on_commit` keep the others from running, or look like a failed commit."""
    connection.run_on_commit = [
        (savepoints, hook, True) for savepoints, hook, *_ in connection.run_on_commit
    ]
