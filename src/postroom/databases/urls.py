"""Database URLs: whatever the user's application or host uses, mapped to an async driver.

`resolve` reads the URL as libpq, SQLAlchemy and the MySQL clients write it and picks a driver: the
one the URL names if it is async and installed, else the first installed one that can honour the
options. No password enters an error or `Target.safe`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote

from postroom.databases import url_options
from postroom.errors import ConfigurationError, MissingDriver

if TYPE_CHECKING:
    from sqlalchemy import URL

__all__ = ["Target", "resolve", "resolve_for_threads"]

_EXAMPLES = {
    "postgresql": "postgresql://user@localhost:5432/app",
    "mysql": "mysql://user@localhost:3306/app",
    "sqlite": "sqlite:///app.db",
}
_DIALECTS = {
    "postgres": "postgresql",
    "postgresql": "postgresql",
    "mysql": "mysql",
    "mariadb": "mysql",
    "sqlite": "sqlite",
}
_KNOWN_DRIVERS = {
    "postgresql": {"psycopg2", "psycopg", "psycopg_async", "asyncpg"},
    "mysql": {"pymysql", "mysqldb", "mysqlclient", "aiomysql", "asyncmy"},
    "sqlite": {"aiosqlite", "pysqlite"},
}
_PIP_EXTRAS = {"asyncpg": "asyncpg", "psycopg": "psycopg", "asyncmy": "mysql", "pymysql": "mysql"}

_URL = re.compile(
    r"""(?P<scheme>[A-Za-z][A-Za-z0-9_+.-]*)://
        (?:(?P<user>[^:/@?]*)(?::(?P<password>[^@]*))?@)?
        (?P<hosts>[^/?]*)
        (?:/(?P<database>[^?]*))?
        (?:\?(?P<query>.*))?""",
    re.VERBOSE | re.DOTALL,
)
_HOST = re.compile(r"(?:\[(?P<v6>[^\]]+)\]|(?P<name>[^:]*))(?::(?P<port>\d*))?")

_Hosts = list[tuple[str, int | None]]


@dataclass(frozen=True, slots=True)
class Target:
    """A database as an engine reaches it: `create_async_engine(url, connect_args=connect_args)`.

    `safe` is the URL for people: no password, and no options, since any may hold a secret.
    `pooled`: the URL says that a pooler stands before the server, whatever the looks of it.
    """

    dialect: str
    url: URL
    connect_args: dict[str, Any] = field(repr=False)
    safe: str
    pooled: bool = False

    @property
    def missing_file(self) -> str | None:
        """The SQLite file that is not there: to connect would make an empty one."""
        path = self.url.database or ""
        if self.dialect != "sqlite" or path.startswith("file:") or Path(path).exists():
            return None
        return path

    def __str__(self) -> str:
        return self.safe


@dataclass(slots=True)
class _Parts:
    """A URL taken apart and decoded."""

    dialect: str
    driver: str
    user: str | None
    password: str | None
    hosts: _Hosts
    database: str | None
    options: dict[str, str]

    @property
    def safe(self) -> str:
        if self.dialect == "sqlite":
            return f"sqlite:///{self.database}"
        hosts = ",".join(
            (f"[{host}]" if ":" in host else host) + (f":{port}" if port else "")
            for host, port in self.hosts
        )
        user = f"{self.user}@" if self.user else ""
        return f"{self.dialect}://{user}{hosts or 'localhost'}/{self.database or ''}"


def resolve(url: str) -> Target:
    """The database a URL means, by an installed async driver."""
    parts = _parse(url)
    if parts.dialect == "sqlite":
        return _sqlite(parts)
    if parts.dialect == "mysql":
        return _mysql(parts)
    return _postgresql(parts)


def resolve_for_threads(url: str) -> Target:
    """The same database by a synchronous driver: what `create_engine` takes, for use in threads."""
    parts = _parse(url)
    if parts.dialect == "sqlite":
        target = _sqlite(parts)
        connect_args = {k: v for k, v in target.connect_args.items() if k != "async_creator_fn"}
        by_sqlite3 = target.url.set(drivername="sqlite+pysqlite")
        return replace(target, url=by_sqlite3, connect_args=connect_args)
    if parts.dialect == "mysql":
        return _mysql(parts, for_threads=True)
    return _postgresql(parts, for_threads=True)


def _parse(url: str) -> _Parts:
    match = _URL.fullmatch(url.strip())
    if match is None:
        raise ConfigurationError(
            f"The database URL is not a URL; write it like {_EXAMPLES['postgresql']}."
        )
    base, _, driver = match["scheme"].lower().partition("+")
    dialect = _DIALECTS.get(base)
    if dialect is None:
        raise ConfigurationError(
            f"{base}:// is not a database Postroom knows; use PostgreSQL, MariaDB or SQLite, "
            f"such as {_EXAMPLES['postgresql']}."
        )
    if driver and driver not in _KNOWN_DRIVERS[dialect]:
        raise ConfigurationError(
            f"{base}+{driver}:// names a driver Postroom does not know; "
            f"write {base}:// and it picks one."
        )
    options: dict[str, str] = {}
    for name, value in parse_qsl(match["query"] or "", keep_blank_values=True):
        # SQLAlchemy repeats `host` for several servers, libpq separates them by commas.
        repeated = name == "host" and name in options
        options[name] = f"{options[name]},{value}" if repeated else value
    return _Parts(
        dialect=dialect,
        driver="psycopg" if driver == "psycopg_async" else driver,
        user=_decoded(match["user"]),
        password=_decoded(match["password"]),
        hosts=_hosts(match["hosts"], dialect),
        database=_decoded(match["database"]),
        options=options,
    )


def _decoded(text: str | None) -> str | None:
    return unquote(text) if text else None


def _hosts(text: str, dialect: str) -> _Hosts:
    if "@" in text:
        # Part of a password: it must not reach an error.
        raise ConfigurationError(
            "The database URL has more than one @; write an @ in the password as %40."
        )
    hosts: _Hosts = []
    for token in filter(None, text.split(",")):
        match = _HOST.fullmatch(token)
        if match is None or (match["port"] and int(match["port"]) > 65535):
            raise ConfigurationError(
                f"The database URL has an address that is not host:port; "
                f"write it like {_EXAMPLES[dialect]}."
            )
        host = match["v6"] or unquote(match["name"])
        hosts.append((host, int(match["port"]) if match["port"] else None))
    return hosts


def _choose(parts: _Parts, offers: url_options.Offers) -> tuple[str, dict[str, Any]]:
    """The driver the URL names if it can serve, else the first that is installed and can."""
    for name in sorted(offers, key=lambda name: name != parts.driver):
        arguments = offers[name]
        if isinstance(arguments, dict) and find_spec(name) is not None:
            return name, arguments
    unfit = [why for why in offers.values() if isinstance(why, str)]
    wanted = next(name for name, offer in offers.items() if isinstance(offer, dict))
    raise MissingDriver(
        f"No driver that can serve {parts.safe} is installed"
        + (f" ({unfit[0]})" if unfit else "")
        + f": pip install 'postroom[{_PIP_EXTRAS[wanted]}]'."
    )


def _create(*args: Any, **kwargs: Any) -> URL:
    # Here, because a wrong URL should be named without loading SQLAlchemy first.
    from sqlalchemy import URL

    return URL.create(*args, **kwargs)


# PostgreSQL.


def _postgresql(parts: _Parts, *, for_threads: bool = False) -> Target:
    _merge_libpq_names(parts)
    pooled = url_options.says_pooled(parts.options)
    offers = url_options.postgresql(parts.options)
    if for_threads:
        offers = {"psycopg": offers["psycopg"]}
    driver, connect_args = _choose(parts, offers)
    host: str | None = None
    port: int | None = None
    query: dict[str, str] = {}
    # One server stands in its place in the URL; several, and sockets, in the query.
    if len(parts.hosts) == 1 and not parts.hosts[0][0].startswith("/"):
        [(host, port)] = parts.hosts
    elif parts.hosts:
        query["host"] = ",".join(name for name, _ in parts.hosts)
        query["port"] = ",".join(str(number or 5432) for _, number in parts.hosts)
    url = _create(
        f"postgresql+{driver}", parts.user, parts.password, host, port, parts.database, query
    )
    return Target(parts.dialect, url, connect_args, parts.safe, pooled)


def _merge_libpq_names(parts: _Parts) -> None:
    """libpq lets the query name what also has a place in the URL; the query has the last word."""
    options = parts.options
    parts.user = options.pop("user", parts.user)
    parts.password = options.pop("password", parts.password)
    parts.database = options.pop("dbname", options.pop("database", parts.database))
    if "host" in options:
        text = options.pop("host")
        port = parts.hosts[0][1] if parts.hosts else None
        parts.hosts = [(text, port)] if text.startswith("/") else _hosts(text, parts.dialect)
    if "port" in options:
        ports = options.pop("port").split(",")
        if not all(port.isdecimal() and int(port) < 65536 for port in ports):
            raise ConfigurationError("port in the database URL must be a number below 65536.")
        parts.hosts = parts.hosts or [("localhost", None)]
        if len(ports) not in (1, len(parts.hosts)):
            raise ConfigurationError("port must be given once, or once for every host.")
        ports = ports * len(parts.hosts) if len(ports) == 1 else ports
        parts.hosts = [(h, int(p)) for (h, _), p in zip(parts.hosts, ports, strict=True)]


# MariaDB and MySQL.


def _mysql(parts: _Parts, *, for_threads: bool = False) -> Target:
    if not parts.database:
        raise ConfigurationError(
            f"The database URL names no database; write it like {_EXAMPLES['mysql']}."
        )
    if len(parts.hosts) > 1:
        raise ConfigurationError("A MariaDB or MySQL URL takes one host.")
    offers = url_options.mysql(parts.options)
    if for_threads:
        offers = {"pymysql": url_options.pymysql(offers)}
    driver, connect_args = _choose(parts, offers)
    if parts.password and not parts.password.isascii():
        # The drivers would send it in Latin-1; servers hash what their clients typed, UTF-8.
        connect_args["password"] = parts.password.encode().decode("latin-1")
    host, port = parts.hosts[0] if parts.hosts else ("localhost", None)
    url = _create(f"mysql+{driver}", parts.user, parts.password, host, port, parts.database)
    return Target(parts.dialect, url, connect_args, parts.safe)


# SQLite.


def _sqlite(parts: _Parts) -> Target:
    path = parts.database or ""
    if parts.hosts:
        reason = "a path begins after the third slash"
    elif not path or ":memory:" in path or parts.options.get("mode") == "memory":
        reason = "an in-memory database is seen by one connection only"
    else:
        query, connect_args = url_options.sqlite(parts.options)
        url = _create("sqlite+aiosqlite", database=path, query=query)
        return Target(parts.dialect, url, connect_args, parts.safe)
    raise ConfigurationError(
        f"The SQLite URL names no file ({reason}); write sqlite:///relative.db "
        "or sqlite:////absolute/path.db."
    )
