"""What the pytest fixture `mailroom` gives a test: looking, delivering and time, in one hand."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from functools import cached_property
from typing import Any

from postroom.brokers.memory import MemoryBroker
from postroom.testing.clock import Clock
from postroom.testing.delivery import drain, drain_async
from postroom.testing.looking import Posted, published, published_async
from postroom.testing.receiving import deliver, deliver_async

__all__ = ["Mailroom"]


class Mailroom:
    """One test's view of the outbox. `url` is asked for only when a call needs it."""

    def __init__(self, url: Callable[[], str]) -> None:
        self._url = url

    @cached_property
    def url(self) -> str:
        """The database of the test, from the fixture `postroom_url`."""
        return self._url()

    @cached_property
    def broker(self) -> MemoryBroker:
        """The broker of this test; `broker.fail(…)` makes it refuse."""
        return MemoryBroker(f"mailroom-{uuid.uuid4().hex[:12]}")

    @cached_property
    def clock(self) -> Clock:
        """The clock of the database."""
        return Clock(self.url)

    def clock_of(self, tx: Any) -> Clock:
        """The clock as one session or connection sees it; its rollback takes it back."""
        return Clock(tx)

    def published(self, tx: Any, type: str | None = None, **how: Any) -> list[Posted]:
        """What was published, as `tx` sees it."""
        return published(tx, type, **how)

    async def published_async(self, tx: Any, type: str | None = None, **how: Any) -> list[Posted]:
        """What was published, as `tx` sees it; queued messages too."""
        return await published_async(tx, type, **how)

    def drain(self, tx: Any = None, **settings: Any) -> list[Posted]:
        """Deliver what is due: from the database to `broker`, or out of the transaction of `tx`."""
        if tx is not None:
            return drain(tx, **settings)
        return drain(self.url, self.broker, **settings)

    async def drain_async(self, tx: Any = None, **settings: Any) -> list[Posted]:
        """`drain` in an event loop."""
        if tx is not None:
            return await drain_async(tx, **settings)
        return await drain_async(self.url, self.broker, **settings)

    def deliver(self, consumer: Any, message: Any, tx: Any = None, **wishes: Any) -> bool:
        """Hand a message to the handler of a consumer, on `tx`; False: it was handled before."""
        return deliver(consumer, message, tx, **wishes)

    async def deliver_async(self, consumer: Any, message: Any, tx: Any, **wishes: Any) -> bool:
        """`deliver` for async handlers."""
        return await deliver_async(consumer, message, tx, **wishes)
