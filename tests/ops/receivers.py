"""Receivers that `call:receivers:…` reaches: one says yes, one refuses what is poison."""

from postroom.brokers.base import Outcome, Permanent
from postroom.messages import Message

received: list[Message] = []


def take(message: Message) -> None:
    """Say yes to everything."""
    received.append(message)


def refuse_poison(message: Message) -> Outcome | None:
    """Refuse for ever what says that it is poison."""
    if b"poison" in message.payload:
        return Permanent("unreadable", "it is poison")
    received.append(message)
    return None
