"""How long and how full a schedule is, and what may happen in it."""

from dataclasses import dataclass, field
from typing import Any

ROUTES = {"orders": "sim://one", "*": "sim://two"}
TOPICS = ("orders", "orders", "bills")
TROUBLES = (
    "crash", "freeze", "stop", "join", "snap", "restart", "lossy", "slow database", "slow brokers",
    "down", "silent", "topic down", "refuse", "unknown", "raise",
)  # fmt: skip


@dataclass(frozen=True)
class Size:
    """How long and how full a schedule is."""

    seconds: float = 4.0
    writers: int = 3
    transactions: int = 4
    pause_seconds: float = 1.0  # between two troubles
    relays: int = 2
    troubles: tuple[str, ...] = ()  # all of these; none: any number of any
    refuses: float = 0.0  # how often the brokers refuse from the beginning
    latency_seconds: float = 0.003  # and how slow they are
    settings: dict[str, Any] = field(default_factory=dict)


SMALL = Size()
