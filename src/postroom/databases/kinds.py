"""The kinds of connection a user may publish on, recognised without importing their libraries.

`KINDS` is the whole list. A kind is found by the names of a class and its bases, so a subclass
(SQLModel's Session, a pool's own connection class) is found too. `WRAPPERS` are what pools,
tracers and frameworks put around a connection: what is inside is what is written on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import import_module
from typing import Any

from postroom.databases.unknown import remedy
from postroom.errors import UnknownConnection, WouldCommitAlone

__all__ = ["KINDS", "WRAPPERS", "Kind", "bare", "find_kind", "kind_of", "link_of"]


@dataclass(frozen=True, slots=True)
class Kind:
    """One class of connection: where it comes from, how to work on it, how to begin on it."""

    library: str
    cls: str
    link_name: str
    begin: str  # what to write to be in a transaction, for the error that asks for one
    is_async: bool = False
    is_session: bool = False

    @property
    def name(self) -> str:
        return f"{self.library}.{self.cls}"

    @property
    def link(self) -> Callable[[Any], Any]:
        """The link class; importing it imports the driver, which is there if a connection is."""
        return _imported(self.link_name)


@cache
def _imported(link_name: str) -> Callable[[Any], Any]:
    module, _, name = link_name.partition(":")
    return getattr(import_module(f"postroom.databases.{module}"), name)  # type: ignore[no-any-return]


_ENGINE = "use an engine without isolation_level='AUTOCOMMIT'"
_MYSQL = "call `connection.begin()` first, or connect with autocommit=False"
_SQLITE = "execute BEGIN first, or connect without isolation_level=None (or autocommit=True)"
_PSYCOPG2 = "write `with connection:` around it, or set connection.autocommit = False"
_PSYCOPG = "`with connection.transaction():` around it, or connect without autocommit=True"
_ASYNCPG = "write `async with connection.transaction():` around it"
_DJANGO = "write `with transaction.atomic():` around it, or set ATOMIC_REQUESTS"

KINDS: tuple[Kind, ...] = (
    Kind("sqlalchemy", "Session", "sqlalchemy:session_link", _ENGINE, is_session=True),
    Kind("sqlalchemy", "scoped_session", "sqlalchemy:session_link", _ENGINE, is_session=True),
    Kind(
        "sqlalchemy",
        "AsyncSession",
        "sqlalchemy:AsyncSessionLink",
        _ENGINE,
        is_async=True,
        is_session=True,
    ),
    Kind(
        "sqlalchemy",
        "async_scoped_session",
        "sqlalchemy:AsyncSessionLink",
        _ENGINE,
        is_async=True,
        is_session=True,
    ),
    Kind("sqlalchemy", "Connection", "sqlalchemy:SQLAlchemyLink", _ENGINE),
    Kind("sqlalchemy", "AsyncConnection", "sqlalchemy:AsyncSQLAlchemyLink", _ENGINE, is_async=True),
    Kind("psycopg", "Connection", "psycopg:PsycopgLink", f"write {_PSYCOPG}"),
    Kind(
        "psycopg",
        "AsyncConnection",
        "psycopg:AsyncPsycopgLink",
        f"write `async {_PSYCOPG[1:]}",
        is_async=True,
    ),
    Kind("psycopg2", "connection", "psycopg2:Psycopg2Link", _PSYCOPG2),
    Kind("asyncpg", "Connection", "asyncpg:AsyncpgLink", _ASYNCPG, is_async=True),
    Kind("asyncpg", "PoolConnectionProxy", "asyncpg:AsyncpgLink", _ASYNCPG, is_async=True),
    Kind("sqlite3", "Connection", "sqlite:SqliteLink", _SQLITE),
    Kind("aiosqlite", "Connection", "sqlite:AiosqliteLink", _SQLITE, is_async=True),
    Kind("pymysql", "Connection", "mysql:PymysqlLink", _MYSQL),
    Kind("MySQLdb", "Connection", "mysql:MysqlclientLink", _MYSQL),
    Kind("asyncmy", "Connection", "mysql:AsyncmyLink", _MYSQL, is_async=True),
    Kind("aiomysql", "Connection", "mysql:AsyncmyLink", _MYSQL, is_async=True),
    Kind("django", "BaseDatabaseWrapper", "django:DjangoLink", _DJANGO),
    Kind("django", "ConnectionProxy", "django:DjangoLink", _DJANGO),
)
_BY_NAME = {(kind.library, kind.cls): kind for kind in KINDS}


def _driver_connection(wrapper: Any, to_write: bool) -> object:
    """What a connection of SQLAlchemy's pool, or the face it gives an async one, is around."""
    if (connection := wrapper.driver_connection) is None:
        raise UnknownConnection(
            "this connection was closed or given back to its pool: take one from the pool again"
        )
    return connection


def _steady(wrapper: Any, to_write: bool) -> object:
    """What DBUtils is around; it reconnects by itself unless it was told of the transaction."""
    if to_write and not wrapper._transaction:
        raise WouldCommitAlone(
            "a DBUtils connection that was not told of a transaction reconnects by itself, and "
            "what was written before is lost in silence: call `connection.begin()` first"
        )
    return wrapper._con


def _pooled(wrapper: Any, to_write: bool) -> object:
    if (connection := wrapper._con) is None:
        raise UnknownConnection(
            "this connection was given back to its pool: call `pool.connection()` again"
        )
    return connection


def _traced(wrapper: Any, to_write: bool) -> object:
    """What OpenTelemetry, ddtrace and New Relic trace, with the proxy of wrapt."""
    return wrapper.__wrapped__


def _local(wrapper: Any, to_write: bool) -> object:
    """What Flask's and Werkzeug's `LocalProxy` stands for in this request."""
    return wrapper._get_current_object()


WRAPPERS: dict[tuple[str, str], Callable[[Any, bool], object]] = {
    ("sqlalchemy", "_ConnectionFairy"): _driver_connection,
    ("sqlalchemy", "AdaptedConnection"): _driver_connection,
    ("dbutils", "PooledDedicatedDBConnection"): _pooled,
    ("dbutils", "PooledSharedDBConnection"): _pooled,
    ("dbutils", "SteadyDBConnection"): _steady,
    ("wrapt", "ObjectProxy"): _traced,
    ("werkzeug", "LocalProxy"): _local,
}


def bare(tx: object, *, to_write: bool = True) -> Any:
    """The connection inside what was put around it; anything else as it is."""
    if (inside := _wrapper(type(tx))) is not None:  # type: ignore[arg-type]
        return bare(inside(tx, to_write), to_write=to_write)
    return tx


# What a class is never changes, and a process knows few of them: looking at names takes longer than
# all the rest of finding a connection's kind.
@lru_cache(maxsize=256)
def _wrapper(cls: type) -> Callable[[Any, bool], object] | None:
    return next((WRAPPERS[name] for name in _names(cls) if name in WRAPPERS), None)


@lru_cache(maxsize=256)
def _kind(cls: type) -> Kind | None:
    return next((_BY_NAME[name] for name in _names(cls) if name in _BY_NAME), None)


def _names(tx: type) -> Iterator[tuple[str, str]]:
    """The library and name of a class and of every base."""
    for cls in tx.__mro__:
        library = cls.__module__.partition(".")[0]
        # The compiled half of wrapt gives its module this name.
        yield "wrapt" if library == "_wrappers" else library, cls.__name__


def find_kind(tx: object) -> Kind | None:
    """The kind of a connection or session, or None."""
    return _kind(type(tx))  # type: ignore[arg-type]


def kind_of(tx: object) -> Kind:
    """The kind of a connection or session, or an error that says what to give instead."""
    if (kind := find_kind(tx)) is not None:
        return kind
    given = f"{type(tx).__module__}.{type(tx).__qualname__}"
    accepted = ", ".join(kind.name for kind in KINDS)
    instead = remedy(tx) or f"give it one of {accepted}"
    raise UnknownConnection(
        f"a session or connection of your own is needed, and a {given} is none: {instead}"
    )


def link_of(tx: object) -> Any:
    """The link on a connection or session: a `Link`, or an `AsyncLink` if its kind is async."""
    inside = bare(tx, to_write=False)
    return kind_of(inside).link(inside)
