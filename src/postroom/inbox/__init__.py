"""The in-tray: what a consumer has handled, so that a message that comes again is applied once.

from postroom import inbox

with Session(engine) as session, session.begin():
    if inbox.once(session, "billing", message_id):
        ...                                   # the effect, on the same session

`Consumer` does that for every message of a broker, with retries, order and dead letters.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from postroom.inbox.once import once, once_async

if TYPE_CHECKING:
    from postroom.inbox.consumer import Consumed, Consumer
    from postroom.inbox.handlers import Received, upcast
    from postroom.inbox.helpers import (
        Guarded,
        execute_once,
        execute_once_async,
        guarded_update,
        guarded_update_async,
        upsert,
        upsert_async,
    )

__all__ = [
    "Consumed",
    "Consumer",
    "Guarded",
    "Received",
    "execute_once",
    "execute_once_async",
    "guarded_update",
    "guarded_update_async",
    "once",
    "once_async",
    "upcast",
    "upsert",
    "upsert_async",
]

_DOORS = {
    "Consumed": "postroom.inbox.consumer",
    "Consumer": "postroom.inbox.consumer",
    "Received": "postroom.inbox.handlers",
    "upcast": "postroom.inbox.handlers",
    **dict.fromkeys(
        (
            *("Guarded", "execute_once", "execute_once_async", "guarded_update"),
            *("guarded_update_async", "upsert", "upsert_async"),
        ),
        "postroom.inbox.helpers",
    ),
}


def __getattr__(name: str) -> Any:
    # Here, so that `once` alone brings no SQLAlchemy along.
    if name not in _DOORS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_DOORS[name]), name)
    globals()[name] = value
    return value
