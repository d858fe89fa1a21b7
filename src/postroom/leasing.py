"""How long a lease is: shorter than `lease_seconds`, by what others may take to find it over.

So the setting is a promise: what a dead process had is in other hands within `lease_seconds`.
"""

__all__ = ["LEASED", "lease_us", "leased"]

LEASED = 0.85


def leased(lease_seconds: float) -> float:
    """The seconds for which a lease is written down."""
    return lease_seconds * LEASED


def lease_us(lease_seconds: float) -> int:
    """The same in microseconds."""
    return int(leased(lease_seconds) * 1e6)
