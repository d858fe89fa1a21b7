"""Brokers: one file per place messages go to, one protocol for all of them.

Importing this room imports no client library; `open_broker(url)` imports the one a URL names.
"""

from postroom.brokers.base import (
    Broker,
    BrokerOptions,
    CanExamine,
    CanLookUp,
    CanTellHowLong,
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
from postroom.brokers.options import OptionsByScheme, known_only, open_brokers, split_url
from postroom.brokers.receiving import CanReceive, Delivery, Subscription

__all__ = [
    "Broker",
    "BrokerOptions",
    "CanExamine",
    "CanLookUp",
    "CanReceive",
    "CanTellHowLong",
    "Capabilities",
    "Delivered",
    "Delivery",
    "OptionsByScheme",
    "Outcome",
    "Permanent",
    "Scope",
    "Subscription",
    "Transient",
    "Unknown",
    "known_only",
    "open_broker",
    "open_brokers",
    "scheme_of",
    "split_url",
]
