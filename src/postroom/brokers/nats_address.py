"""Where NATS is and who we are there.

Promise: no text about the place holds a secret, and with `tls://` nothing secret goes out in clear.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

from postroom.errors import ConfigurationError

__all__ = ["Address"]

_DEFAULT_PORT = 4222


@dataclass(frozen=True, repr=False)
class Address:
    """The servers without user information, and the secrets apart."""

    servers: list[str]
    user: str | None
    password: str | None
    credentials: str | None
    context: ssl.SSLContext | None

    @classmethod
    def of(cls, url: str, extra: Mapping[str, str]) -> Address:
        """The address of one server, or of several as nats://user:password@a:4222,b:4222."""
        scheme = url.partition(":")[0]
        user = password = None
        servers = []
        try:
            for place in url.split(","):
                parts = urlsplit(f"{scheme}://{place.rpartition('://')[2]}")
                if parts.username and user is None:
                    user = unquote(parts.username)
                    password = None if parts.password is None else unquote(parts.password)
                host = parts.hostname or "localhost"
                host = f"[{host}]" if ":" in host else host
                servers.append(f"{scheme}://{host}:{parts.port or _DEFAULT_PORT}")
        except ValueError:
            # Not the URL itself: its password might stand in it.
            raise ConfigurationError("bad NATS URL: write nats://user:password@host:4222") from None
        return cls(servers, user, password, extra.get("credentials"), _context(extra.get("tls_ca")))

    def __str__(self) -> str:
        return ",".join(self.servers)

    __repr__ = __str__

    def settings(self) -> dict[str, Any]:
        """What nats-py's `connect` needs to know. A user without a password is a token."""
        settings: dict[str, Any] = {
            "servers": self.servers,
            "user_credentials": self.credentials,
            "tls": self.context,
        }
        if self.user is not None and self.password is None:
            settings["token"] = self.user
        elif self.user is not None:
            settings |= {"user": self.user, "password": self.password}
        return settings

    def guard(self, client: Any) -> None:
        """Let the client introduce itself, which shows its secrets, only where it may."""
        introduce = client._connect_command

        def guarded() -> bytes:
            self.check_tls(client)
            command: bytes = introduce()
            return command

        client._connect_command = guarded

    def check_tls(self, client: Any) -> None:
        """Refuse to go on in clear with tls://: nats-py encrypts only if the server asks for it."""
        if self.servers[0].startswith("tls:") and not client._server_info.get("tls_required"):
            raise ConnectionError("the server does not ask for TLS, and tls:// means never without")

    def without_secrets(self, text: str) -> str:
        for secret in (self.user, self.password):
            text = text.replace(secret, "***") if secret else text
        return text


def _context(certificates: str | None) -> ssl.SSLContext | None:
    if certificates is None:
        return None
    try:
        return ssl.create_default_context(cafile=certificates)
    except OSError as error:
        raise ConfigurationError(f"tls_ca: {certificates!r} cannot be read: {error}") from error
