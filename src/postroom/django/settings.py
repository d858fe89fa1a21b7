"""POSTROOM in Django's settings, checked once, in the words of `postroom.toml` and of `Outbox`.

POSTROOM = {
    "database": "default",                 # the alias in DATABASES that holds the outbox
    "database_url": "postgresql://…",      # for the relay, if it is not to be that of DATABASES
    "broker_url": "nats://…",
    "brokers": {"nats": {"tls_ca": "…"}},  # options of brokers by the scheme of their URL
    "relay": {"lease_seconds": 60, "routes": {"orders.*": "nats://…"}},
    "consumer": {"concurrency": 8},
    "routes": {"order.*": "orders"},       # these three as in Outbox(...)
    "max_bytes": 1_000_000,
    "notify": True,                        # PostgreSQL: wake relays of other processes
    "keys": "shop.keys.keys",              # idempotency keys, for their middleware
}
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

from django.conf import settings as django_settings
from django.db import connections

from postroom import config
from postroom.brokers.base import known_schemes, scheme_of
from postroom.databases.django import dialect_of
from postroom.django.addresses import url_of
from postroom.errors import ConfigurationError, PostroomError, UnknownConnection
from postroom.messages import DEFAULT_MAX_BYTES
from postroom.outbox import wake
from postroom.outbox.publish import Outbox

__all__ = [
    "Chosen",
    "alias",
    "chosen",
    "connection",
    "document",
    "forget",
    "outbox",
    "problems",
    "under_test",
    "url_for",
]


@dataclass(frozen=True, slots=True)
class Chosen:
    """What POSTROOM says, with a default for what it does not."""

    database: str = "default"
    database_url: str | None = field(default=None, repr=False)
    broker_url: str | None = field(default=None, repr=False)
    brokers: Mapping[str, Mapping[str, str]] = field(default_factory=dict, repr=False)
    relay: Mapping[str, Any] = field(default_factory=dict, repr=False)
    consumer: Mapping[str, Any] = field(default_factory=dict, repr=False)
    routes: Mapping[str, str] = field(default_factory=dict)
    max_bytes: int = DEFAULT_MAX_BYTES
    notify: bool = False
    keys: Any = None


_NAMES = [each.name for each in fields(Chosen)]


@cache
def chosen() -> Chosen:
    """The settings, or the first thing that is wrong with them."""
    for problem in problems():
        raise ConfigurationError(problem)
    return Chosen(**_given())


def forget() -> None:
    """Read everything anew: a test has overridden settings."""
    chosen.cache_clear()
    outbox.cache_clear()


def alias(using: str | None = None) -> str:
    """Return an existing alias of DATABASES: `using`, or the configured one."""
    named = chosen().database if using is None else using
    if named not in connections:
        raise UnknownConnection(f"{_no_alias(named)}: pass one of them as using=")
    return named


def connection(using: str | None = None) -> Any:
    """The connection of an alias in this thread, the chosen one unless told."""
    return connections[alias(using)]


@cache
def outbox() -> Outbox:
    """The outbox as POSTROOM describes it."""
    settings = chosen()
    if settings.notify:
        _notify(settings.database_url or url_of(connection()))
    return Outbox(routes=settings.routes, max_bytes=settings.max_bytes)


@cache
def _notify(url: str) -> None:
    from postroom.outbox.notify import Notifier

    wake.listen(Notifier(url).hint)


def document(using: str | None = None) -> dict[str, Any]:
    """The settings of commands and consumers, as `postroom.toml` would hold them."""
    settings = chosen()
    told: dict[str, Any] = {
        "database_url": url_for(using),
        "relay": dict(settings.relay),
        "consumer": dict(settings.consumer),
        "brokers": dict(settings.brokers),
    }
    return told | ({"broker_url": settings.broker_url} if settings.broker_url else {})


def url_for(using: str | None = None) -> str:
    """Return the URL of an alias by the present DATABASES; `database_url` replaces that of
    the configured alias, except in Django's tests, whose database is another."""
    settings, there = chosen(), connection(using)
    if settings.database_url and there.alias == settings.database and not under_test():
        return settings.database_url
    return url_of(there)


def under_test() -> bool:
    """Whether a test runner of Django's, or pytest-django, has set this process up."""
    from django.test import utils

    return hasattr(getattr(utils, "_TestState", None), "saved_data")


def problems() -> list[str]:
    """Everything wrong with POSTROOM, a sentence each."""
    return list(_problems(_given()))


def _given() -> Any:
    return getattr(django_settings, "POSTROOM", {})


def _problems(given: Any) -> Iterator[str]:
    if not isinstance(given, dict):
        yield "POSTROOM must be a dict: POSTROOM = {'broker_url': 'nats://localhost:4222'}."
        return
    for name in given:
        if name not in _NAMES:
            near = config.nearest(str(name).lower(), _NAMES)
            hint = f"did you mean {near!r}?" if near else f"it may hold {', '.join(_NAMES)}."
            yield f"POSTROOM[{name!r}] is not a setting; {hint}"
    yield from _wrong_database(given.get("database", "default"), given.get("notify", False))
    for name in ("database_url", "broker_url"):
        if given.get(name) is not None and not (isinstance(given[name], str) and given[name]):
            yield f"POSTROOM[{name!r}] must be the text of a URL, or be left out."
        elif name == "broker_url" and given.get(name):
            yield from _wrong_scheme(given[name])
    if given.get("keys") is not None and not (
        isinstance(given["keys"], str) or callable(given["keys"])
    ):
        yield "POSTROOM['keys'] must say where your Keys are, such as 'shop.keys.keys'."
    yield from _wrong_outbox(given)
    yield from _wrong_relay(given)


def _wrong_scheme(url: str) -> Iterator[str]:
    try:
        scheme, known = scheme_of(url), known_schemes()
    except ConfigurationError as error:
        yield f"POSTROOM['broker_url']: {error}."
        return
    if scheme not in known:
        yield f"POSTROOM['broker_url']: no broker for {scheme}://; known are {', '.join(known)}."


def _wrong_database(alias: Any, notify: Any) -> Iterator[str]:
    if not isinstance(notify, bool):
        yield "POSTROOM['notify'] must be True or False."
    if not isinstance(alias, str) or alias not in connections:
        yield f"POSTROOM['database']: {_no_alias(alias)}."
        return
    try:
        dialect = dialect_of(connections[alias])
    except UnknownConnection as error:
        yield f"POSTROOM['database']: {error}."
        return
    if notify is True and dialect != "postgresql":
        yield "POSTROOM['notify'] needs PostgreSQL; leave it out, and relays poll."


def _no_alias(alias: Any) -> str:
    return f"DATABASES has no {alias!r}; it has {', '.join(map(repr, connections))}"


def _wrong_outbox(given: dict[str, Any]) -> Iterator[str]:
    most = given.get("max_bytes", 1)
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        yield "POSTROOM['max_bytes'] must be a whole number above zero."
    routes = given.get("routes", {})
    if not isinstance(routes, Mapping) or not all(isinstance(name, str) for name in routes):
        yield "POSTROOM['routes'] must be a dict of message types to topics."
        return
    try:
        Outbox(routes=routes)
    except PostroomError as error:
        yield f"POSTROOM: {error}."


def _wrong_relay(given: dict[str, Any]) -> Iterator[str]:
    relay = given.get("relay", {})
    routes = relay.get("routes", {}) if isinstance(relay, dict) else None
    if not isinstance(routes, dict):
        yield "POSTROOM['relay'] must be a dict, and its 'routes' one of topics to broker URLs."
        return
    for name in ("relay", "consumer", "brokers"):
        try:
            config.load(base={name: copy.deepcopy(given.get(name, {}))}, environ={})
        except ConfigurationError as error:
            yield f"POSTROOM[{name!r}]: {error}"
