"""Connections for keys in a Django project: an alias of DATABASES, resolved when it is used.

Promise: in Django's tests no statement goes to another database than the test's. Inside a
`TestCase`, whose transaction no other connection can see, keys are claimed on the connection of the
test and are rolled back with it.
"""

from __future__ import annotations

from typing import Any

from asgiref.sync import sync_to_async
from django.db import connections, transaction

from postroom.databases.django import DjangoLink
from postroom.flow import run
from postroom.framework import Framework
from postroom.idempotency.engines import Engines

__all__ = ["DjangoEngines"]


class DjangoEngines(Engines):
    """Engines for an alias of DATABASES."""

    def __init__(self, host: Framework, using: str | None, **how: Any) -> None:
        super().__init__(lambda: str(host.document(using)["database_url"]), **how)
        self._host, self._using = host, using

    @property
    def name(self) -> str:
        """As above."""
        return self._using or "default"

    async def ask_async(self, make: Any) -> Any:
        """As above; the connection of an asynchronous test is that of its own thread."""
        if await sync_to_async(self._in_test_case)():
            return await sync_to_async(self._ask_test)(make)
        return await super().ask_async(make)

    def ask(self, make: Any) -> Any:
        """As above."""
        return self._ask_test(make) if self._in_test_case() else super().ask(make)

    def _in_test_case(self) -> bool:
        blocks = connections[self._host.alias(self._using)].atomic_blocks
        return any(getattr(block, "_from_testcase", False) for block in blocks)

    def _ask_test(self, make: Any) -> Any:
        alias = self._host.alias(self._using)
        with transaction.atomic(using=alias):
            return run(make(), DjangoLink(connections[alias]))
