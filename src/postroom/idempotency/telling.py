"""What is told of requests that were not carried out, or not remembered."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from postroom import signals
from postroom.errors import PostroomError
from postroom.idempotency import problems
from postroom.idempotency.exchange import Asked, Steps, drive, drive_async, giving_up
from postroom.idempotency.rules import Answer, Mine, Replay, Verdict
from postroom.worker.waiting import finish

if TYPE_CHECKING:
    from postroom.idempotency.engines import Engines

__all__ = ["give_up", "give_up_async", "refused", "tell_replay", "tell_unprotected", "why_of"]

_NO_TABLE = re.compile("no such table|(?:relation|table) .*(?:does not|doesn't) exist", re.I)
# MariaDB says which value was there already.
_DUPLICATE = re.compile(r"Duplicate entry '.*'(?= for key)")


def refused(asked: Asked, error: Exception) -> Answer:
    """Nothing was carried out, because its key could not be claimed."""
    signals.emit("key.refused", operation=asked.name.operation, error=why_of(error, ours=True))
    return problems.unreachable()


def tell_unprotected(asked: Asked, error: BaseException | str) -> None:
    """It was carried out, and that could not be written down."""
    signals.emit("key.unprotected", operation=asked.name.operation, error=why_of(error))


def give_up(
    asked: Asked, mine: Mine, error: BaseException, engines: Engines, *, kept: bool = True
) -> None:
    """The work ended with an error, which the caller raises: this adds none of its own. Not `kept`:
    it was refused before anything began."""
    try:
        drive(_given_up(asked, mine, error, kept), engines)
    except PostroomError as trouble:  # its lease will end by itself
        tell_unprotected(asked, trouble)


async def give_up_async(
    asked: Asked, mine: Mine, error: BaseException, engines: Engines, *, kept: bool = True
) -> None:
    """The same in an event loop; not torn by a cancellation."""

    async def write() -> None:
        try:
            await drive_async(_given_up(asked, mine, error, kept), engines)
        except PostroomError as trouble:
            tell_unprotected(asked, trouble)

    await finish(write())


def _given_up(asked: Asked, mine: Mine, error: BaseException, kept: bool) -> Steps[bool]:
    broken_off = not isinstance(error, Exception)
    return giving_up(asked, mine, type(error).__name__, broken_off=broken_off, kept=kept)


def tell_replay(asked: Asked, verdict: Verdict) -> None:
    """It was answered from memory, if it was."""
    if isinstance(verdict, Replay):
        status = verdict.answer.status
        signals.emit("key.replayed", operation=asked.name.operation, status=status)


def why_of(error: BaseException | str, *, ours: bool = False) -> str:
    """In one line, and without the values of a statement that failed. What the text of other errors
    holds nobody knows, so their class must do, unless the statement was ours."""
    if isinstance(error, PostroomError | str):
        return str(error)
    inner = getattr(error, "orig", error if ours else None)
    if inner is None:
        return type(error).__name__
    line = _DUPLICATE.sub("Duplicate entry …", str(inner).partition("\n")[0])
    if ours and _NO_TABLE.search(line):
        line += "; run `postroom db install`"
    return f"{type(error).__name__}: {signals.redact(line)}"
