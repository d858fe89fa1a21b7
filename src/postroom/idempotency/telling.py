"""What is told of requests that were not carried out, or not remembered."""

from __future__ import annotations

from postroom import signals
from postroom.idempotency import problems
from postroom.idempotency.exchange import Asked
from postroom.idempotency.rules import Answer, Replay, Verdict

__all__ = ["refused", "tell_replay", "tell_unprotected"]


def refused(asked: Asked, error: Exception) -> Answer:
    """Nothing was carried out, because its key could not be claimed."""
    signals.emit("key.refused", operation=asked.name.operation, error=str(error))
    return problems.unreachable()


def tell_unprotected(asked: Asked, error: BaseException | str) -> None:
    """It was carried out, and that could not be written down."""
    signals.emit("key.unprotected", operation=asked.name.operation, error=str(error))


def tell_replay(asked: Asked, verdict: Verdict) -> None:
    """It was answered from memory, if it was."""
    if isinstance(verdict, Replay):
        status = verdict.answer.status
        signals.emit("key.replayed", operation=asked.name.operation, status=status)
