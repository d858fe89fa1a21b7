"""Idempotency keys: one request, one effect, one answer.

from postroom.idempotency import Keys, Policy
from postroom.idempotency.fastapi import keyed_session, protect

A client names its request with a key. The first time it is carried out; the same request again is
answered from memory; another request with the same key is refused. A record, the business change,
the messages it publishes and the answer can be one commit (`same_transaction`); or go on from named
points after a crash (`resume`); or stand under a lease, in doubt when their process is lost.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from postroom.derivation import derive_key
    from postroom.idempotency.finisher import Finisher
    from postroom.idempotency.functions import idempotent
    from postroom.idempotency.keys import AT_CLAIM, SHARED, UNKEYED, Keys
    from postroom.idempotency.policy import NotDone, Policies, Policy
    from postroom.idempotency.resume import resumable
    from postroom.idempotency.rules import Answer, Name
    from postroom.idempotency.runs import Run, ThreadRun

__all__ = [
    "AT_CLAIM",
    "SHARED",
    "UNKEYED",
    "Answer",
    "Finisher",
    "Keys",
    "Name",
    "NotDone",
    "Policies",
    "Policy",
    "Run",
    "ThreadRun",
    "derive_key",
    "idempotent",
    "resumable",
]

_DOORS = {
    "AT_CLAIM": "postroom.idempotency.keys",
    "SHARED": "postroom.idempotency.keys",
    "UNKEYED": "postroom.idempotency.keys",
    "Answer": "postroom.idempotency.rules",
    "Keys": "postroom.idempotency.keys",
    "Name": "postroom.idempotency.rules",
    "NotDone": "postroom.idempotency.policy",
    "Policies": "postroom.idempotency.policy",
    "Policy": "postroom.idempotency.policy",
    "Finisher": "postroom.idempotency.finisher",
    "Run": "postroom.idempotency.runs",
    "ThreadRun": "postroom.idempotency.runs",
    "derive_key": "postroom.derivation",
    "idempotent": "postroom.idempotency.functions",
    "resumable": "postroom.idempotency.resume",
}


def __getattr__(name: str) -> Any:
    if name not in _DOORS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_DOORS[name]), name)
    globals()[name] = value
    return value
