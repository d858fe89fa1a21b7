"""A route's transaction that holds everything: record, business change, messages and answer.

The claim is its first statement, the answer its last, and there is one commit, made here before any
byte is sent. A session's own `commit` in the route writes and does not end it. An answer of 400 or
more undoes what the route did; if it is one to keep, it is written down by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from sqlalchemy import Connection, Engine, event

from postroom import failpoints, signals
from postroom.databases.caller import carry_out
from postroom.databases.sqlalchemy import SQLAlchemyLink
from postroom.databases.trouble import is_conflict
from postroom.errors import WrongCall
from postroom.flow import Flow, run
from postroom.idempotency import store
from postroom.idempotency.exchange import Asked, for_storing
from postroom.idempotency.rules import Answer, Mine, Replay, Running, Verdict, storable

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["KeyedTransaction", "guard"]

TRIES = 5
_WHAT = "record of this request"
_KEYED, _MAY_COMMIT = "postroom_keyed", "postroom_key_may_commit"
# Engines that refuse a commit we have not made. Listening anew for each connection costs more than
# a statement.
_guarded: WeakSet[Engine] = WeakSet()


def guard(engine: Engine) -> None:
    """From now on only we commit the transactions that we begin on this engine's connections."""
    if engine not in _guarded:
        _guarded.add(engine)
        event.listen(engine, "commit", _refuse_commit)


class KeyedTransaction:
    """One transaction on a connection of SQLAlchemy's; async ones run this by `run_sync`."""

    def __init__(self, connection: Connection, asked: Asked | None) -> None:
        self.connection = connection
        self.asked = asked
        self.mine: Mine | None = None
        self._root: Any = None

    def begin(self) -> Verdict | None:
        """Begin, and claim. None: the request has no key. Only `Mine` leaves it open."""
        self.connection.info[_KEYED] = True
        for attempt in range(1, TRIES + 1):
            self._root = self.connection.begin()
            if self.asked is None:
                return None
            try:
                # Refused where every statement would commit by itself.
                flow = self._claim(self.asked)
                verdict = carry_out(self.connection, flow, what=_WHAT, instead="turn")
            except Exception as error:
                self.roll_back()
                if not is_conflict(error):
                    raise
                if self.asked.policy.wait_seconds is not None or attempt == TRIES:
                    return Running(1.0)
                continue
            if isinstance(verdict, Mine):
                self.mine = verdict
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

    def settle(
        self, session: Session | None, answer: Answer, *, kept: bool = True
    ) -> Answer | None:
        """End it with its answer. None: committed or undone, as it should be; else another request
        with the same key came first, and this was its answer."""
        try:
            if answer.status >= 400:
                self.roll_back()
                return self._keep_refusal(answer) if kept else None
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
        except BaseException:
            self.roll_back()
            raise
        return None

    def _finish(self, answer: Answer) -> None:
        if self.asked is None or self.mine is None:
            return
        policy = self.asked.policy
        kept = for_storing(answer, policy)
        flow = store.finish(self.mine.claim, kept, keep_seconds=policy.keep_seconds)
        if not run(flow, SQLAlchemyLink(self.connection)):
            raise WrongCall("the record of this request is gone from its own transaction")
        signals.emit(
            "key.executed",
            operation=self.asked.name.operation,
            mode=policy.mode,
            status=answer.status,
            attempts=self.mine.attempts,
        )

    def _keep_refusal(self, answer: Answer) -> Answer | None:
        if self.asked is None or not storable(answer.status):
            return None
        verdict = self.begin()
        if isinstance(verdict, Mine):
            self._finish(answer)
            self.commit()
        elif isinstance(verdict, Replay):
            return verdict.answer
        return None

    def commit(self) -> None:
        """The one commit there is."""
        self.connection.info[_MAY_COMMIT] = True
        try:
            self._root.commit()
        finally:
            self.connection.info.pop(_MAY_COMMIT, None)

    def roll_back(self) -> None:
        """Undo all of it, in whatever state it is."""
        if self.connection.in_transaction():
            self.connection.rollback()

    def end(self) -> None:
        """Undo what was not committed; the connection may go back to its pool."""
        self.roll_back()
        self.connection.info.pop(_KEYED, None)


def _refuse_commit(connection: Connection) -> None:
    if connection.info.get(_KEYED) and not connection.info.get(_MAY_COMMIT):
        # SQLAlchemy takes the transaction for ended now, whatever its commit says; so it is.
        connection.connection.rollback()
        raise WrongCall(
            "the route's transaction is committed with its answer, after it has returned: neither "
            "commit it nor go on after a rollback"
        )
