"""Brokers: one file per place messages go to, one protocol for all of them.

Importing this room imports no client library; `open_broker(url)` imports the one a URL names.
"""

from postroom.brokers.base import (
    Broker,
    BrokerOptions,
    CanLookUp,
    Capabilities,
    Delivered,
    Outcome,
    Permanent,
    Scope,
    Transient,
    Unknown,
    open_broker,
    scheme_of,
)

__all__ = [
    "Broker",
    "BrokerOptions",
    "CanLookUp",
    "Capabilities",
    "Delivered",
    "Outcome",
    "Permanent",
    "Scope",
    "Transient",
    "Unknown",
    "open_broker",
    "scheme_of",
]
