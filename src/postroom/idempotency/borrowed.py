"""A view's transaction on a session or connection of its own: for decorators of Flask and Django.

As in `transaction`: the claim comes first, the answer last, and one commit holds all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from postroom import failpoints, signals
from postroom.databases.caller import carry_out
from postroom.databases.kinds import bare, kind_of
from postroom.databases.trouble import is_conflict, waited_too_long
from postroom.errors import PublishError, WrongCall
from postroom.flow import Flow
from postroom.idempotency import problems, store
from postroom.idempotency.exchange import Asked, for_storing
from postroom.idempotency.rules import TRIES, Answer, Mine, Replay, Running, Verdict, storable
from postroom.idempotency.telling import refused, tell_replay

__all__ = ["Borrowed"]

T = TypeVar("T")
_WHAT = "record of this request"
_INSTEAD = "an asynchronous framework and its middleware"


class Borrowed:
    """A session or connection that belongs to the application, for the length of one request."""

    def __init__(self, tx: Any, asked: Asked | None) -> None:
        self.tx = tx
        self.asked = asked

    def around(
        self, view: Callable[[], T], read: Callable[[T], Answer], say: Callable[[Answer], T]
    ) -> T:
        """Call the view between claim and commit; what is not carried out is said."""
        try:
            mine = self.claim()
        except PublishError:
            raise
        except Exception as error:
            if self.asked is None:
                raise
            return say(refused(self.asked, error))
        if mine is not None and not isinstance(mine, Mine):
            assert self.asked is not None
            self.roll_back()
            tell_replay(self.asked, mine)
            return say(problems.answer_to(mine, self.asked.policy))
        try:
            with self._only_we_commit():
                response = view()
                answer = read(response)
            if answer.status >= 400:
                self.roll_back()
                theirs = self._keep_refusal(answer)
                return response if theirs is None else say(problems.replayed(theirs))
            if isinstance(mine, Mine):
                self.finish(mine, answer)
            failpoints.hit("key.commit.before")
            self.tx.commit()
            failpoints.hit("key.commit.after")
        except BaseException as error:
            self.roll_back()
            if is_conflict(error):  # nothing of it is left
                return say(problems.conflict())
            raise
        self.tell_executed(mine, answer)
        return response

    def claim(self) -> Verdict | None:
        """Claim the key on the borrowed transaction; None: there is none."""
        if self.asked is None:
            return None
        for attempt in range(1, TRIES + 1):
            try:
                return self._run(self._claiming(self.asked))
            except Exception as error:
                self.roll_back()
                if waited_too_long(error):
                    return Running(1.0)
                if not is_conflict(error):
                    raise
                if attempt == TRIES:
                    return Running(1.0)
        raise AssertionError("unreachable")

    def finish(self, mine: Mine, answer: Answer) -> None:
        """Write the answer down, in the same transaction."""
        assert self.asked is not None
        policy = self.asked.policy
        kept = for_storing(answer, policy)
        if not self._run(store.finish(mine.claim, kept, keep_seconds=policy.keep_seconds)):
            raise WrongCall(
                "the record of this request is gone from its transaction: the view committed it or "
                "rolled it back, which is its decorator's to do"
            )

    def tell_executed(self, mine: Verdict | None, answer: Answer) -> None:
        """After the commit: before it nothing is sure."""
        if self.asked is None or not isinstance(mine, Mine):
            return
        signals.emit(
            "key.executed",
            operation=self.asked.name.operation,
            mode=self.asked.policy.mode,
            status=answer.status,
            attempts=mine.attempts,
        )

    def _claiming(self, asked: Asked) -> Flow[Verdict]:
        policy = asked.policy
        claiming = store.claim(
            asked.name, asked.fingerprint, "same_transaction", keep_seconds=policy.keep_seconds
        )
        return store.patiently(claiming, policy.wait_seconds)

    def _keep_refusal(self, answer: Answer) -> Answer | None:
        """None: it stands, or may be given again; else another request came first, with this."""
        if self.asked is None or not storable(answer.status):
            return None
        try:
            mine = self._write_refusal(answer)
        except Exception:  # nothing was done, and its client shall have its answer
            self.roll_back()
            return None
        self.tell_executed(mine, answer)
        return mine.answer if isinstance(mine, Replay) else None

    def _write_refusal(self, answer: Answer) -> Verdict | None:
        if isinstance(mine := self.claim(), Mine):
            self.finish(mine, answer)
            failpoints.hit("key.refusal.before")
            self.tx.commit()
            failpoints.hit("key.refusal.after")
        else:
            self.roll_back()
        return mine

    def _run(self, flow: Flow[T]) -> T:
        return carry_out(self.tx, flow, what=_WHAT, instead=_INSTEAD)

    def roll_back(self) -> None:
        """Undo all of it."""
        self.tx.rollback()

    @contextmanager
    def _only_we_commit(self) -> Iterator[None]:
        """A commit in the view would tear record and answer apart."""
        if not kind_of(bare(self.tx, to_write=False)).is_session:
            yield
            return
        from sqlalchemy import event

        inside = bare(self.tx, to_write=False)
        session = inside if hasattr(inside, "sync_session") or not callable(inside) else inside()
        event.listen(session, "before_commit", _refuse_commit)
        try:
            yield
        finally:
            event.remove(session, "before_commit", _refuse_commit)


def _refuse_commit(session: Any) -> None:
    if session.in_nested_transaction():
        return
    raise WrongCall("the view's session is committed with its answer, after it has returned")
