"""What a route under a key can ask for: the session that shares its fate, and keys for calls.

A middleware puts a `Turn` into every request whose policy is `same_transaction` or `resume`; the
route takes its session from there. When the answer is complete the middleware ends the turn: commit
first, then the bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from threading import Lock, RLock
from typing import TYPE_CHECKING, Any

from postroom.databases.trouble import is_conflict
from postroom.derivation import Part
from postroom.errors import ConfigurationError, PublishError, WrongCall
from postroom.idempotency import problems
from postroom.idempotency.exchange import Asked
from postroom.idempotency.given import checked_engine
from postroom.idempotency.policy import Policy
from postroom.idempotency.rules import (
    Answer,
    Mine,
    Verdict,
    is_nobody,
    owned,
    scope_name,
    sent_elsewhere,
)
from postroom.idempotency.telling import refused, tell_replay, tell_unprotected
from postroom.idempotency.threads import answering, claiming
from postroom.idempotency.transaction import KeyedTransaction, guard
from postroom.worker.waiting import finish

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession
    from sqlalchemy.orm import Session

__all__ = ["Answered", "Turn"]


class Answered(Exception):
    """The request was answered without being carried out; the middleware sends that answer."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(f"answered {answer.status} by its idempotency key")
        self.answer = answer
        self.status_code = answer.status
        self.detail = str(self)
        self.headers = dict(answer.headers)


class Turn:
    """One request and its transaction."""

    def __init__(self, asked: Asked | None, policy: Policy | None = None) -> None:
        self.asked = asked
        self.policy = policy  # of a route that claims itself, which may have no key
        self.instead: Answer | None = None
        self.used = False
        self.kept = True  # False: a refusal that came before anything began is not remembered
        self.over = False  # answered, or done with: nothing more is opened for it
        self._engine: Any = None
        self._tx: KeyedTransaction | None = None
        self._connection: AsyncConnection | Connection | None = None
        self._session: AsyncSession | Session | None = None
        self._claimed = False
        # Several providers of one request may ask at once: the first of them claims. Nobody else
        # touches what it has in hand: if the turn is over by then, it gives that back itself.
        self._by_tasks: asyncio.Lock | None = None
        self._by_threads = RLock()
        self._in_hand = False
        self._state = Lock()

    def key_for(self, *steps: Part) -> str:
        """A key for something done on behalf of this request: the same at every attempt."""
        if self.asked is None:
            raise ConfigurationError("this request has no idempotency key to derive one from")
        return self.asked.name.derive(*steps)

    def belongs_to(self, who: Any) -> None:
        """Say whose key it is, where `scope=AT_CLAIM` has left that to the route."""
        if self.asked is None:
            return
        if is_nobody(who):
            self.instead = problems.unowned()
            raise Answered(self.instead)
        self.asked = replace(self.asked, name=self.asked.name._replace(scope=scope_name(who)))

    async def session_async(self, engine: AsyncEngine, **options: Any) -> AsyncSession:
        """An AsyncSession on the transaction of this request; begun and claimed at first call."""
        from sqlalchemy.ext.asyncio import AsyncSession

        connection = await self.connection_async(engine)
        if self._session is None:
            self._session = AsyncSession(connection, **{"expire_on_commit": False} | options)
        return self._session  # type: ignore[return-value]

    async def connection_async(self, engine: AsyncEngine) -> AsyncConnection:
        """The same for those who work without the ORM."""
        self._one_engine(engine)
        if not self._claimed:
            if self._by_tasks is None:
                self._by_tasks = asyncio.Lock()
            async with self._by_tasks:
                if not self._claimed:
                    await self._claim_async(engine)
        return self._connection  # type: ignore[return-value]

    async def _claim_async(self, engine: AsyncEngine) -> None:
        self._take_in_hand()
        try:
            self._refuse_told()
            await self._give_back_async()  # of one that was cancelled, or has failed
            with self._claiming():
                guard(engine.sync_engine)
                self._connection = await engine.connect()
                verdict = await self._connection.run_sync(self._begin)
            self._begun(verdict)
        finally:
            if late := self._out_of_hand():
                await self._give_back_async()
        self._refuse_late(late)

    def session(self, engine: Engine, **options: Any) -> Session:
        """A Session on the transaction of this request; begun and claimed at first call."""
        from sqlalchemy.orm import Session

        with self._by_threads:
            connection = self.connection(engine)
            if self._session is None:
                self._session = Session(connection, **{"expire_on_commit": False} | options)
            return self._session  # type: ignore[return-value]

    async def session_in_thread(self, engine: Engine, **options: Any) -> Session:
        """`session` for a route in a thread: its claim may wait, in a thread of ours."""
        return await claiming(lambda: self.session(engine, **options))

    async def connection_in_thread(self, engine: Engine) -> Connection:
        """The same for those who work without the ORM."""
        return await claiming(lambda: self.connection(engine))

    def connection(self, engine: Engine) -> Connection:
        """The same for those who work without the ORM."""
        with self._by_threads:
            self._one_engine(engine)
            if not self._claimed:
                self._claim(engine)
            return self._connection  # type: ignore[return-value]

    def _claim(self, engine: Engine) -> None:
        self._take_in_hand()
        try:
            self._refuse_told()
            self._give_back()
            with self._claiming():
                guard(engine)
                self._connection = engine.connect()
                verdict = self._begin(self._connection)
            self._begun(verdict)
        finally:
            if late := self._out_of_hand():
                self._give_back()
        self._refuse_late(late)

    def _take_in_hand(self) -> None:
        with self._state:
            self._refuse_late(self.over)
            self._in_hand = True

    def _out_of_hand(self) -> bool:
        """Whether the turn is over, and what was claimed is to be given back."""
        with self._state:
            self._in_hand = False
            return self.over

    def _refuse_told(self) -> None:
        if self.instead is not None:  # whoever came first was told so
            raise Answered(self.instead)

    def _refuse_late(self, late: bool) -> None:
        if late:
            raise WrongCall(
                "this request is answered, and its transaction with it: for what comes after, such "
                "as a background task, open a session of your own"
            )

    def _ends(self) -> bool:
        """Nothing more is opened. Whether there is anything open, and in nobody's hand."""
        with self._state:
            self.over = True
            return self._connection is not None and not self._in_hand

    def _begin(self, connection: Connection) -> Verdict | None:
        self._tx = KeyedTransaction(connection, self.asked)
        return self._tx.begin()

    def _one_engine(self, engine: Any) -> None:
        """A transaction is in one database."""
        if self._engine is None:
            self._engine = checked_engine(engine, or_async=True)
        elif self._engine is not engine:
            raise ConfigurationError(
                "this request has its session of another engine: one transaction holds everything"
            )

    @contextmanager
    def _claiming(self) -> Iterator[None]:
        """What cannot be claimed is not carried out; without a key the error is the route's."""
        policy = self.policy or (self.asked and self.asked.policy)
        mode = policy.mode if policy else "external"
        if mode != "same_transaction":  # nobody would commit it, or its key is claimed
            raise ConfigurationError(
                f'this route takes its session from Postroom, and its policy says "{mode}": '
                'give it Policy(mode="same_transaction"), or a session of your own'
            )
        if self.asked is not None:
            owned(self.asked.name)
        try:
            yield
        except Exception as error:
            if self.asked is None or isinstance(error, PublishError):
                raise
            raise self._answered(refused(self.asked, error)) from error

    def _begun(self, verdict: Verdict | None) -> None:
        self.used = True
        if verdict is None or isinstance(verdict, Mine):
            self._claimed = True
            return
        assert self.asked is not None
        tell_replay(self.asked, verdict)
        raise self._answered(problems.answer_to(verdict, self.asked.policy))

    def _answered(self, instead: Answer) -> Answered:
        with self._state:
            if not self.over:  # else its client has another answer
                self.instead = instead
        return Answered(instead)

    @property
    def is_async(self) -> bool:
        """Whether what it has open belongs to the event loop."""
        return hasattr(self._connection, "sync_connection")

    async def settle_async(self, answer: Answer) -> Answer | None:
        """End it with its answer: None, or what is to be answered in its place."""
        if not self._ends():
            self._tell_unused(answer)
            return None
        if self.is_async:
            # One hop for all of it: each costs as much as a tenth of a statement.
            return await self._connection.run_sync(  # type: ignore[union-attr]
                lambda _: self.settle(answer)
            )
        theirs = None
        if await answering(lambda: self._settle(answer)):
            return self.instead
        if self._kept_later(answer):
            theirs = await claiming(lambda: self._keep(answer))
        await answering(self._give_back)
        return None if theirs is None else problems.replayed(theirs)

    def settle(self, answer: Answer) -> Answer | None:
        """The same in a thread, or in the greenlet of an async connection."""
        if not self._ends():
            self._tell_unused(answer)
            return None
        try:
            if self._settle(answer):
                return self.instead
            theirs = self._keep(answer) if self._kept_later(answer) else None
        finally:
            self._give_back()
        return None if theirs is None else problems.replayed(theirs)

    def _settle(self, answer: Answer) -> Answer | None:
        """None, or what is told if it gave way to another: in its route, or at our commit."""
        assert self._tx is not None
        try:
            self._tx.settle(_inner(self._session), answer)
        except BaseException as error:
            told = self.told_instead(error)
            self._give_back()
            if told is None:
                raise
            return told
        if answer.status == 500 and self._tx.gave_way:
            self._give_back()
            self.instead = problems.conflict()
        return self.instead

    def told_instead(self, error: BaseException) -> Answer | None:
        """What is answered in place of an error, if anything: what was said before, or that the
        database let another transaction go first."""
        if self.instead is None and self._tx is not None and self._tx.gave_way:
            self.instead = problems.conflict() if is_conflict(error) else None
        return self.instead

    def _kept_later(self, answer: Answer) -> bool:
        return answer.status >= 400 and self.kept

    def _keep(self, answer: Answer) -> Answer | None:
        assert self._tx is not None
        return self._tx.keep_refusal(answer)

    async def end_async(self) -> None:
        """Undo what was not committed, and give the connection back; never raises."""
        if self._ends():
            await self._give_back_async()

    def end(self) -> None:
        """The same in a thread, or in the greenlet of an async connection."""
        if self._ends():
            self._give_back()

    async def _give_back_async(self) -> None:
        if self._connection is None:
            return
        if not self.is_async:
            await answering(self._give_back)
            return
        with suppress(Exception):
            # Whole, though whoever does it is cancelled: half of it would leave the connection to
            # the garbage collector.
            await finish(
                self._connection.run_sync(lambda _: self._give_back())  # type: ignore[union-attr]
            )

    def _give_back(self) -> None:
        connection, session = _inner(self._connection), _inner(self._session)
        self._connection = self._session = None
        self._claimed = False
        with suppress(Exception):
            if session is not None:
                session.close()
        with suppress(Exception):
            if self._tx is not None:
                self._tx.end()
        with suppress(Exception):
            if connection is not None:
                connection.close()

    def _tell_unused(self, answer: Answer) -> None:
        """The route went its own way, so nothing of it is remembered."""
        if self.asked is None or self.used or sent_elsewhere(answer, self.asked.path):
            return  # a router's redirect carries nothing out
        if answer.status < 400:
            tell_unprotected(self.asked, "the route did not take its session from its turn")


def _inner(outer: Any) -> Any:
    """What an AsyncConnection or AsyncSession stands for; others stand for themselves."""
    inner = getattr(outer, "sync_connection", None) or getattr(outer, "sync_session", None)
    return outer if inner is None else inner


def refuse_twice(earlier: Any, asked: object) -> None:
    """A middleware within itself would wait for its own claim."""
    if (
        isinstance(earlier, Turn)
        and earlier.asked is not None
        and isinstance(asked, Asked)
        and earlier.asked.name == asked.name
        and not earlier.over
    ):
        earlier.kept = False  # nothing was begun
        raise ConfigurationError(
            "this request comes to IdempotencyMiddleware twice: add it to the application once, by "
            "protect(app, keys) or by itself"
        )


def turn_in(place: Any, what: str) -> Turn:
    """The turn a middleware has left, or an error that says how to get one."""
    if isinstance(place, Turn):
        return place
    raise WrongCall(
        f"this request has no turn: add {what} to the application, and a policy with "
        'mode="same_transaction" for its route'
    )
