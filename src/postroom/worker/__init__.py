"""What relays and consumers have in common: how they are seen to live, and how they wait."""

from importlib.metadata import version as _installed

__all__ = ["version"]


def version() -> str:
    """The version of Postroom that works here, for what a worker says of itself."""
    return _installed("postroom")
