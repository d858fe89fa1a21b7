"""The options of a database URL, translated for each driver that could serve it.

Applications write them in the words of libpq, SQLAlchemy, PyMySQL or the mysql client. An option
that asks for protection is honoured, or the driver that cannot is not used; never dropped.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any, TypeAlias
from urllib.parse import urlencode

from postroom.errors import ConfigurationError

__all__ = ["Offers", "mysql", "postgresql", "pymysql", "says_pooled", "sqlite"]

CONNECT_TIMEOUT_SECONDS = 10

Offers: TypeAlias = "dict[str, dict[str, Any] | str]"
"""By driver, in order of preference: its connect arguments, or why it cannot serve this URL."""

# What libpq knows and asyncpg's own DSN reader takes in the same words.
_LIBPQ_IN_DSN = {
    "sslmode", "sslrootcert", "sslcert", "sslkey", "sslpassword", "sslcrl", "sslnegotiation",
    "ssl_min_protocol_version", "ssl_max_protocol_version",
    "target_session_attrs", "passfile", "service", "krbsrvname", "gsslib",
}  # fmt: skip
# What asyncpg lacks without harm, unless it is set to "require".
_LIBPQ_COMFORT = {
    "keepalives", "keepalives_idle", "keepalives_interval", "keepalives_count", "tcp_user_timeout",
    "gssencmode", "channel_binding", "sslsni", "sslcompression", "load_balance_hosts",
}  # fmt: skip
_LIBPQ_SETTINGS = {"application_name", "fallback_application_name", "options"}
_LIBPQ_ONLY = {
    "require_auth", "requirepeer", "hostaddr", "sslcrldir", "sslcertmode", "gssdelegation",
}  # fmt: skip
_SSLMODES = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
# How an application tells its driver to prepare nothing, for a pooler in between.
_STATEMENT_CACHES = {"prepared_statement_cache_size", "statement_cache_size"}

_MYSQL_TEXT = {"unix_socket", "init_command", "sql_mode", "read_default_file", "read_default_group"}
_MYSQL_TLS = {
    "ssl", "ssl_mode", "sslmode", "ssl_disabled", "ssl_ca", "ssl_capath", "ssl_cert", "ssl_key",
    "ssl_cipher", "ssl_check_hostname", "ssl_verify_cert", "ssl_verify_identity",
}  # fmt: skip
_MYSQL_TLS_MODES = ("DISABLED", "PREFERRED", "REQUIRED", "VERIFY_CA", "VERIFY_IDENTITY")
# An application's own taste. Our connections always speak utf8mb4, or keys would lose characters.
_MYSQL_IGNORED = {
    "charset", "use_unicode", "read_timeout", "write_timeout", "local_infile", "autocommit",
    "binary_prefix", "compress", "client_flag",
}  # fmt: skip

_SQLITE = {"timeout", "uri", "mode", "cache", "nolock", "immutable", "vfs"}
_SQLITE_IGNORED = {"isolation_level", "detect_types", "check_same_thread", "cached_statements"}


def says_pooled(options: dict[str, str]) -> bool:
    """Whether `pgbouncer=true` stands among the options, as other tools write it; takes it out."""
    return _yes(options.pop("pgbouncer", None))


def postgresql(options: dict[str, str]) -> Offers:
    """psycopg hands everything to libpq; asyncpg wants it sorted."""
    options = dict(options)
    if "ssl" in options:  # asyncpg's own name for it, and what some hosts write
        mode = options.pop("ssl").lower()
        options.setdefault("sslmode", {"true": "require", "false": "disable"}.get(mode, mode))
    if options.get("sslmode", "prefer") not in _SSLMODES:
        raise ConfigurationError(f"sslmode must be one of {', '.join(_SSLMODES)}.")
    for name in ("sslrootcert", "sslcert", "sslkey", "sslcrl"):
        if (name, options.get(name)) != ("sslrootcert", "system"):
            _require_file(name, options.get(name))
    timeout = _whole_number(options, "connect_timeout", CONNECT_TIMEOUT_SECONDS)
    caches = {n: _whole_number(options, n, 0) for n in sorted(_STATEMENT_CACHES & set(options))}
    prepare_nothing = 0 in caches.values() or options.pop("prepare_threshold", "") == "None"
    for ours in ("client_encoding", "command_timeout"):  # always UTF-8; the relay has its own time
        options.pop(ours, None)
    known = _LIBPQ_IN_DSN | _LIBPQ_COMFORT | _LIBPQ_SETTINGS | _LIBPQ_ONLY
    _require_known("PostgreSQL", options, known)

    psycopg = {**options, "connect_timeout": timeout, "client_encoding": "utf8"}
    if prepare_nothing:
        psycopg["prepare_threshold"] = None
        caches = dict.fromkeys(_STATEMENT_CACHES, 0)
    return {"asyncpg": _for_asyncpg(options, caches, timeout), "psycopg": psycopg}


def _for_asyncpg(
    options: dict[str, str], caches: dict[str, int], timeout: int
) -> dict[str, Any] | str:
    for name, value in options.items():
        if name in _LIBPQ_ONLY or (name in _LIBPQ_COMFORT and value == "require"):
            return f"asyncpg has no {name}"
    arguments: dict[str, Any] = {**caches, "timeout": timeout or None}
    settings = {name: options[name] for name in ("application_name", "options") if name in options}
    if "fallback_application_name" in options:
        settings.setdefault("application_name", options["fallback_application_name"])
    if settings:
        arguments["server_settings"] = settings
    in_dsn = {name: value for name, value in options.items() if name in _LIBPQ_IN_DSN}
    if in_dsn.get("sslrootcert") == "system":
        arguments["ssl"] = _system_trust(in_dsn)
        in_dsn = {name: value for name, value in in_dsn.items() if not name.startswith("ssl")}
    if in_dsn:
        arguments["dsn"] = "postgresql://?" + urlencode(in_dsn)
    return arguments


def _system_trust(options: dict[str, str]) -> ssl.SSLContext:
    if options.get("sslmode", "verify-full") != "verify-full":
        raise ConfigurationError("sslrootcert=system needs sslmode=verify-full.")
    context = ssl.create_default_context()
    if "sslcert" in options:
        _load_certificate(
            context, options["sslcert"], options.get("sslkey"), options.get("sslpassword", "")
        )
    return context


def mysql(options: dict[str, str]) -> Offers:
    """The clients of MariaDB and MySQL agree on little, so every option is named."""
    options = {name.replace("-", "_"): value for name, value in options.items()}
    timeout = _whole_number(options, "connect_timeout", CONNECT_TIMEOUT_SECONDS)
    _require_known("MariaDB or MySQL", options, _MYSQL_TEXT | _MYSQL_TLS | _MYSQL_IGNORED)
    arguments: dict[str, Any] = {n: v for n, v in options.items() if n in _MYSQL_TEXT}
    arguments["charset"] = "utf8mb4"
    asyncmy = {**arguments, "async_creator_fn": _within(timeout, "asyncmy")}
    aiomysql = {**arguments, "async_creator_fn": _within(timeout, "aiomysql")}
    context = _mysql_tls({n: v for n, v in options.items() if n in _MYSQL_TLS})
    if context is None:
        return {"asyncmy": asyncmy, "aiomysql": aiomysql}
    why = "aiomysql goes on without TLS when the server offers none"
    return {"asyncmy": {**asyncmy, "ssl": context}, "aiomysql": why}


def pymysql(offers: Offers) -> dict[str, Any]:
    """The same for PyMySQL, which keeps its own time."""
    asyncmy = offers["asyncmy"]
    assert isinstance(asyncmy, dict)
    asyncmy = {name: value for name, value in asyncmy.items() if name != "async_creator_fn"}
    return {**asyncmy, "connect_timeout": CONNECT_TIMEOUT_SECONDS}


def _within(seconds: int, driver: str) -> Callable[..., Awaitable[Any]]:
    """The driver's connect with a limit: its own ends once the socket is open, greeted or not."""

    async def connect(*args: Any, **kwargs: Any) -> Any:
        async with asyncio.timeout(seconds or None):
            return await import_module(driver).connect(*args, **kwargs)

    return connect


def _mysql_tls(options: dict[str, str]) -> ssl.SSLContext | None:
    for name in ("ssl_ca", "ssl_cert", "ssl_key"):
        _require_file(name, options.get(name))
    mode = options.get("ssl_mode", options.get("sslmode", "")).upper().replace("-", "_")
    if mode and mode not in _MYSQL_TLS_MODES:
        raise ConfigurationError(f"ssl_mode must be one of {', '.join(_MYSQL_TLS_MODES)}.")
    off = mode in ("DISABLED", "PREFERRED") or _yes(options.get("ssl_disabled"))
    if off or not any(_yes(value) for value in options.values()):
        return None
    own_ca = bool(options.get("ssl_ca") or options.get("ssl_capath"))
    names = mode == "VERIFY_IDENTITY" or _yes(options.get("ssl_verify_identity"))
    # As PyMySQL does: who brings a CA also wants the name checked, unless told otherwise.
    names = names or (own_ca and not mode and _yes(options.get("ssl_check_hostname", "true")))
    trust = names or own_ca or mode == "VERIFY_CA" or _yes(options.get("ssl_verify_cert"))
    context = ssl.create_default_context(
        cafile=options.get("ssl_ca"), capath=options.get("ssl_capath")
    )
    context.check_hostname = names
    context.verify_mode = ssl.CERT_REQUIRED if trust else ssl.CERT_NONE
    if "ssl_cert" in options:
        _load_certificate(context, options["ssl_cert"], options.get("ssl_key"), "")
    if "ssl_cipher" in options:
        context.set_ciphers(options["ssl_cipher"])
    return context


def sqlite(options: dict[str, str]) -> tuple[dict[str, str], dict[str, Any]]:
    """What belongs into the URL itself, where the driver reads it; and its connect arguments."""
    _require_known("SQLite", options, _SQLITE | _SQLITE_IGNORED)
    query = {name: value for name, value in options.items() if name in _SQLITE}
    return query, {"async_creator_fn": _connect_sqlite}


async def _connect_sqlite(*args: Any, **kwargs: Any) -> Any:
    """aiosqlite's connect, but when it fails its thread has ended before the error is seen.

    Else the thread may find the event loop closed and print a traceback of its own.
    """
    aiosqlite = import_module("aiosqlite")
    connection = aiosqlite.connect(*args, **kwargs)
    thread: Thread = connection if isinstance(connection, Thread) else connection._thread
    thread.daemon = True
    try:
        return await connection
    except Exception:
        await asyncio.to_thread(thread.join, CONNECT_TIMEOUT_SECONDS)
        raise


def _require_known(what: str, options: dict[str, str], known: set[str]) -> None:
    for name in options:
        if name not in known:
            raise ConfigurationError(
                f"{name} is not an option of a {what} URL; remove it from the database URL."
            )


def _require_file(name: str, path: str | None) -> None:
    if path and not Path(path).is_file():
        raise ConfigurationError(f"{name} in the database URL names no file: {path}.")


def _load_certificate(
    context: ssl.SSLContext, certificate: str, key: str | None, password: str
) -> None:
    try:
        context.load_cert_chain(certificate, key, lambda: password)
    except (OSError, ssl.SSLError):
        raise ConfigurationError(
            f"{certificate} and its key, named in the database URL, cannot be used together."
        ) from None


def _whole_number(options: dict[str, str], name: str, default: int) -> int:
    text = options.pop(name, None)
    if text is None:
        return default
    if not text.isdecimal():
        raise ConfigurationError(f"{name} in the database URL must be a whole number.")
    return int(text)


def _yes(text: str | None) -> bool:
    return text is not None and text.lower() not in ("", "0", "false", "no", "off")
