"""Options of a broker: from the query of its URL, and from settings by its scheme.

Promise: an option nobody knows is refused with those that are known, and no error shows a value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeAlias
from urllib.parse import parse_qsl

from postroom.brokers.base import Broker, BrokerOptions, known_schemes, open_broker, scheme_of
from postroom.errors import ConfigurationError

__all__ = ["OptionsByScheme", "known_only", "open_brokers", "split_url", "whole_number"]

OptionsByScheme: TypeAlias = Mapping[str, Mapping[str, str]]


def split_url(url: str, options: BrokerOptions, known: Iterable[str]) -> tuple[str, dict[str, str]]:
    """The URL without its query, and all options: those of the URL over those of `options`.

    For brokers whose own URLs have no query; the others use `known_only`.
    """
    names = list(known)
    address, mark, query = url.partition("?")
    given: dict[str, str] = {}
    if mark:
        # A password that holds a ? makes a query of its rest: no word of it may be shown.
        if "@" in query or not query:
            raise _bad_query(url)
        try:
            pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True)
        except ValueError:
            raise _bad_query(url) from None
        given = dict(pairs)
        if len(given) < len(pairs):
            raise ConfigurationError(f"an option stands twice in the {scheme_of(url)}:// URL")
    return address, known_only(scheme_of(url), {**options.extra, **given}, names)


def known_only(scheme: str, options: Mapping[str, str], known: Iterable[str]) -> dict[str, str]:
    """The options, or an error that names the one nobody knows and those somebody does."""
    names = list(known)
    for name in options:
        if name not in names:
            listed = f"known are {', '.join(sorted(names))}" if names else "there are none"
            raise ConfigurationError(f"{name!r} is not an option of {scheme}: {listed}")
    return dict(options)


def open_brokers(
    urls: Iterable[str], options: BrokerOptions, by_scheme: OptionsByScheme | None = None
) -> dict[str, Broker]:
    """A broker for each URL, with the options that settings hold for its scheme."""
    table = by_scheme or {}
    for scheme in table:
        if scheme not in known_schemes():
            raise ConfigurationError(
                f"the settings have options for {scheme}://, and there is no such broker: "
                f"known are {', '.join(sorted(known_schemes()))}"
            )
    return {
        url: open_broker(
            url, replace(options, extra={**options.extra, **table.get(scheme_of(url), {})})
        )
        for url in urls
    }


def whole_number(
    options: Mapping[str, str],
    name: str,
    otherwise: int,
    *,
    least: int = 1,
    most: int | None = None,
) -> int:
    """An option that is a whole number, or what it is if nobody set it."""
    value = options.get(name, str(otherwise))
    if not value.isdecimal() or int(value) < least or (most is not None and int(value) > most):
        span = f"from {least} on" if most is None else f"from {least} to {most}"
        raise ConfigurationError(f"{name} must be a whole number {span}, not {value!r}")
    return int(value)


def _bad_query(url: str) -> ConfigurationError:
    return ConfigurationError(
        f"bad {scheme_of(url)}:// URL: options stand behind it as ?name=value&name=value, and a ? "
        "in a name or password is written %3F"
    )
