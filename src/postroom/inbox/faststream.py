"""Middleware for FastStream: each message is handled once, in a transaction its handler is given.

    from postroom.inbox.faststream import Inbox

    broker = NatsBroker("nats://localhost:4222", middlewares=[Inbox("billing", engine)])

    @broker.subscriber("orders")
    async def bill(order: Order, tx: Annotated[AsyncSession, Context()]) -> None: ...

The row of the inbox and the handler's effect commit together. A copy is acknowledged and not handed
on. What becomes of a handler that fails is FastStream's to say: its transaction is rolled back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from postroom.errors import InvalidMessage, MissingDriver
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
    """

    def __init__(self, consumer: str, engine: AsyncEngine, *, context_name: str = "tx") -> None:
        self.consumer = consumer
        self.engine = engine
        self.context_name = context_name

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
        async with AsyncSession(inbox.engine, expire_on_commit=False) as session, session.begin():
            if not await once_async(session, inbox.consumer, id, content=bytes(msg.body)):
                return None
            with self.context.scope(inbox.context_name, session):
                return await call_next(msg)


def _id_of(msg: Any) -> str:
    """The id its publisher gave it; what FastStream makes up by itself is new each time."""
    headers = {str(name).lower(): str(value) for name, value in (msg.headers or {}).items()}
    id = headers.get("ce-id") or headers.get("event_id") or headers.get("nats-msg-id")
    if id is None:
        raise InvalidMessage("the message has no id: its publisher must give it a header event_id")
    return id
