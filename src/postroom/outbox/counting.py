"""Counting what was committed on SQLAlchemy connections: never what was rolled back, and never a
commit that failed.

    written ──commit──► committing ──the connection's next step──► committed: counted
       │                    └── the commit failed: forgotten
       └── rolled back, or the savepoint around it: forgotten

Core tells of a commit just before it happens, and not when it is done. So a commit is certain at
the next thing that happens: the session says that it has committed, the connection begins again, or
it goes back to its pool. The hint that wakes relays waits only for a session's word.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy import event
from sqlalchemy.engine import Connection, Dialect, Engine, ExceptionContext

from postroom.outbox import session_state as state
from postroom.outbox import wake
from postroom.outbox.writing import Item

__all__ = ["certain", "expect", "written"]


@dataclass(slots=True, eq=False)
class _Count:
    """What was published in the present transaction of a connection, by the savepoints around."""

    written: list[tuple[frozenset[str], int]] = field(default_factory=list)
    committing: int = 0
    expected: bool = False


_counts: WeakKeyDictionary[Connection, _Count] = WeakKeyDictionary()
# A connection on its way back to the pool is known there by its record.
_by_record: WeakKeyDictionary[Any, _Count] = WeakKeyDictionary()
_engines: WeakSet[Engine] = WeakSet()
_dialects: WeakSet[Dialect] = WeakSet()


def written(connection: Connection, items: Iterable[Item]) -> None:
    """Messages were written on the connection; duplicates were not."""
    count = _counts.get(connection)
    if count is None:
        count = _counts[connection] = _Count()
        _listen(connection)
    number = sum(not item.published.duplicate for item in items)
    count.written.append((state.savepoints(connection), number))


def expect(connection: Connection) -> None:
    """A session is about to commit this connection, and will say when it is done."""
    if (count := _counts.get(connection)) is not None:
        count.expected = True


def certain(connection: Connection) -> None:
    """A commit of this connection, if there was one, is done."""
    if (count := _counts.get(connection)) is not None:
        _tell(count)


def _listen(connection: Connection) -> None:
    event.listen(connection, "begin", certain)
    event.listen(connection, "commit", _on_commit)
    event.listen(connection, "commit_twophase", _on_commit_twophase)
    event.listen(connection, "rollback", _on_rollback)
    event.listen(connection, "rollback_twophase", _on_rollback_twophase)
    event.listen(connection, "rollback_savepoint", _on_rollback_savepoint)
    engine = connection.engine
    if engine not in _engines:
        _engines.add(engine)
        event.listen(engine, "checkin", _on_checkin)
    if engine.dialect not in _dialects:
        _dialects.add(engine.dialect)
        event.listen(engine, "handle_error", _postroom_hears_of_errors)


def _on_commit(connection: Connection) -> None:
    count = _counts[connection]
    number = sum(number for _, number in count.written)
    count.written.clear()
    if number:
        count.committing += number
        record = getattr(connection.connection, "_connection_record", None)
        if record is not None:
            _by_record[record] = count
        if not count.expected:
            wake.hint()


def _on_commit_twophase(connection: Connection, xid: Any, is_prepared: bool) -> None:
    _on_commit(connection)


def _on_rollback(connection: Connection) -> None:
    count = _counts[connection]
    count.written.clear()
    count.committing, count.expected = 0, False


def _on_rollback_twophase(connection: Connection, xid: Any, is_prepared: bool) -> None:
    _on_rollback(connection)


def _on_rollback_savepoint(connection: Connection, name: str, context: Any) -> None:
    count = _counts[connection]
    count.written = [each for each in count.written if name not in each[0]]


def _on_checkin(dbapi_connection: Any, record: Any) -> None:
    if (count := _by_record.pop(record, None)) is not None:
        _tell(count)


def _postroom_hears_of_errors(context: ExceptionContext) -> None:
    # Of the statement before it, too: whatever was not certain by now has failed.
    if context.connection is not None and (count := _counts.get(context.connection)) is not None:
        count.committing, count.expected = 0, False


def _tell(count: _Count) -> None:
    number, count.committing = count.committing, 0
    hinted, count.expected = not count.expected, False
    wake.committed(number, hinted=hinted)
