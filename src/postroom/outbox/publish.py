"""Publishing: a message written on the caller's own transaction, so that it exists if and only if
the caller's change does."""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from postroom.databases.caller import refuse_alone
from postroom.databases.kinds import Kind, bare, find_kind, kind_of
from postroom.errors import ConfigurationError, InvalidMessage, WrongCall, with_article
from postroom.flow import Flow, T, run, run_async
from postroom.messages import DEFAULT_MAX_BYTES, Draft, check_topic, encode
from postroom.outbox import wake, writing
from postroom.outbox.writing import Item, Published

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection, Engine
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

__all__ = ["Outbox", "Published"]


class Outbox:
    """Writes messages on your own session or connection. Makes no connection and holds no state.

    `bind` says which engine holds the outbox when a session has several; `routes` maps patterns of
    message types to topics (`{"order.*": "orders"}`, the first that fits); `max_bytes` limits
    payload and headers together. `notify` is the URL of the PostgreSQL database: relays of other
    processes are then woken after each commit, over a connection of its own.
    """

    def __init__(
        self,
        *,
        bind: Engine | Connection | AsyncEngine | AsyncConnection | None = None,
        routes: Mapping[str, str] | None = None,
        max_bytes: int = DEFAULT_MAX_BYTES,
        notify: str | None = None,
    ) -> None:
        if notify is not None:
            from postroom.outbox.notify import Notifier

            wake.listen(Notifier(notify).hint)
        # Events live on SQLAlchemy's synchronous side, which the asynchronous one wraps.
        self._bind: Any = getattr(bind, "sync_engine", None) or bind
        self._bind = getattr(bind, "sync_connection", None) or self._bind
        self._routes = dict(routes or {})
        self._max_bytes = max_bytes
        for pattern, topic in self._routes.items():
            try:
                check_topic(topic)
            except InvalidMessage as error:
                raise ConfigurationError(f"routes[{pattern!r}]: {error}") from None

    def publish(
        self,
        tx: Any,
        payload: Any,
        *,
        type: str | None = None,
        topic: str | None = None,
        key: str | None = None,
        aggregate_type: str | None = None,
        aggregate_id: str | None = None,
        sequence: int | None = None,
        headers: Mapping[str, str] | None = None,
        content_type: str | None = None,
        deliver_at: dt.datetime | None = None,
        expires_at: dt.datetime | None = None,
        serialize_key: bool = False,
        dedup_key: str | None = None,
        id: str | uuid.UUID | None = None,
    ) -> Published:
        """Write a message on `tx`, your session or connection, and return its id.

        On an `AsyncSession` the message is queued and written with the session's commit; on any
        other asynchronous connection use `publish_async`. An error of the database passes through
        as it is: roll back, as after any failed statement.
        """
        draft = Draft(
            payload=payload,
            type=type,
            topic=topic,
            key=key,
            aggregate_type=aggregate_type,
            aggregate_id=aggregate_id,
            sequence=sequence,
            headers=headers or {},
            content_type=content_type,
            deliver_at=deliver_at,
            expires_at=expires_at,
            dedup_key=dedup_key,
            id=id,
        )
        return self._put(tx, [self._item(draft, serialize_key)])[0]

    async def publish_async(
        self,
        tx: Any,
        payload: Any,
        *,
        type: str | None = None,
        topic: str | None = None,
        key: str | None = None,
        aggregate_type: str | None = None,
        aggregate_id: str | None = None,
        sequence: int | None = None,
        headers: Mapping[str, str] | None = None,
        content_type: str | None = None,
        deliver_at: dt.datetime | None = None,
        expires_at: dt.datetime | None = None,
        serialize_key: bool = False,
        dedup_key: str | None = None,
        id: str | uuid.UUID | None = None,
    ) -> Published:
        """`publish` on any kind of session or connection: it writes at once, on all of them."""
        draft = Draft(
            payload=payload,
            type=type,
            topic=topic,
            key=key,
            aggregate_type=aggregate_type,
            aggregate_id=aggregate_id,
            sequence=sequence,
            headers=headers or {},
            content_type=content_type,
            deliver_at=deliver_at,
            expires_at=expires_at,
            dedup_key=dedup_key,
            id=id,
        )
        return (await self._put_async(tx, [self._item(draft, serialize_key)]))[0]

    def publish_many(
        self, tx: Any, messages: Iterable[Any], *, serialize_key: bool = False
    ) -> list[Published]:
        """Write many messages in one statement, in their order.

        Each is a message of a declared type, or a `Draft` that says more about it.
        """
        return self._put(tx, self._items(messages, serialize_key))

    async def publish_many_async(
        self, tx: Any, messages: Iterable[Any], *, serialize_key: bool = False
    ) -> list[Published]:
        """`publish_many` on any kind of session or connection; writes at once."""
        return await self._put_async(tx, self._items(messages, serialize_key))

    def committed(self, *published: Published) -> None:
        """Tell of your own commit on a driver's connection, right after it: relays wake at once,
        and the messages are counted as enqueued. SQLAlchemy and Django tell by themselves.
        """
        wake.committed(sum(not each.duplicate for each in published))

    def wake(self) -> None:
        """Wake relays after a commit on a driver's own connection, which tells nobody of it.

        Never needed: a relay that is not woken finds the message at its next look.
        """
        wake.hint()

    def was_committed(self, tx: Any, message: str | uuid.UUID | Published) -> bool:
        """Whether a message was committed, after a COMMIT whose answer was lost.

        Ask on a new connection, once the old one is gone: a transaction sees its own messages, and
        a server that is still at work on the COMMIT has not decided yet.
        """
        tx = bare(tx, to_write=False)
        return _run(kind_of(tx), tx, writing.is_committed(_id_of(message)))

    async def was_committed_async(self, tx: Any, message: str | uuid.UUID | Published) -> bool:
        """`was_committed` on any kind of session or connection."""
        tx = bare(tx, to_write=False)
        kind = kind_of(tx)
        flow = writing.is_committed(_id_of(message))
        if not kind.is_async:
            return _run(kind, tx, flow)
        return await run_async(flow, kind.link(tx))

    def _items(self, messages: Iterable[Any], serialize_key: bool) -> list[Item]:
        return [
            self._item(each if isinstance(each, Draft) else Draft(payload=each), serialize_key)
            for each in messages
        ]

    def _item(self, draft: Draft, serialize_key: bool) -> Item:
        try:
            message = encode(draft, route=self._route, max_bytes=self._max_bytes)
        except InvalidMessage:
            if find_kind(draft.payload) is not None:
                given = with_article(type(draft.payload).__name__)
                raise WrongCall(
                    f"{given} is not a message: the session or connection comes first, "
                    "`publish(session, message)`"
                ) from None
            raise
        if serialize_key and message.key is None:
            raise InvalidMessage(
                f"serialize_key needs a key, and this {message.type} has none: pass key=..., "
                "or leave serialize_key out"
            )
        return writing.item(message, serialize_key=serialize_key, chosen_id=draft.id is not None)

    def _route(self, type_name: str) -> str | None:
        for pattern, topic in self._routes.items():
            if fnmatchcase(type_name, pattern):
                return topic
        return None

    def _put(self, tx: Any, items: list[Item]) -> list[Published]:
        tx = bare(tx)
        kind = kind_of(tx)
        if kind.is_session:
            from postroom.outbox import sessions

            put = sessions.queue if kind.is_async else sessions.write_now
            put(sessions.unwrapped(tx), items, self._bind)
        elif kind.is_async:
            raise WrongCall(
                f"{with_article(kind.name)} is asynchronous: "
                "write `await outbox.publish_async(...)`"
            )
        else:
            _write(kind, tx, items)
        return [item.published for item in items]

    async def _put_async(self, tx: Any, items: list[Item]) -> list[Published]:
        tx = bare(tx)
        kind = kind_of(tx)
        if not kind.is_async:
            return self._put(tx, items)
        if kind.is_session:
            from postroom.outbox import sessions

            session: Any = sessions.unscoped(tx)
            await session.run_sync(sessions.write_now, items, self._bind)
        elif kind.library == "sqlalchemy":
            await tx.run_sync(lambda connection: _write(kind_of(connection), connection, items))
        elif items:
            link = kind.link(tx)
            refuse_alone(kind, link, "message")
            await run_async(writing.write(items), link)
        return [item.published for item in items]


def _write(kind: Kind, connection: Any, items: list[Item]) -> None:
    if items and kind.library == "sqlalchemy":
        from postroom.outbox import counting, sessions

        sessions.before_core_write(connection)
        _write_on(kind, connection, items)
        counting.written(connection, items)
    elif items:
        link = _write_on(kind, connection, items)
        if kind.library == "django":
            number = sum(not item.published.duplicate for item in items)
            link.after_commit(number, wake.committed)


def _write_on(kind: Kind, connection: Any, items: list[Item]) -> Any:
    link = kind.link(connection)
    refuse_alone(kind, link, "message")
    run(writing.write(items), link)
    return link


def _run(kind: Kind, tx: Any, flow: Flow[T]) -> T:
    if kind.is_async:
        raise WrongCall(
            f"{with_article(kind.name)} is asynchronous: write `await outbox.was_committed_async()`"
        )
    return run(flow, kind.link(tx))


def _id_of(message: str | uuid.UUID | Published) -> str:
    text = message.id if isinstance(message, Published) else str(message)
    try:
        return str(uuid.UUID(text))
    except ValueError:
        raise InvalidMessage(f"an id is a UUID, not {text!r}") from None
