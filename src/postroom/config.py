"""Settings, merged once: defaults, then `postroom.toml`, then the environment, then options.

    database_url = "postgresql://…"          # POSTROOM_DATABASE_URL, --database
    broker_url = "nats://…"                  # POSTROOM_BROKER_URL, --broker: the default route

    [relay]
    lease_seconds = 30                       # POSTROOM_RELAY_LEASE_SECONDS

    [relay.routes]                           # the first pattern that matches a topic wins
    "orders.*" = "nats://…"

    [brokers.nats]                           # options of nats:// brokers, as behind a ? in a URL
    tls_ca = "/etc/ssl/nats.pem"             # POSTROOM_BROKERS_NATS_TLS_CA

    [consumer]
    concurrency = 4                          # POSTROOM_CONSUMER_CONCURRENCY

    [alerts]
    webhook_url = "https://…"                # POSTROOM_ALERTS_WEBHOOK_URL

The file is the one POSTROOM_CONFIG or --config names, else the one in the working directory, if
there is one. A name nobody knows is an error, so that a misspelt setting is not a silent default.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from postroom.errors import ConfigurationError
from postroom.retry import RetryPolicy

__all__ = [
    "AlertSettings",
    "ConsumerSettings",
    "RedriveRule",
    "RelaySettings",
    "Routes",
    "Settings",
    "load",
    "nearest",
]

DAY_SECONDS = 86_400
MIB_BYTES = 1024 * 1024
FILE_NAME = "postroom.toml"

_TOP = ("database_url", "broker_url")
# Zero means "at once" or "never wait" here; everywhere else it could not work.
_MAY_BE_ZERO = {"keep_delivered_seconds", "keep_dedup_seconds", "keep_dead_seconds"}
_MAY_BE_ZERO |= {"grace_seconds", "horizon_seconds", "handler_seconds", "redrive_after_seconds"}
# Error codes of messages that ended their worker: a person looks at them first.
_NEVER_REDRIVEN = ("suspected_killer", "worker_died")


@dataclass(frozen=True, slots=True)
class RedriveRule:
    """Which dead letters a worker redrives without an operator, and at what rate."""

    codes: tuple[str, ...]
    after_seconds: float
    per_minute: float
    times: int


@dataclass(frozen=True, slots=True)
class RelaySettings:
    """How a relay works; every limit and time it has."""

    lease_seconds: float = 30
    send_timeout_seconds: float = 10
    batch_rows: int = 1000
    batch_bytes: int = 8 * MIB_BYTES
    in_flight_rows: int = 16_000
    in_flight_bytes: int = 32 * MIB_BYTES
    poll_min_seconds: float = 0.01
    poll_max_seconds: float = 1.0
    keep_delivered_seconds: int = 7 * DAY_SECONDS
    keep_dedup_seconds: int = 7 * DAY_SECONDS
    keep_dead_seconds: int = 90 * DAY_SECONDS
    keep_inbox_seconds: int = 30 * DAY_SECONDS
    grace_seconds: float = 20
    horizon_seconds: float = 0.05
    rescan_seconds: float = 60
    on_dead: Literal["hold", "continue"] = "hold"
    retry_attempts: int = 6
    retry_delays_seconds: str = "5, 10, 20, 40, 80, 160"
    retry_jitter: Literal["none", "full"] = "none"
    redrive_codes: str = ""
    redrive_after_seconds: float = 900
    redrive_per_minute: float = 10
    redrive_times: int = 3
    concurrency: int = 4
    source: str = "postroom"
    notify_url: str = field(default="", repr=False)
    http: str = "off"
    log_format: Literal["text", "json"] = "text"

    def __post_init__(self) -> None:
        _require_numbers(self)
        self._require_room_for_a_send()
        self._require_order("poll_min_seconds", "poll_max_seconds")
        self._require_order("batch_rows", "in_flight_rows")
        self._require_order("batch_bytes", "in_flight_bytes")
        _require_words(self)
        self.http_address()
        self.retry()
        self.redrive()
        if not self.source or len(self.source) > 255:
            raise ConfigurationError("source must have 1 to 255 characters.")

    def retry(self) -> RetryPolicy:
        """When a refused message is tried again."""
        return _policy(self.retry_attempts, self.retry_delays_seconds, self.retry_jitter)

    def redrive(self) -> RedriveRule | None:
        """Which dead letters are redriven automatically; None: none are."""
        return _redrive(self)

    def http_address(self) -> tuple[str, int] | None:
        """Where health and metrics are served; None: nowhere. A port alone means this machine."""
        return _address(self.http)

    def _require_room_for_a_send(self) -> None:
        # A lease is renewed long before this; a send begun just before must end within the rest.
        if not self.send_timeout_seconds + 1 < self.lease_seconds * 2 / 3:
            raise ConfigurationError(
                f"send_timeout_seconds ({self.send_timeout_seconds:g}) + 1 must be below 2/3 of "
                f"lease_seconds ({self.lease_seconds:g}), so that a send ends before its lease: "
                f"set lease_seconds above {(self.send_timeout_seconds + 1) * 1.5:g}."
            )

    def _require_order(self, less: str, more: str) -> None:
        if getattr(self, less) > getattr(self, more):
            raise ConfigurationError(f"{less} must not be above {more}.")


@dataclass(frozen=True, slots=True)
class ConsumerSettings:
    """How a consumer works; every limit and time it has."""

    concurrency: int = 4
    chunk_rows: int = 200
    chunk_bytes: int = 4 * MIB_BYTES
    in_hand_rows: int = 2000
    in_hand_bytes: int = 32 * MIB_BYTES
    handler_seconds: float = 60
    stuck_seconds: float = 60
    poll_seconds: float = 0.5
    grace_seconds: float = 20
    unknown: Literal["refuse", "skip"] = "refuse"
    on_dead: Literal["hold", "continue"] = "hold"
    retry_attempts: int = 6
    retry_delays_seconds: str = "5, 10, 20, 40, 80, 160"
    retry_jitter: Literal["none", "full"] = "none"
    redrive_codes: str = ""
    redrive_after_seconds: float = 900
    redrive_per_minute: float = 10
    redrive_times: int = 3
    http: str = "off"
    log_format: Literal["text", "json"] = "text"

    def __post_init__(self) -> None:
        _require_numbers(self)
        if self.unknown not in ("refuse", "skip"):
            raise ConfigurationError('unknown must be "refuse" or "skip".')
        _require_words(self)
        _address(self.http)
        self.retry()
        self.redrive()

    def retry(self) -> RetryPolicy:
        """When a message whose handler failed is tried again."""
        return _policy(self.retry_attempts, self.retry_delays_seconds, self.retry_jitter)

    def redrive(self) -> RedriveRule | None:
        """Which dead letters are redriven automatically; None: none are."""
        return _redrive(self)

    def http_address(self) -> tuple[str, int] | None:
        """Where health and metrics are served; None: nowhere. A port alone means this machine."""
        return _address(self.http)


@dataclass(frozen=True, slots=True)
class AlertSettings:
    """When somebody is told of trouble, and where. A webhook's address is a secret."""

    stale_seconds: float = 300
    repeat_seconds: float = 3600
    webhook_url: str | None = field(default=None, repr=False)
    webhook_timeout_seconds: float = 5

    def __post_init__(self) -> None:
        _require_numbers(self)
        if self.webhook_url is not None and not self.webhook_url.startswith(
            ("https://", "http://")
        ):
            raise ConfigurationError("webhook_url must begin with https:// or http://.")


@dataclass(frozen=True, slots=True)
class Routes:
    """Which broker a topic goes to: the first pattern that matches, else the default."""

    patterns: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    default: str | None = field(default=None, repr=False)

    def url_for(self, topic: str) -> str | None:
        """The broker of a topic; None if no route fits."""
        for pattern, url in self.patterns:
            if fnmatchcase(topic, pattern):
                return url
        return self.default

    def fingerprint(self, safe: Callable[[str], str]) -> str:
        """What is on record of this table, without secrets: it tells two tables apart."""
        table = [[pattern, safe(url)] for pattern, url in self.patterns]
        text = json.dumps([table, safe(self.default) if self.default else None])
        return f"{hashlib.sha256(text.encode()).hexdigest()[:16]} {text}"

    @staticmethod
    def describe(fingerprint: str) -> str:
        """Return the routes that a fingerprint stands for, as people write them."""
        try:
            table, default = json.loads(fingerprint.partition(" ")[2])
            told = [f"{pattern} to {url}" for pattern, url in table]
        except (ValueError, TypeError):
            return fingerprint
        if default:
            told.append(f"all other topics to {default}" if told else f"all topics to {default}")
        return ", ".join(told) or "none"

    @property
    def urls(self) -> tuple[str, ...]:
        """Every broker URL in use, once each."""
        named = [url for _, url in self.patterns]
        return tuple(dict.fromkeys(named + ([self.default] if self.default else [])))


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything a process was told. URLs hold passwords, so they are not in the repr."""

    database_url: str | None = field(default=None, repr=False)
    broker_url: str | None = field(default=None, repr=False)
    relay: RelaySettings = field(default_factory=RelaySettings)
    routes: Routes = field(default_factory=Routes)
    alerts: AlertSettings = field(default_factory=AlertSettings)
    brokers: Mapping[str, Mapping[str, str]] = field(default_factory=dict, repr=False)
    consumer: ConsumerSettings = field(default_factory=ConsumerSettings)

    def require_database(self) -> str:
        """The database URL, or an error that says where to put one."""
        if not self.database_url:
            raise ConfigurationError(
                "No database URL: use --database, POSTROOM_DATABASE_URL or database_url in "
                f"{FILE_NAME}, such as postgresql://user@localhost:5432/app."
            )
        return self.database_url

    def require_routes(self) -> Routes:
        """The routes, or an error that says where to put a broker."""
        if not self.routes.urls:
            raise ConfigurationError(
                "No broker URL: use --broker, POSTROOM_BROKER_URL or broker_url in "
                f"{FILE_NAME} (with Django in POSTROOM), such as nats://localhost:4222."
            )
        return self.routes


def load(
    *,
    database_url: str | None = None,
    broker_url: str | None = None,
    config: str | None = None,
    relay: Mapping[str, Any] | None = None,
    consumer: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] = os.environ,
    base: Mapping[str, Any] | None = None,
) -> Settings:
    """Merge all sources; a later one wins. An option that is None was not given.

    `base` is what a framework's own settings say: it stands in place of a file that nobody named.
    """
    named = config or environ.get("POSTROOM_CONFIG")
    document = dict(base or {})
    if named or base is None:
        document |= _read_file(named)
    relay_table = dict(_table(document, "relay"))
    alerts_table = dict(_table(document, "alerts"))
    consumer_table = dict(_table(document, "consumer"))
    routes = _table(relay_table, "routes")
    brokers = _broker_options(_table(document, "brokers"), environ)
    _require_known("setting", document, _TOP)
    top = {name: _text(name, value) for name, value in document.items()}
    top |= {n: environ[v] for n in _TOP if environ.get(v := f"POSTROOM_{n.upper()}")}
    given = {"database_url": database_url, "broker_url": broker_url}
    top |= {name: value for name, value in given.items() if value is not None}

    relay_table = _merged("relay", RelaySettings, relay_table, environ, relay or {})
    alerts_table = _merged("alerts", AlertSettings, alerts_table, environ, {})
    consumer_table = _merged("consumer", ConsumerSettings, consumer_table, environ, consumer or {})

    patterns = tuple((pattern, _text(pattern, url)) for pattern, url in routes.items())
    return Settings(
        database_url=top.get("database_url"),
        broker_url=top.get("broker_url"),
        relay=RelaySettings(**relay_table),
        routes=Routes(patterns, top.get("broker_url")),
        alerts=AlertSettings(**alerts_table),
        brokers=brokers,
        consumer=ConsumerSettings(**consumer_table),
    )


def _merged(
    room: str,
    kind: type[RelaySettings | AlertSettings | ConsumerSettings],
    table: dict[str, Any],
    environ: Mapping[str, str],
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """The settings of one table of the file, with what the environment and the options say."""
    kinds = {spec.name: spec.type for spec in fields(kind)}
    names = {n: str(kind) if kind in ("int", "float") else "str" for n, kind in kinds.items()}
    _require_known(f"{room} setting", table, names)
    prefix = f"POSTROOM_{room.upper()}_"
    told = {k[len(prefix) :].lower(): v for k, v in environ.items() if k.startswith(prefix)}
    spelled = {f"{prefix}{name.upper()}": name for name in names}
    _require_known(f"{room} setting", [prefix + name.upper() for name in told], spelled)
    table |= {
        name: _number(prefix + name.upper(), text, names[name]) for name, text in told.items()
    }
    table |= {name: value for name, value in options.items() if value is not None}
    for name, each in names.items():
        if each == "str" and name in table:
            _text(name, table[name])
    return table


def _broker_options(
    tables: dict[str, Any], environ: Mapping[str, str]
) -> dict[str, dict[str, str]]:
    """Options by scheme. Which of them there are is known to each broker alone."""
    found: dict[str, dict[str, str]] = {}
    for scheme in list(tables):
        options = _table(tables, scheme, f"brokers.{scheme}")
        found[scheme] = {name: _option(scheme, name, value) for name, value in options.items()}
    prefix = "POSTROOM_BROKERS_"
    for variable, value in environ.items():
        if variable.startswith(prefix):
            scheme, _, name = variable[len(prefix) :].lower().partition("_")
            if not name:
                raise ConfigurationError(f"{variable} names no option: write {variable}_OPTION.")
            found.setdefault(scheme, {})[name] = value
    return found


def _option(scheme: str, name: str, value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str | int | float):
        raise ConfigurationError(f"{name} in [brokers.{scheme}] must be text or a number.")
    return str(value)


def _read_file(named: str | None) -> dict[str, Any]:
    path = Path(named or FILE_NAME)
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if named:
            raise ConfigurationError(f"There is no configuration file {path}.") from None
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}.") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{path} is not valid TOML: {error}.") from None


def _table(document: dict[str, Any], name: str, path: str | None = None) -> dict[str, Any]:
    table = document.pop(name, {})
    if not isinstance(table, dict):
        raise ConfigurationError(f"{name} in {FILE_NAME} must be a table: [{path or name}].")
    return table


def _require_known(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    known = list(known)
    for name in given:
        if name not in known:
            near = nearest(name, known)
            hint = f"; did you mean {near}?" if near else "."
            raise ConfigurationError(f"{name} is not a {what}{hint}")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The name that a mistyped one stands for: one that it begins, or one that looks like it."""
    known = list(known)
    longer = [each for each in known if each.lower().startswith(f"{name.lower()}_")]
    return next(iter(longer or difflib.get_close_matches(name, known, 1)), None)


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigurationError(f"{name} must be text in quotes.")
    return value


def _number(variable: str, text: str, kind: str) -> Any:
    """A value of the environment in its own type."""
    if kind == "str":
        return text
    try:
        return int(text) if kind == "int" else float(text)
    except ValueError:
        whole = "a whole number" if kind == "int" else "a number"
        raise ConfigurationError(f"{variable} must be {whole}.") from None


def _policy(attempts: int, delays: str, jitter: str) -> RetryPolicy:
    try:
        seconds = tuple(float(text) for text in delays.split(","))
    except ValueError:
        raise ConfigurationError(
            "retry_delays_seconds must be numbers with commas between, such as "
            f'"5, 10, 20", not {delays!r}.'
        ) from None
    return RetryPolicy(seconds, attempts, full_jitter=jitter == "full")


def _redrive(settings: RelaySettings | ConsumerSettings) -> RedriveRule | None:
    codes = tuple(filter(None, (code.strip() for code in settings.redrive_codes.split(","))))
    for code in codes:
        if code in _NEVER_REDRIVEN:
            raise ConfigurationError(
                f"redrive_codes must not contain {code}: such a message ended the process that "
                "had it. Examine it, then use `postroom dead retry`."
            )
    if not codes:
        return None
    return RedriveRule(
        codes, settings.redrive_after_seconds, settings.redrive_per_minute, settings.redrive_times
    )


def _address(http: str) -> tuple[str, int] | None:
    if http == "off":
        return None
    host, _, port = http.rpartition(":")
    if not port.isdecimal() or int(port) > 65_535:
        raise ConfigurationError(
            f'http must be HOST:PORT or a port, such as "127.0.0.1:9464", not {http!r}.'
        )
    return host.strip("[]") or "127.0.0.1", int(port)


def _require_words(settings: RelaySettings | ConsumerSettings) -> None:
    if settings.on_dead not in ("hold", "continue"):
        raise ConfigurationError('on_dead must be "hold" or "continue".')
    if settings.retry_jitter not in ("none", "full"):
        raise ConfigurationError('retry_jitter must be "none" or "full".')
    if settings.log_format not in ("text", "json"):
        raise ConfigurationError('log_format must be "text" or "json".')


def _require_numbers(settings: RelaySettings | AlertSettings | ConsumerSettings) -> None:
    for spec in fields(settings):
        if spec.type in ("int", "float"):
            _require_number(spec.name, getattr(settings, spec.name), whole=spec.type == "int")


def _require_number(name: str, value: object, *, whole: bool) -> None:
    kinds = (int,) if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value):
        raise ConfigurationError(f"{name} must be {'a whole number' if whole else 'a number'}.")
    if value < 0 or (value == 0 and name not in _MAY_BE_ZERO):
        least = "zero or more" if name in _MAY_BE_ZERO else "above zero"
        raise ConfigurationError(f"{name} must be {least}.")
