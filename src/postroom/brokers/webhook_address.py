"""Where a webhook goes and how it is signed, from its URL.

    https://user:password@hooks.example/orders/{topic}?v=2#secret=whsec_…&concurrency=8

What stands before the # is the receiver's; what stands behind it is for us, and is never sent.

Promise: no text about the place holds a secret, and one parser decides which host is meant.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from urllib.parse import quote, unquote, urlsplit

from postroom.brokers.options import known_only, whole_number
from postroom.brokers.webhook_guard import Allowed, check_host
from postroom.errors import ConfigurationError

__all__ = ["Target"]

DEFAULT_CONCURRENCY = 16
MOST_SECRETS = 2
_SECRET_BYTES = range(24, 65)  # as Standard Webhooks demands
_PREFIX = "whsec_"
_OPTIONS = {
    *("secret", "secret_env", "unsigned", "allow", "allow_http", "concurrency", "tls_ca"),
}
# Printable ASCII without what parsers disagree about.
_URL = re.compile(r"[!#-;=?-\[\]_`a-z{|}~]+")
_TOPIC = "{topic}"


@dataclass(frozen=True)
class Target:
    """The receiver, the secrets to sign with, and what is allowed."""

    scheme: str
    host: str
    port: int
    path: str = field(repr=False)
    credentials: str | None = field(repr=False)
    secrets: tuple[bytes, ...] = field(repr=False)
    allowed: Allowed
    concurrency: int
    context: ssl.SSLContext | None = field(repr=False)

    @classmethod
    def of(cls, url: str, extra: Mapping[str, str]) -> Target:
        """The target of a URL; `extra` gives options that the URL does not."""
        place, _, fragment = url.partition("#")
        # Not the URL itself in any text: a secret might stand in it.
        if not _URL.fullmatch(place):
            raise ConfigurationError(
                "a webhook's URL may hold printable ASCII only, without spaces, quotes, <, >, ^ "
                "and backslashes: percent-encode them"
            )
        options = _options(fragment, extra)
        scheme, host, port, credentials = _authority(place)
        if scheme == "http" and not _yes(options, "allow_http"):
            raise ConfigurationError(
                f"http://{host} would send messages readable by anybody on the way: use https://, "
                "or add #allow_http=yes for a test"
            )
        allowed = Allowed.of(_words(options.get("allow", [])))
        return cls(
            scheme=scheme,
            host=check_host(host, port, allowed),
            port=port,
            path=_path(place),
            credentials=credentials,
            secrets=_secrets(options),
            allowed=allowed,
            concurrency=_count(options),
            context=_context(options) if scheme == "https" else None,
        )

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}"

    @property
    def authority(self) -> str:
        """Host and port as the header Host has them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _port_of(self.scheme) else f"{host}:{self.port}"

    @property
    def by_topic(self) -> bool:
        """Whether each topic has a path of its own."""
        return _TOPIC in self.path

    def path_for(self, topic: str) -> str:
        """Path and query for a topic."""
        return self.path.replace(_TOPIC, quote(topic, safe=""))


def _authority(place: str) -> tuple[str, str, int, str | None]:
    """Scheme, host, port, and the header for user and password."""
    try:
        parts = urlsplit(place)
        scheme, host, port = parts.scheme.lower(), parts.hostname or "", parts.port
    except ValueError:
        host = ""
    # More than one @ or a stray bracket: what one parser takes for the host, another does not.
    if not host or parts.netloc.count("@") > 1 or not _brackets_fit(parts.netloc, host):
        raise ConfigurationError("bad webhook URL: write https://host/path")
    if scheme not in ("https", "http"):
        raise ConfigurationError("a webhook's URL begins with https://")
    if port == 0 or parts.netloc.endswith(":"):
        raise ConfigurationError("bad webhook URL: its port must be 1 to 65535")
    credentials = None
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        credentials = f"Basic {base64.b64encode(pair.encode()).decode()}"
    return scheme, host, port or _port_of(scheme), credentials


def _brackets_fit(netloc: str, host: str) -> bool:
    place = netloc.rpartition("@")[2]
    if "[" in place or "]" in place:
        return place.startswith("[") and place.count("[") == place.count("]") == 1
    return ":" not in host


def _path(place: str) -> str:
    parts = urlsplit(place)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if "{" in path.replace(_TOPIC, "") or "}" in path.replace(_TOPIC, ""):
        raise ConfigurationError("a webhook's path may hold {topic} and no other braces")
    return path


def _port_of(scheme: str) -> int:
    return 443 if scheme == "https" else 80


# ── Options ────────────────────────────────────────────────────────────────────────────────────


def _options(fragment: str, extra: Mapping[str, str]) -> dict[str, list[str]]:
    options: dict[str, list[str]] = {}
    for part in filter(None, fragment.split("&")):
        name, _, value = part.partition("=")
        if name not in _OPTIONS:
            known = ", ".join(sorted(_OPTIONS))
            # It may be a secret that was written without its name: no word of ours is so long.
            shown = f" {name}" if re.fullmatch(r"[a-z_]{1,16}", name) else " of that name"
            raise ConfigurationError(f"a webhook has no option{shown}: behind the # it has {known}")
        options.setdefault(name, []).append(unquote(value))
    for name, value in known_only("a webhook", extra, _OPTIONS).items():
        options.setdefault(name, [value])
    return options


def _words(values: list[str]) -> Iterator[str]:
    for value in values:
        yield from filter(None, re.split(r"[\s,]+", value))


def _yes(options: Mapping[str, list[str]], name: str) -> bool:
    values = options.get(name, ["no"])
    if not set(values) <= {"yes", "no"}:
        raise ConfigurationError(f"{name} must be yes or no")
    return values[-1] == "yes"


def _count(options: Mapping[str, list[str]]) -> int:
    given = {name: values[-1] for name, values in options.items()}
    return whole_number(given, "concurrency", DEFAULT_CONCURRENCY, most=1000)


def _secrets(options: Mapping[str, list[str]]) -> tuple[bytes, ...]:
    written = list(_words(options.get("secret", [])))
    for name in _words(options.get("secret_env", [])):
        found = list(_words([os.environ.get(name, "")]))
        if not found:
            raise ConfigurationError(f"the environment has no {name}, named by secret_env")
        written += found
    if _yes(options, "unsigned"):
        if written:
            raise ConfigurationError("a webhook has a secret or is unsigned, not both")
        return ()
    if not written:
        raise ConfigurationError(
            "a webhook is signed: add #secret=whsec_… to its URL, or #secret_env=NAME for a "
            "variable that holds it (24 to 64 random bytes in base64), or #unsigned=yes"
        )
    if len(written) > MOST_SECRETS:
        raise ConfigurationError("a webhook has at most two secrets: the new one and the old one")
    return tuple(_decoded(secret) for secret in written)


def _decoded(secret: str) -> bytes:
    text = secret.removeprefix(_PREFIX).rstrip("=")
    try:
        key = base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if len(key) not in _SECRET_BYTES:
        raise ConfigurationError("a webhook's secret must be whsec_ and 24 to 64 bytes in base64")
    return key


def _context(options: Mapping[str, list[str]]) -> ssl.SSLContext:
    """The system's certificates, or those of the file `tls_ca`; verified always."""
    (certificates,) = options.get("tls_ca", [None])[-1:]
    try:
        return ssl.create_default_context(cafile=certificates)
    except OSError as error:
        raise ConfigurationError(f"tls_ca={certificates!r} cannot be read: {error}") from None
