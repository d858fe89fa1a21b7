"""Carrying out the work of one transaction: our own flows and the user's handlers, in their order.

A piece of work is a generator that yields flows and calls. It is carried out in the event loop or
in a thread, as its handlers need, and then committed. What goes wrong is told apart: a handler
failed, the database let somebody else go first, or it is lost and nobody is to blame.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

from postroom import failpoints
from postroom.brokers.cloudevents import UNREADABLE
from postroom.calling import must_have_run
from postroom.databases.database import DatabaseLost
from postroom.databases.trouble import is_conflict
from postroom.errors import InvalidMessage, Rejected
from postroom.flow import Flow
from postroom.inbox.handlers import Handler, Handlers
from postroom.inbox.rules import Letter
from postroom.inbox.store import Seat, Store
from postroom.inbox.transactions import AsyncTransaction, ThreadTransaction, Transactions
from postroom.retry import RetryPolicy

__all__ = ["Call", "Carrier", "Conflict", "Desk", "Do", "HandlerFailed", "Steps", "Tally", "nobody"]

CONFLICT_TRIES = 5
_INSTEAD = "Write the handler with `async def`, and its decorators with functools.wraps."


@dataclass(slots=True)
class Tally:
    """What a consumer has done so far."""

    received: int = 0
    handled: int = 0
    duplicates: int = 0
    failed: int = 0
    buried: int = 0
    skipped: int = 0


class Desk(Protocol):
    """What a worker has from its consumer."""

    name: str
    owner: str
    store: Store
    handlers: Handlers
    transactions: Transactions
    tally: Tally
    chunk_rows: int
    chunk_bytes: int
    handler_seconds: float
    skips_unknown: bool
    retry: RetryPolicy
    ending: asyncio.Event

    def seats_of(self, letters: Iterable[Letter]) -> list[Seat]: ...
    def current(self, letter: Letter) -> bool: ...
    def acknowledge(self, letters: Sequence[Letter]) -> None: ...
    def lose(self, seats: Iterable[Seat]) -> None: ...
    def hint(self) -> None: ...
    async def in_thread(self, function: Callable[[], Any]) -> Any: ...


class HandlerFailed(Exception):
    """A handler raised; nothing of its transaction remains."""

    def __init__(self, letter: Letter, error: BaseException) -> None:
        super().__init__(str(error))
        self.letter = letter
        self.error = error


class Conflict(Exception):
    """The database chose this transaction to give way; another try may go through."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


class Do(NamedTuple):
    """Carry out a flow of ours; its result is sent back."""

    flow: Flow[Any]


class Call(NamedTuple):
    """Hand a message to its handler."""

    letter: Letter


Steps: TypeAlias = Generator[Do | Call, Any, Any]


class Carrier:
    """Carries out steps in one transaction each."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk

    async def persist(self, steps: Callable[[], Steps], letter: Letter) -> Any:
        """Carry steps out, again if the database let somebody else go first."""
        for left in reversed(range(CONFLICT_TRIES)):
            try:
                return await self.carry_out(steps(), letter)
            except Conflict as conflict:
                if not left:
                    raise HandlerFailed(letter, conflict.error) from conflict.error
                await asyncio.sleep(0.02 * random.random() * (CONFLICT_TRIES - left))
        raise AssertionError

    async def own(self, flow: Callable[[], Flow[Any]]) -> Any:
        """Carry out a flow of ours in a transaction of its own."""

        def steps() -> Steps:
            return (yield Do(flow()))

        for left in reversed(range(CONFLICT_TRIES)):
            try:
                return await self._in_loop(steps())
            except Conflict as conflict:
                if not left:
                    raise DatabaseLost(str(conflict)) from conflict.error
                await asyncio.sleep(0.05 * random.random())
        raise AssertionError

    async def carry_out(self, steps: Steps, letter: Letter) -> Any:
        """Steps in one transaction, of the kind that the handlers need."""
        handler = self.desk.handlers.find(letter.type)
        if handler is None or handler.is_async:
            return await self._in_loop(steps)
        return await self.desk.in_thread(lambda: self._in_thread(steps))

    async def _in_loop(self, steps: Steps) -> Any:
        try:
            async with self.desk.transactions.begin() as tx:
                letter = None
                try:
                    step = next(steps)
                    while True:
                        if isinstance(step, Do):
                            step = steps.send(await tx.carry_out(step.flow))
                        else:
                            letter = step.letter
                            await self._call(tx, letter)
                            step = steps.send(None)
                except StopIteration as done:
                    result = done.value
                except BaseException as error:
                    _judge(error, tx)
                    raise
                try:
                    await tx.write_out()
                    await tx.commit()
                except Exception as error:
                    raise _at_the_end(error, tx, letter) from error
                return result
        except (HandlerFailed, Conflict, DatabaseLost):
            raise
        except Exception as error:
            raise DatabaseLost(str(error)) from error

    def _in_thread(self, steps: Steps) -> Any:
        try:
            with self.desk.transactions.begin_sync() as tx:
                letter = None
                try:
                    step = next(steps)
                    while True:
                        if isinstance(step, Do):
                            step = steps.send(tx.carry_out(step.flow))
                        else:
                            letter = step.letter
                            self._call_sync(tx, letter)
                            step = steps.send(None)
                except StopIteration as done:
                    result = done.value
                except BaseException as error:
                    _judge(error, tx)
                    raise
                try:
                    tx.write_out()
                    tx.commit()
                except Exception as error:
                    raise _at_the_end(error, tx, letter) from error
                return result
        except (HandlerFailed, Conflict, DatabaseLost):
            raise
        except Exception as error:
            raise DatabaseLost(str(error)) from error

    async def _call(self, tx: AsyncTransaction, letter: Letter) -> None:
        handler, content = self._content(letter)
        failpoints.hit("consumer.handler.before")
        try:
            async with asyncio.timeout(self.desk.handler_seconds or None):
                await tx.call(lambda given: _result(handler, letter, content, given))
        except TimeoutError as error:
            said = f"the handler took longer than {self.desk.handler_seconds:g} s"
            raise HandlerFailed(letter, TimeoutError(str(error) or said)) from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise HandlerFailed(letter, error) from error
        except Exception as error:
            raise _of_handler(error, tx, letter) from error
        failpoints.hit("consumer.handler.after")

    def _call_sync(self, tx: ThreadTransaction, letter: Letter) -> None:
        handler, content = self._content(letter)
        failpoints.hit("consumer.handler.before")
        try:
            tx.call(lambda given: _run(handler, letter, content, given))
        except Exception as error:
            raise _of_handler(error, tx, letter) from error
        failpoints.hit("consumer.handler.after")

    def _content(self, letter: Letter) -> tuple[Handler, Any]:
        handler = self.desk.handlers.find(letter.type)
        if handler is None:
            raise HandlerFailed(letter, nobody(letter))
        try:
            return handler, self.desk.handlers.content(handler, letter)
        except InvalidMessage as error:
            raise HandlerFailed(letter, Rejected(str(error), code="unreadable")) from error
        except Exception as error:  # whatever it is, it is no fault of the database
            raise HandlerFailed(letter, error) from error


async def _result(handler: Handler, letter: Letter, content: Any, given: Any) -> None:
    answer = handler.function(*handler.arguments(letter, content, given))
    if answer is not None:
        await answer


def _run(handler: Handler, letter: Letter, content: Any, given: Any) -> None:
    answer = handler.function(*handler.arguments(letter, content, given))
    must_have_run(answer, handler.function, _INSTEAD)


def _judge(error: BaseException, tx: AsyncTransaction | ThreadTransaction) -> None:
    """What failed in a step of our own: the database gave way to others, or it is lost."""
    if isinstance(error, HandlerFailed | Conflict | DatabaseLost) or not isinstance(
        error, Exception
    ):
        return
    if not tx.broken and is_conflict(error):
        raise Conflict(error) from error
    raise DatabaseLost(str(error)) from error


def _of_handler(
    error: Exception, tx: AsyncTransaction | ThreadTransaction, letter: Letter
) -> Exception:
    """What an error that came out of a handler is."""
    if tx.broken:
        return DatabaseLost(str(error))
    return Conflict(error) if is_conflict(error) else HandlerFailed(letter, error)


def _at_the_end(
    error: Exception, tx: AsyncTransaction | ThreadTransaction, letter: Letter | None
) -> Exception:
    """What a session holds back, and some constraints, are looked at as late as at the end: a
    handler's fault then too. Whose, shows when each goes alone."""
    if tx.broken or (letter is None and not is_conflict(error)):
        return DatabaseLost(str(error))
    if is_conflict(error) or letter is None:
        return Conflict(error)
    return HandlerFailed(letter, error)


def nobody(letter: Letter) -> Rejected:
    """The rejection of a message that has no handler, or that cannot be read."""
    if UNREADABLE in letter.headers:
        return Rejected(letter.headers[UNREADABLE], code="unreadable")
    named = letter.type or "that is not named"
    text = f'no handler for messages of type {named}: write one, or `Consumer(unknown="skip")`'
    return Rejected(text, code="unknown_type")
