"""Handlers in a test: a message is handed to its consumer's handler, on the test's transaction.

No broker and no process take part. The message is encoded and decoded as on its way, the inbox
remembers it, and handler and inbox row are in a savepoint, so that a handler that fails leaves
nothing, as in production.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from typing import Any

from postroom.brokers.receiving import Delivery
from postroom.calling import must_have_run
from postroom.databases.kinds import bare, kind_of
from postroom.errors import InvalidMessage, WrongCall
from postroom.flow import Flow, Statement
from postroom.inbox.consumer import Consumer
from postroom.inbox.handlers import Handler
from postroom.inbox.once import once, once_async
from postroom.inbox.rules import Letter, letter_of
from postroom.messages import Draft, encode
from postroom.testing.looking import ROOM, Posted
from postroom.testing.running import on_connection, on_connection_async

__all__ = ["deliver", "deliver_async"]

_INSTEAD = "Write the handler with `async def` and await `deliver_async`."
_MARK = "postroom_deliver"


def deliver(
    consumer: Consumer, message: Any, tx: Any = None, *, attempt: int = 1, **wishes: Any
) -> bool:
    """Hand a message to the handler of a consumer; False: its id was handled before.

    `message` is an object of a declared class, a payload with `type=…` and other arguments of
    `publish`, or a message that `drain` returned. `tx` is the session or connection of the test; a
    consumer in a Django project uses Django's own by default. The handler's error is raised
    as it is.
    """
    handler, letter, content = _prepare(consumer, message, attempt, wishes)
    if handler.is_async:
        raise WrongCall(f"the handler of {letter.type} is async: await `deliver_async(...)`")
    tx = _transaction(consumer, tx)
    with _savepoint(tx):
        if not once(tx, consumer.name, letter.record):
            return False
        answer = handler.function(*handler.arguments(letter, content, tx))
        must_have_run(answer, handler.function, _INSTEAD)
        _check(tx)
    return True


async def deliver_async(
    consumer: Consumer, message: Any, tx: Any, *, attempt: int = 1, **wishes: Any
) -> bool:
    """`deliver` for async handlers, on an asynchronous session or connection."""
    handler, letter, content = _prepare(consumer, message, attempt, wishes)
    if not handler.is_async:
        raise WrongCall(f"the handler of {letter.type} is not async: call `deliver(...)`")
    async with _savepoint_async(tx):
        if not await once_async(tx, consumer.name, letter.record):
            return False
        answer = handler.function(*handler.arguments(letter, content, tx))
        if answer is not None:
            await answer
    return True


def _prepare(
    consumer: Consumer, message: Any, attempt: int, wishes: dict[str, Any]
) -> tuple[Handler, Letter, Any]:
    if isinstance(message, Posted):
        known = ("type", "topic", "key", "headers", "id", "content_type", "aggregate_type")
        wishes = {name: getattr(message, name) for name in known} | wishes
        message = message.payload
    encoded = encode(Draft(payload=message, **wishes))
    headers = dict(wishes.get("headers") or {})
    delivery = Delivery(
        id=encoded.id,
        type=encoded.type,
        topic=encoded.topic,
        key=encoded.key,
        content_type=encoded.content_type,
        headers={**headers, "event_id": encoded.id, "event_type": encoded.type},
        payload=encoded.payload,
        source="test",
        claim=1,
        seen=0,
        receipt=None,
    )
    letter = letter_of(delivery)._replace(attempts=attempt - 1)
    handler = consumer.handlers.find(letter.type)
    if handler is None:
        raise InvalidMessage(f"consumer {consumer.name} has no handler for {letter.type}")
    return handler, letter, consumer.handlers.content(handler, letter)


def _transaction(consumer: Consumer, tx: Any) -> Any:
    if tx is not None:
        return tx
    if consumer.gives != "django":
        raise WrongCall(
            "deliver needs the session or connection of the test: deliver(consumer, message, tx)"
        )
    from django.db import connections

    return connections[consumer.alias]


def _savepoint(tx: Any) -> AbstractContextManager[Any]:
    kind = kind_of(bare(tx))
    if kind.library == "django":
        from django.db import transaction

        return transaction.atomic(using=tx.alias)  # type: ignore[no-any-return]
    if kind.is_async:
        raise WrongCall(f"a {kind.name} is asynchronous: await `deliver_async(...)`")
    if kind.library == "sqlalchemy":
        return tx.begin_nested()  # type: ignore[no-any-return]
    return _marked(tx)


@contextmanager
def _marked(tx: Any) -> Iterator[None]:
    on_connection(tx, _mark("SAVEPOINT"), "deliver_async")
    try:
        yield
    except BaseException:
        on_connection(tx, _mark("ROLLBACK TO SAVEPOINT"), "deliver_async")
        raise
    on_connection(tx, _mark("RELEASE SAVEPOINT"), "deliver_async")


@asynccontextmanager
async def _savepoint_async(tx: Any) -> AsyncIterator[None]:
    if kind_of(bare(tx)).library == "sqlalchemy":
        async with tx.begin_nested():
            yield
        return
    await on_connection_async(tx, _mark("SAVEPOINT"))
    try:
        yield
    except BaseException:
        await on_connection_async(tx, _mark("ROLLBACK TO SAVEPOINT"))
        raise
    await on_connection_async(tx, _mark("RELEASE SAVEPOINT"))


def _mark(verb: str) -> Flow[None]:
    yield Statement(ROOM, "mark", {}, text=f"{verb} {_MARK}")


def _check(tx: Any) -> None:
    if kind_of(bare(tx)).library == "django":
        from postroom.inbox.django import check_usable

        check_usable(tx)
