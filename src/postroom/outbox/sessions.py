"""Publishing on SQLAlchemy sessions: at once on a `Session`, queued on an `AsyncSession`.

A queued message belongs to the transaction or savepoint it was published in and shares its fate:

    queued ──write──► written ──commit──► committed
      │ ▲                │
      │ └── a savepoint around the write was rolled back, though not the message's own
      └── its own transaction or savepoint was rolled back: dropped

The queue is written by one statement in the root `before_commit`; before that by any immediate
publish on the same session or its connection, so that call order holds. No mapped class is
involved, so nothing the user does to the objects of the session touches it. If a queued message can
no longer be written, the commit is refused: never is one lost in silence.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy import event
from sqlalchemy.orm import Session, SessionTransaction
from sqlalchemy.util.concurrency import in_greenlet

from postroom.databases.kinds import kind_of
from postroom.databases.sqlalchemy import SQLAlchemyLink, manner_of, session_link
from postroom.errors import NotWritten, SeveralBinds, WouldCommitAlone
from postroom.flow import run
from postroom.messages import Encoded
from postroom.outbox import counting
from postroom.outbox import session_state as state
from postroom.outbox.session_state import Bind, unscoped, unwrapped
from postroom.outbox.writing import Item, write

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection, Engine, Transaction

__all__ = [
    "before_core_write",
    "queue",
    "queued",
    "unscoped",
    "unwrapped",
    "write_now",
]


@dataclass(slots=True, eq=False)
class _Entry:
    """A queued message: whose fate it shares, and where it was written if it was."""

    item: Item
    bind: Bind
    owner: SessionTransaction
    anchor: Transaction | None
    written_in: SessionTransaction | None = None


@dataclass(slots=True, eq=False)
class _Tray:
    """What was published in the present transaction of one session."""

    entries: list[_Entry] = field(default_factory=list)
    engine: Engine | None = None  # the one in play, where the outbox names none
    committing: bool = False
    committed: SessionTransaction | None = None
    failed_in: SessionTransaction | None = None

    def waiting(self) -> list[_Entry]:
        return [entry for entry in self.entries if entry.written_in is None]


_trays: WeakKeyDictionary[Session, _Tray] = WeakKeyDictionary()
_guarded: WeakKeyDictionary[Connection, WeakSet[Session]] = WeakKeyDictionary()


def queue(session: Session, items: Iterable[Item], bind: Bind | None) -> None:
    """Queue messages on the session of an `AsyncSession`, without touching the database."""
    state.begin(session)
    tray = _trays.setdefault(session, _Tray())
    if tray.committing and in_greenlet():
        # A listener of the user's, called while the commit goes on: the queue is written already.
        return write_now(session, items, bind)
    goal = state.target(session, bind)
    connection = state.connection_of(session, goal)
    _refuse_unwritable(session, goal, connection)
    anchor = None
    if connection is not None:
        _guard(session, connection)
        if state.joined(session, connection) is None:
            anchor = connection.get_nested_transaction() or connection.get_transaction()
    if bind is None:
        tray.engine = goal.engine
    owner = state.boundary(session)
    tray.entries += [_Entry(item, goal, owner, anchor) for item in items]
    return None


def queued(session: Session) -> list[Encoded]:
    """What a session has queued and not written yet, in the order of the calls."""
    tray = _trays.get(session)
    return [entry.item.message for entry in tray.waiting()] if tray is not None else []


def write_now(session: Session, items: Iterable[Item], bind: Bind | None) -> None:
    """Write messages at once on the session's connection, what is queued first."""
    state.begin(session)
    goal = state.target(session, bind)
    tray = _trays.setdefault(session, _Tray())
    _write_queue(session, tray)
    if bind is None:
        tray.engine = goal.engine
    _write(session, tray, goal, list(items))


def before_core_write(connection: Connection) -> None:
    """Before a write on a Core connection: what sessions on it have queued goes first."""
    for session in list(_guarded.get(connection, ())):
        if (tray := _trays.get(session)) is not None:
            _write_queue(session, tray)


def _refuse_unwritable(session: Session, goal: Bind, connection: Connection | None) -> None:
    manner_of(goal.dialect)
    if connection is None:
        wanted = goal.get_execution_options().get("isolation_level") or getattr(
            goal.dialect, "_on_connect_isolation_level", None
        )
        alone = wanted == "AUTOCOMMIT"
    else:
        alone = connection.in_transaction() and SQLAlchemyLink(connection).commits_alone()
    if alone:
        _raise_alone(session)
    if connection is not None and state.in_foreign_savepoint(session, connection):
        raise NotWritten(
            "the session's connection is inside a savepoint opened with connection.begin_nested(), "
            "whose rollback the session would not see: write `await outbox.publish_async(...)`, or "
            "open the savepoint with session.begin_nested()"
        )


def _raise_alone(session: Session) -> None:
    raise WouldCommitAlone(
        f"the connection of this {type(session).__name__} commits every statement by itself, so "
        f"the message would not share the fate of your change: {kind_of(session).begin}"
    )


def _write_queue(session: Session, tray: _Tray) -> None:
    """Write what is queued, in order, by one statement for each database."""
    waiting = tray.waiting()
    for entry in waiting:
        if entry.anchor is not None and not entry.anchor.is_active:
            raise NotWritten(
                "the transaction or savepoint of the outer connection in which a message was "
                "published has ended, so the commit is refused: end the session inside it"
            )
        connection = state.connection_of(session, entry.bind)
        if connection is not None and state.in_foreign_savepoint(session, connection):
            raise NotWritten(
                "messages queued before a savepoint of connection.begin_nested() cannot be written "
                "inside it, lest its rollback take them along: end it first, use "
                "session.begin_nested(), or publish them with `await outbox.publish_async(...)`"
            )
    for goal in dict.fromkeys(entry.bind for entry in waiting):
        entries = [entry for entry in waiting if entry.bind is goal]
        _write(session, tray, goal, [entry.item for entry in entries])
        for entry in entries:
            entry.written_in = state.boundary(session)


def _write(session: Session, tray: _Tray, goal: Bind, items: list[Item]) -> None:
    if not items:
        return
    link = session_link(session, goal)
    core = state.joined(session, link.connection)
    if core is not None and not core.is_active:
        raise NotWritten(
            "the session's connection was committed or rolled back behind its back, so the message "
            "can no longer join the session's transaction: roll the session back"
        )
    if link.commits_alone():
        _raise_alone(session)
    try:
        run(write(items), link)
    except BaseException:
        tray.failed_in = state.boundary(session)
        raise
    counting.written(link.connection, items)


# What follows listens to every session of the process and cares for those with a tray.


def _before_commit(session: Session) -> None:
    tray = _trays.get(session)
    if tray is None:
        return
    if tray.failed_in is state.boundary(session):
        raise NotWritten(
            "writing a message failed in this transaction, so the commit is refused, lest your "
            "change be committed without it: roll back and try again"
        )
    if not session.in_nested_transaction():
        _write_queue(session, tray)
        tray.committing = True
        for connection in state.connections(session):
            counting.expect(connection)


def _after_commit(session: Session) -> None:
    tray = _trays.get(session)
    if tray is None:
        return
    tray.committed = state.boundary(session)
    if session.in_nested_transaction():
        return
    if waiting := tray.waiting():
        raise _not_written(waiting)
    for connection in state.connections(session):
        counting.certain(connection)


def _after_transaction_end(session: Session, transaction: SessionTransaction) -> None:
    tray = _trays.get(session)
    if tray is None or (transaction.parent is not None and not transaction.nested):
        return
    if transaction.parent is None:
        del _trays[session]
    elif transaction is tray.committed:
        _hand_over(tray, transaction, state.parent_boundary(transaction))
    else:
        _drop(tray, transaction)


def _hand_over(tray: _Tray, savepoint: SessionTransaction, parent: SessionTransaction) -> None:
    for entry in tray.entries:
        if entry.owner is savepoint:
            entry.owner = parent
        if entry.written_in is savepoint:
            entry.written_in = parent


def _drop(tray: _Tray, savepoint: SessionTransaction) -> None:
    """Forget a savepoint's messages, and queue again what others had written inside it."""
    tray.entries = [entry for entry in tray.entries if entry.owner is not savepoint]
    for entry in tray.entries:
        if entry.written_in is savepoint:
            entry.written_in = None
            entry.item.untell()
    if tray.failed_in is savepoint:
        tray.failed_in = None


def _after_begin(session: Session, transaction: SessionTransaction, connection: Connection) -> None:
    tray = _trays.get(session)
    if tray is None:
        return
    if tray.engine is not None and connection.engine is not tray.engine:
        raise SeveralBinds
    if tray.waiting():
        _guard(session, connection)


def _guard(session: Session, connection: Connection) -> None:
    """Refuse commits of this connection that would leave behind what the session has queued."""
    sessions = _guarded.get(connection)
    if sessions is None:
        _guarded[connection] = sessions = WeakSet()
        event.listen(connection, "commit", _refuse_commit)
        event.listen(connection, "prepare_twophase", _refuse_prepare)
        event.listen(connection, "commit_twophase", _refuse_commit_twophase)
    sessions.add(session)


def _left_behind(connection: Connection) -> list[_Entry]:
    trays = [_trays.get(session) for session in _guarded.get(connection, ())]
    return [entry for tray in trays if tray is not None for entry in tray.waiting()]


def _refuse_commit(connection: Connection) -> None:
    if waiting := _left_behind(connection):
        # SQLAlchemy holds a transaction whose commit failed for ended, so the driver must end it.
        connection.connection.rollback()
        raise _not_written(waiting)


def _refuse_prepare(connection: Connection, xid: Any) -> None:
    if waiting := _left_behind(connection):
        raise _not_written(waiting)


def _refuse_commit_twophase(connection: Connection, xid: Any, is_prepared: bool) -> None:
    if waiting := _left_behind(connection):
        connection.dialect.do_rollback_twophase(connection, xid, is_prepared)
        raise _not_written(waiting)


def _not_written(waiting: list[_Entry]) -> NotWritten:
    return NotWritten(
        f"{len(waiting)} queued message(s) would be left behind, so this commit is refused: commit "
        "the session itself and end its savepoints first, or publish with "
        "`await outbox.publish_async(...)`, which writes at once"
    )


for _name, _listener in (
    ("before_commit", _before_commit),
    ("after_commit", _after_commit),
    ("after_begin", _after_begin),
    ("after_transaction_end", _after_transaction_end),
):
    event.listen(Session, _name, _listener)
