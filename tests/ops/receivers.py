"""Receivers that `call:receivers:…` reaches, each with a temper of its own."""

import threading
import time

from postroom.brokers.base import Outcome, Permanent, Transient
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


def busy(message: Message) -> Outcome:
    """Never now."""
    return Transient("busy", "try later")


gate = threading.Event()


def gated(message: Message) -> None:
    """Say yes to the first one, and keep the next waiting until the gate is open."""
    received.append(message)
    gate.wait(20)


def slow(message: Message) -> None:
    """Say yes after a while."""
    time.sleep(0.02)
    received.append(message)
