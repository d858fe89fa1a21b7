"""Where Kafka is, who we are there, and what librdkafka is told.

Promise: no text about the place holds a secret, a password goes over TLS unless it is said
otherwise, and no setting can undo what the other promises stand on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote

from postroom.brokers.options import whole_number
from postroom.errors import ConfigurationError

__all__ = ["OWN", "Address"]

MAX_OUTSTANDING = 10_000
_DEFAULT_PORT = 9092
# Options that every broker has, and what librdkafka calls them.
_OURS = {
    "tls_ca": "ssl.ca.location",
    "tls_cert": "ssl.certificate.location",
    "tls_key": "ssl.key.location",
    "user": "sasl.username",
    "password": "sasl.password",
}
_DOTLESS = {*_OURS, "max_outstanding", "log_level"}
_PLACE = re.compile(r"(?:\[[0-9A-Fa-f:.%]+\]|[^\s:\[\]/?#]*)(?::\d{1,5})?")
_SECRET = re.compile(r"(?i)passw|secret|token|\.pem$|sasl\.username|oauthbearer\.config|jaas")

# What is ours to set: the order, the acknowledgements and the offsets depend on it.
OWN = frozenset(
    {
        "acks",
        "auto.offset.reset",
        "bootstrap.servers",
        "delivery.report.only.error",
        "delivery.timeout.ms",
        "enable.auto.commit",
        "enable.auto.offset.store",
        "enable.gapless.guarantee",
        "enable.idempotence",
        "enable.partition.eof",
        "group.id",
        "message.send.max.retries",
        "message.timeout.ms",
        "metadata.broker.list",
        "partition.assignment.strategy",
        "partitioner",
        "plugin.library.paths",  # it would load code
        "queuing.strategy",
        "request.required.acks",
        "retries",
        "transactional.id",
    }
)

# What may be said, but not undone: each with the one value it may have, and why.
_ALWAYS = {
    "enable.ssl.certificate.verification": (
        "true",
        "a server nobody has verified could take the messages: name its certificate in tls_ca",
    ),
    "ssl.endpoint.identification.algorithm": (
        "https",
        "a server of any other name could take the messages: give it a certificate of its name",
    ),
    "isolation.level": (
        "read_committed",
        "what a transaction took back would be handled: leave it out",
    ),
}


@dataclass(frozen=True, repr=False)
class Address:
    """The servers, and apart from them the settings of librdkafka, which may be secret."""

    servers: list[str]
    settings: dict[str, str]
    max_outstanding: int

    @classmethod
    def of(cls, url: str, extra: Mapping[str, str]) -> Address:
        """The address in kafka://user:password@a:9092,b:9092?name=value.

        Names are librdkafka's own, as in `sasl.mechanism`; where no dot can stand, as in a variable
        of the environment, `sasl_mechanism` is the same. The URL counts more than `extra`.
        """
        rest = url.partition("://")[2]
        place, _, query = rest.partition("?")
        who, at, hosts = place.rpartition("@")
        user, colon, password = who.partition(":")
        try:
            servers = [_server(host) for host in hosts.removesuffix("/").split(",")]
            given = dict(parse_qsl(query, strict_parsing=True)) if query else {}
        except ValueError:
            # Not the URL itself: its password might stand in it.
            raise ConfigurationError(
                "bad Kafka URL: write kafka://user:password@host:9092,host:9092?name=value"
            ) from None
        given = {_name(name): str(value) for name, value in [*extra.items(), *given.items()]}
        max_outstanding = whole_number(given, "max_outstanding", MAX_OUTSTANDING)
        given.pop("max_outstanding", None)
        settings = {
            librdkafkas: given.pop(ours) for ours, librdkafkas in _OURS.items() if ours in given
        }
        settings |= given
        if refused := sorted(OWN & set(settings)):
            raise ConfigurationError(
                f"{refused[0]} is not yours to set: Postroom's promises need it"
            )
        for name, (value, why) in _ALWAYS.items():
            if settings.get(name, value).lower() != value:
                raise ConfigurationError(f"{name} must be {value}, else {why}")
        if at:
            settings["sasl.username"] = unquote(user)
            settings["sasl.password"] = unquote(password) if colon else ""
        if "sasl.username" in settings:
            settings.setdefault("security.protocol", "SASL_SSL")
            if "sasl.mechanisms" not in settings:
                settings.setdefault("sasl.mechanism", "PLAIN")
        elif any(name.startswith("ssl.") for name in settings):
            settings.setdefault("security.protocol", "SSL")
        return cls(servers, settings, max_outstanding)

    def __str__(self) -> str:
        return f"kafka://{','.join(self.servers)}"

    __repr__ = __str__

    def common(self) -> dict[str, object]:
        """What every client of ours is told."""
        return {
            "client.id": "postroom",
            "reconnect.backoff.ms": 50,
            "reconnect.backoff.max.ms": 500,  # a server that is back is found soon
            "socket.keepalive.enable": True,
            "socket.connection.setup.timeout.ms": 5000,
            **self.settings,
            "bootstrap.servers": ",".join(self.servers),
        }

    def without_secrets(self, text: str) -> str:
        for name, value in self.settings.items():
            if value and _SECRET.search(name):
                text = text.replace(value, "***")
        return text


def _name(name: str) -> str:
    return name if name in _DOTLESS else name.replace("_", ".")


def _server(place: str) -> str:
    if not _PLACE.fullmatch(place):
        raise ValueError
    host, colon, port = place.rpartition(":")
    if not colon or host.endswith(":") or ("[" in place and place.endswith("]")):
        host, port = place, ""
    if port and int(port) > 65_535:
        raise ValueError
    return f"{host or 'localhost'}:{port or _DEFAULT_PORT}"
