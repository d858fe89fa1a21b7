"""A child of a process that forks (`gunicorn --preload`, uWSGI, multiprocessing) shares no
connection, thread or lock with it: two processes on one socket would read each other's answers."""

from __future__ import annotations

import os
from typing import Any, Protocol
from weakref import WeakSet

__all__ = ["keep_untouched", "renewed_in_child"]


class Renewed(Protocol):
    """What begins anew in a child."""

    def renew(self) -> None:
        """Forget what belongs to the parent."""


_all: WeakSet[Any] = WeakSet()
# What the parent goes on using: to close it, or to have it collected, would say goodbye for both.
_of_the_parent: list[Any] = []


def renewed_in_child(each: Renewed) -> None:
    """Have it begin anew in every child, while it lives."""
    _all.add(each)


def keep_untouched(*theirs: Any) -> None:
    """These are the parent's, and stay as they are until this process ends."""
    _of_the_parent.extend(theirs)


def _renew() -> None:
    for each in list(_all):
        each.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
