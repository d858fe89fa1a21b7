"""Which lanes a relay gives up and takes, look by look: rules without I/O.

Promise: a lane that nobody works is taken by any relay that lives. Up to its fair share a relay
takes lanes at once. What stays nobody's it takes as well, whatever its share: after a moment where
a lease is over, and after two looks where a lane was given up for another, who may be slow to come.
Then it gives nothing up until the dead are out of the count; whoever is stopping is not in it.
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
    """A lane as the database has it; `left_us` until its lease is over, if it has an owner, and
    `lease_us` is the length of that lease."""

    lane: int
    owner: str | None
    paused: int
    left_us: int | None
    lease_us: int | None = None

    @property
    def is_free(self) -> bool:
        return self.owner is None or self.left_us is None or self.left_us < 0

    def outlasts(self, lease_us: int) -> bool:
        """Whether its lease ends later than its owner could have written it; `lease_us` is for an
        owner of an earlier version, which wrote no length."""
        return not self.is_free and (self.left_us or 0) > (self.lease_us or lease_us)


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
        self.seen_seconds = 2 * self.rest_seconds  # who was seen within them lives
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
        """It works some of the lanes that it owns; `live` were seen just now, and want lanes."""
        live = {*live, self._me}
        held = Counter(each.owner for each in lanes if not each.is_free)
        lacks = [fair_share(live, who) - held[who] for who in live if who != self._me]
        free = [
            each
            for each in lanes
            if each.lane not in owned
            and (not each.paused if each.is_free else each.owner == self._me)  # from a reconnect
        ]
        self._nobodys = {each.lane: self._nobodys.get(each.lane, now) for each in free}
        share = fair_share(live, self._me)
        room = max(share - len(working), 0)
        lacked = any(lack > 0 for lack in lacks)
        left = [each.lane for each in free[room:] if self._is_left(each, lacked, now)]
        if left:
            self._keep_until = now + self.seen_seconds
        take = [each.lane for each in free[:room]] + left
        give_up = working[share:] if now >= self._keep_until else ()
        awaited = room > len(take) and any(lack < 0 for lack in lacks)
        soon = len(take) < len(free) or awaited
        rest = self._soon_seconds if soon else self.rest_seconds
        return Look(give_up, take, min([rest, *self._ends(lanes)]))

    def _is_left(self, each: LaneSeen, lacked: bool, now: float) -> bool:
        """Whether a lane beyond one's share has been nobody's for long enough."""
        given_up = lacked and each.owner is None
        patience = self.seen_seconds if given_up else self._soon_seconds
        return now - self._nobodys[each.lane] >= patience

    def _ends(self, lanes: Sequence[LaneSeen]) -> list[float]:
        """The seconds until the leases of others are over."""
        others = [each.left_us for each in lanes if each.owner != self._me and not each.is_free]
        return [left_us / 1e6 + AFTER_SECONDS for left_us in others if left_us is not None]
