"""The ledger: the permanent register of requests sent through the outbox, and what became of them.

    accepted ──yes──────────► succeeded
       │ ▲ └──no────────────► failed ──redrive──► accepted
       │ └──it did not arrive──┐
       └──no answer─────────► unknown ──looked up, or a person──► succeeded | failed

A request is entered in the transaction that publishes its message, and finished in the one that
settles it: no crash leaves one without the other. `unknown` says that it may have arrived; it is
never said to have failed while that is so.
"""

from postroom.ledger.rules import Entry, fingerprint

__all__ = ["Entry", "fingerprint"]
