"""Where a server is, who we are there, and what is wished of it: the parts of a broker's URL.

Promise: no text about the place holds a secret, and a scheme with TLS never goes without it.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from postroom.brokers.base import BrokerOptions
from postroom.brokers.options import split_url
from postroom.errors import ConfigurationError

__all__ = ["Address"]

_TLS = ("tls_ca", "tls_cert", "tls_key")


@dataclass(frozen=True, repr=False)
class Address:
    """One server. `options` are those of the URL's query, and of the settings, which count less."""

    scheme: str
    host: str
    port: int
    path: str
    user: str | None
    password: str | None
    options: dict[str, str]
    context: ssl.SSLContext | None

    @classmethod
    def of(
        cls,
        url: str,
        given: BrokerOptions,
        *,
        ports: Mapping[str, int],
        known: tuple[str, ...],
        example: str,
    ) -> Address:
        """The address in a URL. `ports` are the schemes' own; the last scheme is the one with TLS.

        `known` are the options that may stand in the query, beside `user`, `password` and TLS's.
        """
        try:
            parts = urlsplit(url)
            scheme, host = parts.scheme, parts.hostname or "localhost"
            port = parts.port or ports[scheme]
        except (ValueError, KeyError):
            # Not the URL itself: its password might stand in it.
            raise ConfigurationError(f"bad broker URL: write {example}") from None
        _, options = split_url(url, given, (*known, *_TLS, "user", "password", "max_outstanding"))
        user = unquote(parts.username) if parts.username else options.pop("user", None)
        password = unquote(parts.password) if parts.password else options.pop("password", None)
        context = _context(options, scheme, secure=scheme == list(ports)[-1])
        return cls(scheme, host, port, unquote(parts.path), user, password, options, context)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.path}"

    __repr__ = __str__

    def without_secrets(self, text: str) -> str:
        """The text without our password, or without the name where that is all there is."""
        secret = self.password or self.user
        return text.replace(secret, "***") if secret else text


def _context(options: Mapping[str, str], scheme: str, *, secure: bool) -> ssl.SSLContext | None:
    given = [name for name in _TLS if name in options]
    if not secure:
        if given:
            raise ConfigurationError(f"{given[0]} is for TLS, and {scheme}:// goes without it")
        return None
    try:
        context = ssl.create_default_context(cafile=options.get("tls_ca"))
    except OSError as error:
        said = f"tls_ca: {options.get('tls_ca')!r} cannot be read: {error}"
        raise ConfigurationError(said) from error
    if certificate := options.get("tls_cert"):
        try:
            context.load_cert_chain(certificate, options.get("tls_key"))
        except OSError as error:
            said = f"tls_cert: {certificate!r} cannot be used: {error}"
            raise ConfigurationError(said) from error
    return context
