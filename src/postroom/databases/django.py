"""Django's connections: `connections["default"]`, or `django.db.connection`, which stands for it.

Statements run on the driver's own connection with a cursor of our own, so that cursor classes and
factories in OPTIONS do not matter. Everything else is Django's to say: whether a transaction is
open or broken, which thread may use it, what its errors are called, and when it has committed.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from postroom.databases.kinds import link_of
from postroom.databases.sql import DIALECTS
from postroom.errors import UnknownConnection, WrongCall
from postroom.flow import Link, Rows, Statement

__all__ = ["DjangoLink", "dialect_of", "is_set_up"]


def is_set_up() -> bool:
    """Whether Django's apps are loaded in this process, so that its ORM can be used."""
    registry = sys.modules.get("django.apps")
    return registry is not None and bool(registry.apps.ready)


def dialect_of(connection: Any) -> str:
    """The dialect of a Django connection, or an error if it is not one we speak."""
    if connection.vendor not in DIALECTS:
        raise UnknownConnection(
            f"Postroom speaks PostgreSQL, MariaDB and SQLite, not {connection.vendor}, which is "
            f"the database {connection.alias!r} of DATABASES: choose another one"
        )
    return str(connection.vendor)


class DjangoLink:
    """Carries out statements on the connection of a Django `DatabaseWrapper`."""

    def __init__(self, connection: Any) -> None:
        self.connection = _itself(connection)
        self.dialect = dialect_of(self.connection)
        _refuse_in_event_loop()

    @property
    def begin(self) -> str:
        """What to write to be in a transaction on this very database."""
        alias = self.connection.alias
        using = "" if alias == "default" else f"using={alias!r}"
        return f"write `with transaction.atomic({using}):` around it, or set ATOMIC_REQUESTS"

    def commits_alone(self) -> bool:
        """An atomic block is a transaction; else Django's autocommit decides."""
        return not self.connection.in_atomic_block and bool(self.connection.get_autocommit())

    def execute(self, statement: Statement) -> Rows:
        connection = self.connection
        connection.validate_thread_sharing()
        connection.validate_no_broken_transaction()
        connection.close_if_health_check_failed()
        connection.ensure_connection()
        try:
            with connection.wrap_database_errors:
                link: Link = link_of(connection.connection)
                return link.execute(statement)
        except Exception as error:
            # As after a failed save(): a block that goes on regardless commits no half a publish.
            if connection.in_atomic_block:
                connection.needs_rollback = True
                connection.rollback_exc = error
            raise

    def after_commit(self, number: int, tell: Callable[[int], None]) -> None:
        """Have `tell` called with how many were published, once their transaction is committed.

        What shares a fate shares a call: there is one for the transaction, and one for each
        savepoint in it that published anything.
        """
        connection = self.connection
        if not connection.in_atomic_block:
            return  # commits by hand, which Django tells nobody of
        around = set(connection.savepoint_ids)
        for savepoints, call, *_ in reversed(connection.run_on_commit):
            if isinstance(call, _Count) and savepoints == around:
                call.number += number
                return
        connection.on_commit(_Count(number, tell))


@dataclass(eq=False, slots=True)
class _Count:
    """How many messages one savepoint, or the transaction around all, has published so far."""

    number: int
    tell: Callable[[int], None]

    def __call__(self) -> None:
        self.tell(self.number)


def _itself(connection: Any) -> Any:
    """The connection that a proxy stands for in this thread; any method knows whose it is."""
    method = getattr(connection, "ensure_connection", None)
    if method is None:  # `django.core.cache.cache` is a proxy of the same class
        raise UnknownConnection(
            "this proxy of Django's stands for no database: give it django.db.connection, "
            "or connections['default']"
        )
    return method.__self__


def _refuse_in_event_loop() -> None:
    """As Django does, but before anything is done, and with the remedy for publishing."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    if not os.environ.get("DJANGO_ALLOW_ASYNC_UNSAFE"):
        raise WrongCall(
            "Django's connections are synchronous and this is asynchronous code: put the whole "
            "transaction, publish included, into one function and write "
            "`await sync_to_async(place_order)(...)`"
        )
