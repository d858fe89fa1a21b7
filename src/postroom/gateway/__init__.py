"""The order gateway: a service that takes orders over HTTP and places each of them once.

    uvicorn postroom.gateway:app            # POSTROOM_DATABASE_URL, POSTROOM_BROKER_URL

    POST /do/order ──► ledger + outbox, one commit ──► 202
                            │
                       relay: adapter.send(order) ──► ledger: succeeded | failed | unknown
                            └── no answer? adapter.lookup(order) before it is sent again

An adapter is a function for `call:`. It returns `Delivered("what the exchange said")`, a reason's
code as text if the order was rejected, or raises TimeoutError if nobody knows; beside it, `lookup`
says what became of an order, by its client order id, which is the message's id.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

from postroom.errors import ConfigurationError

if TYPE_CHECKING:
    from postroom.gateway.service import create_app

__all__ = ["create_app", "tokens_from"]

TOKENS = "POSTROOM_GATEWAY_TOKENS"
_JOINED = re.compile(",[^,=]+=|,$")


def tokens_from(text: str | None) -> dict[str, list[str]]:
    """Clients and their secrets from `ada=secret bob=other`; nothing: nobody needs one.

    A name may come more than once: while a secret is replaced, both are good.
    """
    tokens: dict[str, list[str]] = {}
    for number, word in enumerate((text or "").split(), 1):
        name, _, secret = word.partition("=")
        if not name or not secret:
            # The word itself may be a secret, so it is not shown.
            raise ConfigurationError(f"word {number} of {TOKENS} must be NAME=SECRET.")
        if _JOINED.search(secret):
            raise ConfigurationError(
                f"word {number} of {TOKENS} looks like several: separate clients by spaces, not by "
                "commas."
            )
        tokens.setdefault(name, []).append(secret)
    return tokens


def __getattr__(name: str) -> Any:
    if name == "create_app":
        from postroom.gateway.service import create_app

        return create_app
    if name == "app":
        from postroom.config import load
        from postroom.gateway.service import create_app
        from postroom.worker.alert_webhook import receivers

        settings = load()
        return create_app(
            settings.require_database(),
            settings.routes if settings.routes.urls else None,
            tokens=tokens_from(os.environ.get(TOKENS)),
            settings=settings.relay,
            broker_options=settings.brokers,
            alerts=receivers(settings.alerts),
            alert_settings=settings.alerts,
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
