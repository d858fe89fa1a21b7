"""Which lanes a relay gives up and takes, look by look: rules without I/O.

Promise: a lane that nobody works is taken by any relay that lives, a moment after it is seen. Up to
its fair share a relay takes lanes at once. What is nobody's for longer it takes as well: whoever
was to have them has died. Then it gives nothing up until the dead are out of the count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

from postroom.leasing import leased
from postroom.messages import LANES

__all__ = ["LaneSeen", "Look", "Shares", "fair_share"]

# A little after a lease is over, so that the database agrees.
AFTER_SECONDS = 0.01


class LaneSeen(NamedTuple):
    """A lane as the database has it; `left_us` until its lease is over, if it has an owner."""

    lane: int
    owner: str | None
    paused: int
    left_us: int | None

    @property
    def is_free(self) -> bool:
        return self.owner is None or self.left_us is None or self.left_us < 0


class Look(NamedTuple):
    """What a look comes to: the lanes to give up, those to take, and when to look again."""

    give_up: Sequence[int]
    take: Sequence[int]
    again_seconds: float


def fair_share(workers: Collection[str], me: str) -> int:
    """How many lanes this worker may own, given all that live (itself too)."""
    everyone = sorted({*workers, me})
    share, rest = divmod(LANES, len(everyone))
    return share + (1 if everyone.index(me) < rest else 0)


class Shares:
    """One relay's share of the lanes, from look to look."""

    def __init__(self, me: str, lease_seconds: float) -> None:
        self._me = me
        self.lease_seconds = leased(lease_seconds)
        self.rest_seconds = min(1.0, self.lease_seconds / 4)
        # Whoever has no lane lives if it was seen just now: lanes that wait for the dead wait long.
        self.seen_seconds = 2 * self.rest_seconds
        self._soon_seconds = min(0.25, lease_seconds / 40)
        self._nobodys: dict[int, float] = {}  # since when
        self._keep_until = 0.0

    def look(
        self,
        lanes: Sequence[LaneSeen],
        live: Collection[str],
        *,
        working: Sequence[int],
        owned: Collection[int],
        now: float,
    ) -> Look:
        """It works some of the lanes that it owns. Whoever has a lease lives, and so do those who
        were seen just now."""
        held = Counter(each.owner for each in lanes if each.owner and not each.is_free)
        workers = {*held, *live, self._me}
        share = fair_share(workers, self._me)
        free = [
            each.lane
            for each in lanes
            if each.lane not in owned
            and (not each.paused if each.is_free else each.owner == self._me)  # from a reconnect
        ]
        self._nobodys = {lane: self._nobodys.get(lane, now) for lane in free}
        room = max(share - len(working), 0)
        left = [lane for lane in free[room:] if now - self._nobodys[lane] >= 2 * self._soon_seconds]
        if left:
            self._keep_until = now + self.seen_seconds
        take = free[:room] + left
        give_up = working[share:] if now >= self._keep_until else ()
        awaited = room > len(take) and any(
            held[each] > fair_share(workers, each) for each in held if each != self._me
        )
        leaving = bool(give_up) or len(owned) > len(working)
        soon = len(take) < len(free) or awaited or leaving
        rest = self._soon_seconds if soon else self.rest_seconds
        return Look(give_up, take, min([rest, *self._ends(lanes)]))

    def _ends(self, lanes: Sequence[LaneSeen]) -> list[float]:
        """The seconds until the leases of others are over."""
        others = [each.left_us for each in lanes if each.owner != self._me and not each.is_free]
        return [left_us / 1e6 + AFTER_SECONDS for left_us in others if left_us is not None]
