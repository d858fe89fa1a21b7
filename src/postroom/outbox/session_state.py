"""What a SQLAlchemy session is in the middle of, read without touching the database.

SQLAlchemy does not offer all of this publicly on every version we support; what is private is read
here and nowhere else: `SessionTransaction._connections` (the connections a transaction has, each
with its Core transaction), `_previous_nested` and `_savepoint` of `NestedTransaction`, and the
`binds` of SQLAlchemy 2.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

from sqlalchemy import exc
from sqlalchemy.engine import Connection, Engine, Transaction
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, SessionTransaction, scoped_session

from postroom.errors import NotWritten, SeveralBinds, WouldCommitAlone

__all__ = [
    "Bind",
    "begin",
    "boundary",
    "connection_of",
    "connections",
    "engines",
    "in_foreign_savepoint",
    "joined",
    "parent_boundary",
    "savepoints",
    "target",
    "unscoped",
    "unwrapped",
]

Bind: TypeAlias = Engine | Connection
AnySession: TypeAlias = "Session | scoped_session[Any] | AsyncSession | async_scoped_session[Any]"


def unscoped(session: AnySession) -> Session | AsyncSession:
    """The session itself, where a registry of one session per thread or task was given."""
    if isinstance(session, scoped_session | async_scoped_session):
        return session()  # type: ignore[no-any-return]
    return session


def unwrapped(session: AnySession) -> Session:
    """The synchronous session that does the work."""
    session = unscoped(session)
    return session.sync_session if isinstance(session, AsyncSession) else session


def begin(session: Session) -> None:
    """Begin as `session.add` does, so that what is published belongs to a transaction."""
    if session.in_transaction():
        root = session.get_transaction()
        if root is None or not root.is_active:
            raise NotWritten(
                "the session's transaction is prepared, ended or failed, so no message can join it "
                "any more: publish before the commit, or after the session has begun anew"
            )
    elif session.autobegin:
        session.begin()
    else:
        raise WouldCommitAlone(
            "this session has autobegin=False and is in no transaction: call session.begin() first"
        )


def boundary(session: Session) -> SessionTransaction:
    """The innermost transaction or savepoint of the session; what a flush opens is neither."""
    current = session.get_nested_transaction() or session.get_transaction()
    assert current is not None
    return current


def parent_boundary(transaction: SessionTransaction) -> SessionTransaction:
    """The transaction or savepoint around a savepoint."""
    parent = transaction.parent
    while parent is not None and not parent.nested and parent.parent is not None:
        parent = parent.parent
    assert parent is not None
    return parent


def target(session: Session, bind: Bind | None) -> Bind:
    """The engine or connection that holds the outbox, or an error that asks for it."""
    binds = _binds(session)
    try:
        binds.append(session.get_bind())
    except exc.UnboundExecutionError:
        if not binds and bind is None:
            raise SeveralBinds(
                "this session does not say which database it writes to: "
                "name the one that holds the outbox, Outbox(bind=engine)"
            ) from None
    if bind is not None:
        # The session may know the same database as a connection, or with other options.
        return next((own for own in binds if own.engine.pool is bind.engine.pool), bind)
    if len({each.engine for each in binds} | engines(session)) > 1:
        raise SeveralBinds
    return binds[-1]


def _binds(session: Session) -> list[Bind]:
    found: Any = getattr(session, "_Session__binds", None)
    if found is None:
        found = session.binds  # public since SQLAlchemy 2.1
    return list(found.values())


def engines(session: Session) -> set[Engine]:
    """The engines whose connections take part in the session's transaction."""
    root = session.get_transaction()
    return {connection.engine for connection, _ in _joined(root)} if root is not None else set()


def connections(session: Session) -> list[Connection]:
    """The connections that take part in the session's transaction."""
    root = session.get_transaction()
    return [connection for connection, _ in _joined(root)] if root is not None else []


def savepoints(connection: Connection) -> frozenset[str]:
    """The names of the savepoints that are open on a connection."""
    names = []
    nested: Any = connection.get_nested_transaction()
    while nested is not None:
        names.append(nested._savepoint)
        nested = nested._previous_nested
    return frozenset(names)


def connection_of(session: Session, bind: Bind) -> Connection | None:
    """The connection the session has for a bind, or is bound to; None if it is still to come."""
    root = session.get_transaction()
    for connection, _ in _joined(root) if root is not None else ():
        if connection.engine is bind.engine:
            return connection
    return bind if isinstance(bind, Connection) else None


def joined(session: Session, connection: Connection) -> Transaction | None:
    """The Core transaction with which the session's own begins and ends on a connection."""
    root = session.get_transaction()
    return _core_of(root, connection) if root is not None else None


def in_foreign_savepoint(session: Session, connection: Connection) -> bool:
    """Whether a savepoint that the session does not know of is open on its connection.

    Its rollback would take along what is written inside, without a word to the session.
    """
    outermost = joined(session, connection)
    nested: Any = connection.get_nested_transaction()
    if outermost is None:
        return False
    known = [_core_of(transaction, connection) for transaction in _boundaries(session)]
    while nested is not None and nested is not outermost:
        if not any(nested is each for each in known):
            return True
        nested = nested._previous_nested
    return False


def _boundaries(session: Session) -> Iterator[SessionTransaction]:
    current: SessionTransaction | None = boundary(session)
    while current is not None:
        yield current
        current = current.parent


def _joined(transaction: SessionTransaction) -> set[tuple[Connection, Transaction]]:
    return {(entry[0], entry[1]) for entry in transaction._connections.values()}


def _core_of(transaction: SessionTransaction, connection: Connection) -> Transaction | None:
    return next((core for each, core in _joined(transaction) if each is connection), None)
