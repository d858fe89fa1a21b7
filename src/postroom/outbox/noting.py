"""What a lane has to say of requests: notes for the ledger, written with its settle.

Of most relays' messages none is a request, so looking for them must cost next to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from postroom import signals
from postroom.dead_letters.rules import storable
from postroom.ledger.rules import Note, State, entered, is_entered, key_of
from postroom.messages import Message
from postroom.signals import redact

__all__ = ["delivered", "tell", "troubled"]

ANSWER_CHARACTERS = 64_000


def delivered(
    messages: Sequence[Message], answers: Mapping[int, str], adapter: Callable[[str], str]
) -> dict[str, Note]:
    """The requests among messages that were delivered, with the receiver's answers."""
    return {
        message.id: Note(
            message.id,
            key_of(message),
            "succeeded",
            message.attempts + 1,
            adapter(message.topic),
            ends=True,
            answer=_kept(answers.get(message.position)),
        )
        for message in entered(messages)
    }


def troubled(
    message: Message,
    *,
    attempts: int,
    adapter: str,
    code: str,
    text: str,
    doubt: bool,
    ends: bool,
) -> dict[str, Note]:
    """A message that was not delivered, if it is a request. In doubt, it has not failed."""
    if not is_entered(message):
        return {}
    state: State = "unknown" if doubt else "failed" if ends else "accepted"
    note = Note(message.id, key_of(message), state, attempts, adapter, ends, None, code, text)
    return {message.id: note}


def tell(notes: Iterable[Note]) -> None:
    """What was written down of requests, for whoever listens."""
    for note in notes:
        signals.emit(
            "request.settled",
            id=note.id,
            idempotency_key=note.key,
            status=note.state,
            attempts=note.attempts,
            last_error_code=note.code,
            adapter=note.adapter,
        )


def _kept(answer: str | None) -> str | None:
    """An answer as it is kept: without secrets, storable everywhere, not too long."""
    if answer is None:
        return None
    return storable(redact(answer[: 2 * ANSWER_CHARACTERS]), ANSWER_CHARACTERS)
