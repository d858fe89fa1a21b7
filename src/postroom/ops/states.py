"""The five observable states of a message, and how the places it can be in map onto them.

outbox, delayed ──► pending        a batch in flight ──► sending
held            ──► failed if it was tried, else pending: it waits behind another
archive         ──► succeeded      dead, discarded, expired ──► aborted
queued          ──► pending        resolved ──► succeeded: it was delivered after all
"""

from __future__ import annotations

__all__ = ["OBSERVED", "observed"]

OBSERVED = ("pending", "sending", "succeeded", "failed", "aborted")

_STATES = {
    "outbox": "pending",
    "delayed": "pending",
    "held": "pending",
    "blocked": "aborted",
    "archive": "succeeded",
    "dead": "aborted",
    "queued": "pending",
    "resolved": "succeeded",
    "discarded": "aborted",
    "expired": "aborted",
}


def observed(place: str, *, attempts: int, error_code: str | None, sending: bool = False) -> str:
    """Return the state of a message. `sending`: a relay has recorded that it is sending it."""
    if sending and place in ("outbox", "held"):
        return "sending"
    if place == "held" and attempts:
        return "failed"
    if place == "resolved" and error_code == "expired":
        return "aborted"
    return _STATES[place]
