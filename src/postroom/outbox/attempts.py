"""How sends went, for whoever counts."""

from __future__ import annotations

from collections.abc import Sequence

from postroom import signals
from postroom.brokers.base import CROWDED, DELIVERED, Delivered, Outcome, Permanent, Unknown

__all__ = ["tell"]


def tell(url: str, outcomes: Sequence[Outcome]) -> None:
    """Tell of one send to a broker: how many of its messages came to which end."""
    results = {"delivered": outcomes.count(DELIVERED), "transient": 0, "permanent": 0}
    results |= {"unknown": 0, "down": 0}
    if results["delivered"] < len(outcomes):
        results["delivered"] = sum(isinstance(each, Delivered) for each in outcomes)
        for outcome in outcomes:
            if isinstance(outcome, Permanent):
                results["permanent"] += 1
            elif not isinstance(outcome, Delivered) and outcome != CROWDED:
                name = "unknown" if isinstance(outcome, Unknown) else "transient"
                results["down" if getattr(outcome, "down", None) else name] += 1
    signals.emit(
        "message.attempted",
        adapter=url,
        delivered=results["delivered"],
        transient=results["transient"],
        permanent=results["permanent"],
        unknown=results["unknown"],
        down=results["down"],
    )
