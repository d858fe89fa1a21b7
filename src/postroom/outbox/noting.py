"""What a lane has to say of requests: notes for the ledger, written with its settle.

Of most relays' messages none is a request, so looking for them must cost next to nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from postroom import signals
from postroom.dead_letters.rules import storable
from postroom.ledger.rules import Note, State, entered, is_entered, key_of
from postroom.messages import Message
from postroom.signals import names_secret, redact

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
    answer = answer[: 2 * ANSWER_CHARACTERS]
    return storable(_without_secrets(answer), ANSWER_CHARACTERS)


class _Number(str):
    """A number as it was spelled: what an exchange says of a price is kept to the last digit."""


def _without_secrets(answer: str) -> str:
    """A JSON answer stays JSON, and one that holds no secret stays as it is, to the byte."""
    try:
        said = json.loads(
            answer,
            parse_int=_Number,
            parse_float=_Number,
            parse_constant=_Number,
            object_pairs_hook=tuple,  # and not a dict, which would drop a name that comes twice
        )
        safe = _cleaned(said)
        return answer if safe == said else _spelled(safe)
    except (ValueError, RecursionError):
        return redact(answer)


def _cleaned(value: Any) -> Any:
    """A document without what is a secret by its name, or by what it looks like."""
    if isinstance(value, tuple):
        return tuple(
            (redact(name), "***" if names_secret(name) and _tells(each) else _cleaned(each))
            for name, each in value
        )
    if isinstance(value, list):
        return [_cleaned(each) for each in value]
    return redact(value) if isinstance(value, str) and not isinstance(value, _Number) else value


def _tells(value: Any) -> bool:
    return value is not None and not isinstance(value, bool)


def _spelled(value: Any) -> str:
    if isinstance(value, tuple):
        return "{" + ",".join(f"{_spelled(name)}:{_spelled(each)}" for name, each in value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_spelled, value)) + "]"
    return value if isinstance(value, _Number) else json.dumps(value, ensure_ascii=False)
