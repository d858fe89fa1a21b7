"""How long and how full a schedule is, and what may happen in it."""

from dataclasses import dataclass, field
from typing import Any

from postroom.retry import RetryPolicy

ROUTES = {"orders": "sim://one", "*": "sim://two"}
TOPICS = ("orders", "orders", "bills")
TROUBLES = (
    "crash", "freeze", "stop", "join", "snap", "restart", "lossy", "slow database", "slow brokers",
    "down", "silent", "topic down", "refuse", "unknown", "raise", "drain",
)  # fmt: skip

QUICK = RetryPolicy((0.3, 0.6, 1.2), attempts=6)


@dataclass(frozen=True)
class Size:
    """How long and how full a schedule is."""

    seconds: float = 4.0
    writers: int = 3
    transactions: int = 4  # of each writer
    gap_seconds: float = 0.5  # between two of them
    pause_seconds: float = 1.0  # between two troubles
    relays: int = 2
    troubles: tuple[str, ...] = ()  # all of these; none: any number of any
    refuses: float = 0.0  # how often the brokers refuse from the beginning
    latency_seconds: float = 0.003  # and how slow they are
    outages_seconds: tuple[float, ...] = (0.3, 3.0, 10.0)  # how long one lasts at most
    late_seconds: float = 5.0  # within which what is delayed is due, and what expires does
    retry: RetryPolicy = QUICK
    quiet_seconds: float = 150.0  # within which all is done when there is peace
    shift_seconds: float = 0.0  # how long a relay works until it is stopped; 0: for ever
    away_seconds: float = 0.0  # how long nobody works at most, but for a scheduler's calls
    settings: dict[str, Any] = field(default_factory=dict)


SMALL = Size()
