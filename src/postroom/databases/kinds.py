"""The kinds of connection a user may publish on, recognised without importing their libraries.

`KINDS` is the whole list. A kind is found by the names of a class and its bases, so a subclass
(SQLModel's Session, a pool's own connection class) is found too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from postroom.errors import UnknownConnection

__all__ = ["KINDS", "Kind", "find_kind", "kind_of", "link_of"]


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
        module, _, name = self.link_name.partition(":")
        return getattr(import_module(f"postroom.databases.{module}"), name)  # type: ignore[no-any-return]


_ENGINE = "use an engine without isolation_level='AUTOCOMMIT'"
_MYSQL = "call `connection.begin()` first, or connect with autocommit=False"
_SQLITE = "execute BEGIN first, or connect without isolation_level=None (or autocommit=True)"
_PSYCOPG = "`with connection.transaction():` around it, or connect without autocommit=True"
_ASYNCPG = "write `async with connection.transaction():` around it"

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
    Kind("asyncpg", "Connection", "asyncpg:AsyncpgLink", _ASYNCPG, is_async=True),
    Kind("asyncpg", "PoolConnectionProxy", "asyncpg:AsyncpgLink", _ASYNCPG, is_async=True),
    Kind("sqlite3", "Connection", "sqlite:SqliteLink", _SQLITE),
    Kind("aiosqlite", "Connection", "sqlite:AiosqliteLink", _SQLITE, is_async=True),
    Kind("pymysql", "Connection", "mysql:PymysqlLink", _MYSQL),
    Kind("asyncmy", "Connection", "mysql:AsyncmyLink", _MYSQL, is_async=True),
    Kind("aiomysql", "Connection", "mysql:AsyncmyLink", _MYSQL, is_async=True),
)
_BY_NAME = {(kind.library, kind.cls): kind for kind in KINDS}


def find_kind(tx: object) -> Kind | None:
    """The kind of a connection or session, or None."""
    for cls in type(tx).__mro__:
        library = cls.__module__.partition(".")[0]
        if (kind := _BY_NAME.get((library, cls.__name__))) is not None:
            return kind
    return None


def kind_of(tx: object) -> Kind:
    """The kind of a connection or session, or an error that names what was given."""
    if (kind := find_kind(tx)) is not None:
        return kind
    given = f"{type(tx).__module__}.{type(tx).__qualname__}"
    accepted = ", ".join(kind.name for kind in KINDS)
    raise UnknownConnection(
        f"publish writes on your own session or connection, and a {given} is none it knows: "
        f"give it one of {accepted}"
    )


def link_of(tx: object) -> Any:
    """The link on a connection or session: a `Link`, or an `AsyncLink` if its kind is async."""
    return kind_of(tx).link(tx)
