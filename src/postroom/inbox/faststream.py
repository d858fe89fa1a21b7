"""Middleware for FastStream: each message is handled once, in a transaction its handler is given.

    from postroom.inbox.faststream import Inbox

    broker = NatsBroker("nats://localhost:4222", middlewares=[Inbox("billing", engine)])

    @broker.subscriber("orders")
    async def bill(order: Order, tx: Annotated[AsyncSession, Context()]) -> None: ...

The row of the inbox and the handler's effect commit together. A copy is acknowledged and not handed
on. Each handler is a consumer of its own: two subscribers of one subject both get a message. What
becomes of a handler that fails is FastStream's to say: its transaction is rolled back.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from postroom.brokers.receiving import plain_headers
from postroom.errors import ConfigurationError, InvalidMessage, MissingDriver
from postroom.inbox.once import once_async

try:
    from faststream import BaseMiddleware
except ImportError:
    raise MissingDriver("this needs FastStream: pip install 'postroom[faststream]'") from None

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

__all__ = ["Inbox"]


class Inbox:
    """The inbox of one consumer, for `middlewares=[…]` of a broker or router.

    `engine` is where the inbox is, and where handlers work: they find the session in FastStream's
    context under the name `tx`, or as `context_name` says.

    What was handled is remembered for `consumer` and the handler's name, `billing:app.orders.bill`.
    A handler that is renamed or moved is a new one, and handles what comes again from before. With
    `per_handler=False` it is remembered for `consumer` alone: a message goes to one handler then,
    whichever has it first, so let no two of them receive the same.
    """

    def __init__(
        self,
        consumer: str,
        engine: AsyncEngine,
        *,
        context_name: str = "tx",
        per_handler: bool = True,
    ) -> None:
        self.consumer = consumer
        self.engine = engine
        self.context_name = context_name
        self.per_handler = per_handler

    def __call__(self, msg: Any, /, *, context: Any) -> _Middleware:
        return _Middleware(msg, context=context, inbox=self)


class _Middleware(BaseMiddleware[Any, Any]):
    """Around one message."""

    def __init__(self, msg: Any, /, *, context: Any, inbox: Inbox) -> None:
        super().__init__(msg, context=context)
        self._inbox = inbox

    async def consume_scope(self, call_next: Any, msg: Any) -> Any:
        from sqlalchemy.ext.asyncio import AsyncSession

        inbox, id = self._inbox, _id_of(msg)
        name = inbox.consumer
        if inbox.per_handler:
            name = f"{name}:{_handler_name(self.context.get_local('handler_'))}"
        async with AsyncSession(inbox.engine, expire_on_commit=False) as session, session.begin():
            if not await once_async(session, name, id, content=bytes(msg.body)):
                return None
            with self.context.scope(inbox.context_name, session):
                return await call_next(msg)


def _id_of(msg: Any) -> str:
    """The id its publisher gave it; what FastStream makes up by itself is new each time."""
    given = ((str(name), str(value)) for name, value in (msg.headers or {}).items())
    headers = plain_headers(given)
    id = headers.get("ce-id") or headers.get("event_id") or headers.get("nats-msg-id")
    if not id:
        raise InvalidMessage("the message has no id: its publisher must give it a header event_id")
    return id


def _handler_name(subscriber: Any) -> str:
    """What a subscriber calls, by module and name; the first of those that share it by filters."""
    calls = getattr(subscriber, "calls", None)
    if not calls:
        raise ConfigurationError(
            "this version of FastStream does not say whose message it is: give each subscriber an "
            "Inbox of its own, with per_handler=False"
        )
    function = inspect.unwrap(calls[0].handler._original_call)
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return f"{getattr(function, '__module__', None) or '?'}.{name}"
