"""What of one partition is in hand under one claim, and up to where all of it is done. No I/O.

Promise: the position never passes a message that was not acknowledged, in whatever order they are.
"""

from __future__ import annotations

from collections import deque

__all__ = ["Ledger"]


class Ledger:
    """Offsets of a partition from the moment we got it until it is taken away.

    handed out   7   8   9  10  12        (Kafka's offsets may have gaps)
    acked            ✓   ✓      ✓
    position = 7: after an ack of 7 it is 10, after one of 10 too it is 13.
    """

    def __init__(self, claim: int) -> None:
        self.claim = claim
        self.committed: int | None = None
        self.position: int | None = None
        self._out: deque[int] = deque()
        self._acked: set[int] = set()
        self._next = 0

    def hand_out(self, offset: int) -> bool:
        """Note that a message is handed out; False if it was before, under this claim."""
        if offset < self._next:
            return False
        self._next = offset + 1
        self._out.append(offset)
        return True

    def ack(self, offset: int) -> None:
        """It is done. Later ones may come first, and are remembered."""
        if not self._out or offset < self._out[0]:
            return
        self._acked.add(offset)
        while self._out and self._out[0] in self._acked:
            done = self._out.popleft()
            self._acked.discard(done)
            self.position = done + 1

    def is_open(self, offset: int) -> bool:
        """Whether it was handed out and not acknowledged."""
        return bool(self._out) and self._out[0] <= offset < self._next and offset not in self._acked

    @property
    def dirty(self) -> bool:
        """Whether more is done than the broker was told."""
        return self.position is not None and self.position != self.committed

    @property
    def in_hand(self) -> int:
        return len(self._out) - len(self._acked)
