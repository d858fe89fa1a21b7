"""An entry of DATABASES as a URL, for the relay and the commands, which connect by themselves.

Django hands OPTIONS to the driver. What the URL knows by the same name is kept; what concerns only
Django's own connections is left out; anything else is refused by `databases.urls`, by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from postroom.databases.django import dialect_of
from postroom.errors import ConfigurationError

__all__ = ["url_of"]

# How Django's own connections behave, which is nothing to ours.
_DJANGOS_OWN = {
    "postgresql": {
        "assume_role", "client_encoding", "cursor_factory", "isolation_level", "pool",
        "server_side_binding",
    },
    "mysql": {
        "client_flag", "conv", "cursorclass", "db", "database", "host", "isolation_level",
        "passwd", "password", "port", "ssl", "user",
    },
    "sqlite": {
        "autocommit", "cached_statements", "check_same_thread", "detect_types", "factory",
        "init_command", "isolation_level", "transaction_mode", "uri",
    },
}  # fmt: skip


def url_of(connection: Any) -> str:
    """The URL of a Django connection's database, password included: not for printing."""
    dialect = dialect_of(connection)
    settings: Mapping[str, Any] = connection.settings_dict
    options = dict(settings.get("OPTIONS") or {})
    query = {
        name: _text(name, value)
        for name, value in options.items()
        if name not in _DJANGOS_OWN[dialect] and (value is not None or name == "prepare_threshold")
    }
    make = {"postgresql": _postgresql, "mysql": _mysql, "sqlite": _sqlite}[dialect]
    return make(settings, options, query)


def _text(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is not None and not isinstance(value, str | int | float | Path):
        raise ConfigurationError(
            f"{name} in OPTIONS of DATABASES is a {type(value).__name__}, which no URL can hold: "
            "say it in text, or give the relay a URL of its own with POSTROOM['database_url']."
        )
    return str(value)


def _postgresql(settings: Mapping[str, Any], options: dict[str, Any], query: dict[str, str]) -> str:
    if role := options.get("assume_role"):
        # libpq splits `options` at spaces that have no backslash before them.
        escaped = str(role).replace("\\", r"\\").replace(" ", r"\ ")
        query["options"] = f"{query.get('options', '')} -c role={escaped}".strip()
    host, port = str(settings["HOST"] or ""), str(settings["PORT"] or "")
    if host.startswith("/") or "," in host:  # a socket's directory, or several servers
        query["host"] = host
        host = ""
    if port and not host:
        query["port"] = port
        port = ""
    return _url("postgresql", settings, host, port, settings["NAME"], query)


def _mysql(settings: Mapping[str, Any], options: dict[str, Any], query: dict[str, str]) -> str:
    """OPTIONS are arguments of the driver's connect, so they win over the rest of the entry."""
    named = {
        "USER": options.get("user"),
        "PASSWORD": options.get("password", options.get("passwd")),
        "NAME": options.get("database", options.get("db")),
        "HOST": options.get("host"),
        "PORT": options.get("port"),
    }
    merged = {**settings, **{name: value for name, value in named.items() if value is not None}}
    host, port = str(merged["HOST"] or ""), str(merged["PORT"] or "")
    if host.startswith("/"):
        query["unix_socket"] = host
        host = port = ""
    tls = options.get("ssl")
    if isinstance(tls, Mapping):
        names = {"check_hostname": "ssl_check_hostname", "verify_mode": "ssl_verify_cert"}
        query |= {names.get(n, f"ssl_{n}"): _text(n, value) for n, value in tls.items()}
        query.setdefault("ssl", "true")
    elif tls is not None:
        query["ssl"] = _text("ssl", tls)
    return _url("mysql", merged, host, port, merged["NAME"], query)


def _sqlite(settings: Mapping[str, Any], options: dict[str, Any], query: dict[str, str]) -> str:
    name = str(settings["NAME"])
    if name.startswith("file:"):  # SQLite's own kind of URL, with options of its own
        return f"sqlite:///{name}{'&' if '?' in name else '?'}{urlencode(query | {'uri': 'true'})}"
    return f"sqlite:///{quote(name)}" + (f"?{urlencode(query)}" if query else "")


def _url(
    scheme: str, settings: Mapping[str, Any], host: str, port: str, name: Any, query: dict[str, str]
) -> str:
    user, password = str(settings["USER"] or ""), str(settings["PASSWORD"] or "")
    who = quote(user, safe="") + (f":{quote(password, safe='')}" if password else "")
    where = f"[{host}]" if ":" in host else quote(host, safe="")
    address = (f"{who}@" if who else "") + where + (f":{port}" if port else "")
    return f"{scheme}://{address}/{quote(str(name or ''), safe='')}" + (
        f"?{urlencode(query)}" if query else ""
    )
