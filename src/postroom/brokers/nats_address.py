"""Where NATS is and who we are there.

Promise: no text about the place holds a secret, and with `tls://` nothing secret goes out in clear.
"""

from __future__ import annotations

import importlib.util
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

from postroom.errors import ConfigurationError, MissingDriver

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
        """The address of one server, or of several as nats://user:password@a:4222,b:4222.

        Options say who we are where the URL does not.
        """
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
        if user is None:
            user, password = _user(extra)
        return cls(servers, user, password, _credentials(extra), _context(extra))

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


def _user(options: Mapping[str, str]) -> tuple[str | None, str | None]:
    user, password, token = map(options.get, ("user", "password", "token"))
    if (user is None) != (password is None) or (user is not None and token is not None):
        raise ConfigurationError("NATS wants user and password, or a token alone")
    return (user, password) if token is None else (token, None)


def _credentials(options: Mapping[str, str]) -> str | None:
    path = options.get("credentials")
    if path is not None:
        if importlib.util.find_spec("nkeys") is None:
            raise MissingDriver("credentials need nkeys: pip install 'nats-py[nkeys]'")
        _require_file("credentials", path)
    return path


def _context(options: Mapping[str, str]) -> ssl.SSLContext | None:
    """What to trust, and with what to show who we are; None: the system's own, and nothing."""
    authorities, certificate, key = map(options.get, ("tls_ca", "tls_cert", "tls_key"))
    if key is not None and certificate is None:
        raise ConfigurationError("tls_key needs tls_cert: the certificate the key belongs to")
    if authorities is None and certificate is None:
        return None
    try:
        context = ssl.create_default_context(cafile=authorities)
    except OSError as error:
        raise ConfigurationError(f"tls_ca: {authorities!r} cannot be read: {error}") from error
    if certificate is not None:
        # Without a word to ask for a password in the terminal, which would stop a server.
        try:
            context.load_cert_chain(certificate, key, password=lambda: b"")
        except OSError as error:
            text = f"tls_cert: {certificate!r} or its key cannot be read: {error}"
            raise ConfigurationError(text) from error
    return context


def _require_file(option: str, path: str) -> None:
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise ConfigurationError(f"{option}: {path!r} cannot be read: {error}") from error
