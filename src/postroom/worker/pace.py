"""How fast a worker works: rates of its totals over the last seconds, as its report states them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["Pace"]

WINDOW_SECONDS = 10.0


class Pace:
    """Rates of some totals of one worker, over a window that moves with its beats."""

    def __init__(
        self,
        names: tuple[str, ...] = ("received", "handled"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._names = names
        self._clock = clock
        # The totals begin at zero when the worker does.
        self._past: deque[tuple[float, Mapping[str, Any]]] = deque([(clock(), {})])

    def add(self, totals: Mapping[str, Any]) -> dict[str, float]:
        """Add the totals of now; returns `NAME_per_second` for each name."""
        now = self._clock()
        self._past.append((now, totals))
        while len(self._past) > 2 and now - self._past[1][0] >= WINDOW_SECONDS:
            self._past.popleft()
        begun, before = self._past[0]
        seconds = max(now - begun, 1.0)
        return {
            f"{name}_per_second": round((totals[name] - before.get(name, 0)) / seconds, 2)
            for name in self._names
        }
