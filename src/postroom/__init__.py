"""Postroom: a committed fact is never lost, never invented, arrives in order for its key, and is
applied once.

The public names load when first used: importing `postroom` imports no driver and no SQLAlchemy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from postroom import errors
    from postroom.errors import PostroomError, Rejected
    from postroom.inbox.consumer import Consumer
    from postroom.inbox.handlers import upcast
    from postroom.messages import Draft, Message, message
    from postroom.outbox.publish import Outbox, Published
    from postroom.outbox.relay import Relay
    from postroom.outbox.requests import Ledger
    from postroom.retry import RetryPolicy

__all__ = [
    "Consumer",
    "Draft",
    "Ledger",
    "Message",
    "Outbox",
    "PostroomError",
    "Published",
    "Rejected",
    "Relay",
    "RetryPolicy",
    "__version__",
    "errors",
    "message",
    "upcast",
]

_DOORS = {
    "Consumer": "postroom.inbox.consumer",
    "Draft": "postroom.messages",
    "Ledger": "postroom.outbox.requests",
    "Message": "postroom.messages",
    "Outbox": "postroom.outbox.publish",
    "PostroomError": "postroom.errors",
    "Published": "postroom.outbox.publish",
    "Rejected": "postroom.errors",
    "Relay": "postroom.outbox.relay",
    "RetryPolicy": "postroom.retry",
    "message": "postroom.messages",
    "upcast": "postroom.inbox.handlers",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("postroom")
    elif name == "errors":
        value = import_module("postroom.errors")
    elif name in _DOORS:
        value = getattr(import_module(_DOORS[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
