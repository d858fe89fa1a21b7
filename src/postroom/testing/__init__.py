"""For tests of applications that publish: what was published, what arrives, and time that passes.

    from postroom.testing import Clock, drain, published

`published(session)` tells what your code has published, queued messages included; `drain(url)`
really delivers and returns what arrived; `deliver(consumer, message, session)` calls a handler;
`Clock(url).advance(60)` moves the clock forward by a minute. Each has an asynchronous twin:
`published_async`, `drain_async`, `deliver_async`, `advance_async`. pytest has all of it in
the fixture `mailroom`. `check_broker` checks a broker of your own. The names load when first used,
since every run of pytest loads the plugin.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from postroom.testing.clock import Clock
    from postroom.testing.conformance import check_broker
    from postroom.testing.delivery import drain, drain_async
    from postroom.testing.looking import Posted, published, published_async
    from postroom.testing.mailroom import Mailroom
    from postroom.testing.receiving import deliver, deliver_async

__all__ = [
    "Clock",
    "Mailroom",
    "Posted",
    "check_broker",
    "deliver",
    "deliver_async",
    "drain",
    "drain_async",
    "published",
    "published_async",
]

_DOORS = {
    "Clock": "clock",
    "Mailroom": "mailroom",
    "Posted": "looking",
    "check_broker": "conformance",
    "deliver": "receiving",
    "deliver_async": "receiving",
    "drain": "delivery",
    "drain_async": "delivery",
    "published": "looking",
    "published_async": "looking",
}


def __getattr__(name: str) -> Any:
    if name not in _DOORS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_DOORS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
