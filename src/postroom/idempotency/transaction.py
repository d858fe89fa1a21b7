"""A route's transaction that holds everything: record, business change, messages and answer.

The claim is its first statement, the answer its last, and there is one commit, made here before any
byte is sent. A session's own `commit` in the route writes and does not end it. An answer of 400 or
more undoes what the route did; if it is one to keep, it is written down by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy import Connection, Engine, event

from postroom import failpoints, signals
from postroom.databases.caller import refuse_alone
from postroom.databases.kinds import kind_of
from postroom.databases.sqlalchemy import LeanLink
from postroom.databases.trouble import is_conflict, waited_too_long
from postroom.errors import WrongCall
from postroom.flow import Flow, run
from postroom.idempotency import store
from postroom.idempotency.exchange import Asked, for_storing
from postroom.idempotency.rules import TRIES, Answer, Mine, Replay, Running, Verdict, storable

if TYPE_CHECKING:
    from sqlalchemy import ExceptionContext
    from sqlalchemy.orm import Session

__all__ = ["KeyedTransaction", "guard"]

_WHAT = "record of this request"
# Engines that refuse a commit we have not made. Listening anew for each connection costs more than
# a statement.
_guarded: WeakSet[Engine] = WeakSet()
# Whose transaction a connection carries. By SQLAlchemy's object, which ends with its request: what
# is written on the driver's connection would go back to the pool with it.
_carried: WeakKeyDictionary[Connection, KeyedTransaction] = WeakKeyDictionary()


def guard(engine: Engine) -> None:
    """From now on only we commit the transactions that we begin on this engine's connections."""
    if engine not in _guarded:
        _guarded.add(engine)
        event.listen(engine, "commit", _refuse_commit)
        event.listen(engine, "handle_error", _postroom_hears_of_errors)


class KeyedTransaction:
    """One transaction on a connection of SQLAlchemy's; async ones run this by `run_sync`."""

    def __init__(self, connection: Connection, asked: Asked | None) -> None:
        self.connection = connection
        self.asked = asked
        self.mine: Mine | None = None
        self.may_commit = False
        self.gave_way = False  # the database has let another transaction go first
        self._link = LeanLink(connection)
        self._root: Any = None

    def begin(self) -> Verdict | None:
        """Begin, and claim. None: the request has no key. Only `Mine` leaves it open."""
        _carried[self.connection] = self
        for attempt in range(1, TRIES + 1):
            self._root = self.connection.begin()
            if self.asked is None:
                return None
            try:
                # Refused where every statement would commit by itself.
                refuse_alone(kind_of(self.connection), self._link, _WHAT)
                verdict = run(self._claim(self.asked), self._link)
            except Exception as error:
                self.roll_back()
                if waited_too_long(error):
                    return Running(1.0)
                if not is_conflict(error):
                    raise
                if attempt == TRIES:
                    return Running(1.0)
                continue
            if isinstance(verdict, Mine):
                self.mine, self.gave_way = verdict, False
            else:
                self.commit()  # that its owner was lost is worth keeping
            return verdict
        raise AssertionError("unreachable")

    def _claim(self, asked: Asked) -> Flow[Verdict]:
        policy = asked.policy
        claiming = store.claim(
            asked.name, asked.fingerprint, "same_transaction", keep_seconds=policy.keep_seconds
        )
        return store.patiently(claiming, policy.wait_seconds)

    def settle(self, session: Session | None, answer: Answer) -> None:
        """Commit it with its answer, or undo it; `keep_refusal` comes after this."""
        try:
            if answer.status >= 400:
                if session is not None:
                    session.rollback()  # what is queued is dropped, or no commit would be let by
                self.roll_back()
                return
            if session is not None:
                session.commit()  # whatever is queued is written; the transaction goes on
            if self._root is None or not self._root.is_active:
                raise WrongCall(
                    "the route rolled its transaction back and answered as if nothing had "
                    "happened: raise an error, or use a savepoint (session.begin_nested())"
                )
            self._finish(answer)
            failpoints.hit("key.commit.before")
            self.commit()
            failpoints.hit("key.commit.after")
        except BaseException as error:
            self.gave_way = self.gave_way or is_conflict(error)
            self.roll_back()
            raise
        self._tell_executed(answer)

    def _finish(self, answer: Answer) -> None:
        if self.asked is None or self.mine is None:
            return
        policy = self.asked.policy
        kept = for_storing(answer, policy)
        flow = store.finish(self.mine.claim, kept, keep_seconds=policy.keep_seconds)
        if not run(flow, self._link):
            raise WrongCall("the record of this request is gone from its own transaction")

    def _tell_executed(self, answer: Answer) -> None:
        if self.asked is None or self.mine is None:
            return
        signals.emit(
            "key.executed",
            operation=self.asked.name.operation,
            mode=self.asked.policy.mode,
            status=answer.status,
            attempts=self.mine.attempts,
        )

    def keep_refusal(self, answer: Answer) -> Answer | None:
        """Write a refusal down by itself, if it is one to keep. None: it stands, or could not be
        kept and may be given again; else another request came first, and this was its answer."""
        if self.asked is None or not storable(answer.status):
            return None
        try:
            verdict = self.begin()
            if isinstance(verdict, Mine):
                self._finish(answer)
                failpoints.hit("key.refusal.before")
                self.commit()
                failpoints.hit("key.refusal.after")
                self._tell_executed(answer)
        except Exception:  # nothing was done, and its client shall have its answer
            self.roll_back()
            return None
        return verdict.answer if isinstance(verdict, Replay) else None

    def commit(self) -> None:
        """The one commit there is."""
        self.may_commit = True
        try:
            self._root.commit()
        finally:
            self.may_commit = False

    def roll_back(self) -> None:
        """Undo all of it, in whatever state it is."""
        if self.connection.in_transaction():
            self.connection.rollback()

    def end(self) -> None:
        """Undo what was not committed; the connection may go back to its pool."""
        self.roll_back()
        _carried.pop(self.connection, None)


def _postroom_hears_of_errors(context: ExceptionContext) -> None:
    """Remember what a framework may make an answer of. By this name (`OWN_LISTENER`) lean
    statements stay lean."""
    if context.connection is None:
        return
    carried = _carried.get(context.connection)
    if carried is not None and is_conflict(context.original_exception):
        carried.gave_way = True


def _refuse_commit(connection: Connection) -> None:
    carried = _carried.get(connection)
    if carried is not None and not carried.may_commit:
        # SQLAlchemy takes the transaction for ended now, whatever its commit says; so it is.
        connection.connection.rollback()
        raise WrongCall(
            "the route's transaction is committed with its answer, after it has returned: neither "
            "commit it nor go on after a rollback"
        )
