"""SQLAlchemy connections and sessions: statements go to the driver as they are, through
`exec_driver_sql`, inside whatever transaction the connection is in."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from postroom.databases.mysql import for_aiomysql
from postroom.databases.psycopg2 import array, without_view
from postroom.databases.steps import Manner, Step, drive
from postroom.errors import UnknownConnection
from postroom.flow import Rows, Statement

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection, Dialect, Engine
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
    from sqlalchemy.orm import Session, scoped_session

__all__ = [
    "AsyncSQLAlchemyLink",
    "AsyncSessionLink",
    "LeanLink",
    "SQLAlchemyLink",
    "manner_of",
    "session_link",
]

_DIALECTS = {
    "postgresql": "postgresql",
    "mysql": "mysql",
    "mariadb": "mysql",
    "sqlite": "sqlite",
}
# Their executemany sends one statement a row; one array a column is one statement in all.
_ARRAYS = {"asyncpg", "psycopg2"}
# Values as a driver can send them, where it needs help.
_FITTED: dict[str, Callable[[tuple[Any, ...]], tuple[Any, ...]]] = {
    "aiomysql": for_aiomysql,
    "psycopg2": lambda values: tuple(map(array, values)),
}


def manner_of(dialect: Dialect) -> Manner:
    """How a dialect wants its statements, or an error if it cannot carry ours."""
    name = _DIALECTS.get(dialect.name)
    if name is None:
        raise UnknownConnection(
            f"Postroom speaks PostgreSQL, MariaDB, MySQL and SQLite, not {dialect.name}: "
            "give it a session or connection of one of those"
        )
    return _manner(name, dialect.driver, dialect.paramstyle)


@cache
def _manner(name: str, driver: str, paramstyle: str) -> Manner:
    if driver == "asyncpg":
        style = "dollar"
    elif name == "sqlite" or paramstyle == "qmark":
        style = "qmark"
    else:
        style = "format"
    return Manner(name, style, arrays=driver in _ARRAYS)


class SQLAlchemyLink:
    """Carries out statements on a `sqlalchemy.Connection`."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._manner = manner_of(connection.dialect)
        self.dialect = self._manner.dialect

    def commits_alone(self) -> bool:
        """Whether the driver would commit this statement by itself.

        An autocommit setting alone decides nothing: the user may have sent BEGIN, from an event
        too, as in SQLAlchemy's own recipe for SQLite. So the driver is asked whether a
        transaction of SQLAlchemy's is one of its own.
        """
        if not _autocommits(self.connection):
            return False
        if self.connection.in_transaction():
            return _driver_is_idle(self.connection)
        with self.connection.begin() as probe:
            idle = _driver_is_idle(self.connection)
            probe.rollback()
        return idle

    def execute(self, statement: Statement) -> Rows:
        return drive(statement, self._manner, self._take)

    def _take(self, step: Step) -> Rows | None:
        driver = self.connection.dialect.driver
        if (fit := _FITTED.get(driver)) is not None:
            step = step.with_values(fit)
        if step.many is not None:
            self.connection.exec_driver_sql(step.text, step.many).close()
            return None
        with self.connection.exec_driver_sql(step.text, step.values) as result:
            if not result.returns_rows:
                return None
            if driver == "psycopg2":  # it returns bytes as a memoryview
                return [tuple(map(without_view, row)) for row in result]
            return [tuple(row) for row in result]


OWN_LISTENER = "_postroom_hears_of_errors"  # what we count with needs no word of lean statements


class LeanLink(SQLAlchemyLink):
    """The same for statements that are ours alone, errors included: past what SQLAlchemy keeps of
    each, which takes as long as the statement itself. Where somebody watches, nothing is passed."""

    def _take(self, step: Step) -> Rows | None:
        connection = self.connection
        if step.many is not None or _is_watched(connection):
            return super()._take(step)
        if (fit := _FITTED.get(connection.dialect.driver)) is not None:
            step = step.with_values(fit)
        fairy = connection.connection
        cursor = fairy.cursor()
        try:
            cursor.execute(step.text, step.values)
            if cursor.description is None:
                return None
            return [tuple(map(without_view, row)) for row in cursor.fetchall()]
        except Exception as error:
            if connection.dialect.is_disconnect(error, fairy.dbapi_connection, cursor):  # type: ignore[arg-type]
                connection.invalidate(error)
            raise
        finally:
            cursor.close()


def _is_watched(connection: Connection) -> bool:
    """Whether somebody listens to statements or their errors, or has them logged."""
    heard, by_driver = connection.dispatch, connection.dialect.dispatch
    return bool(
        connection.engine.logger.isEnabledFor(logging.INFO)  # by `echo`, or by logging's own ways
        or heard.before_cursor_execute
        or heard.after_cursor_execute
        or by_driver.do_execute
        or any(getattr(each, "__name__", "") != OWN_LISTENER for each in by_driver.handle_error)
    )


def _autocommits(connection: Connection) -> bool:
    dbapi_connection = connection.connection.dbapi_connection
    try:
        return connection.dialect.detect_autocommit_setting(dbapi_connection)  # type: ignore[arg-type]
    except NotImplementedError:
        # A dialect of others that cannot tell: what SQLAlchemy was asked for is all there is.
        asked = connection.get_execution_options().get("isolation_level")
        return (asked or connection.default_isolation_level) == "AUTOCOMMIT"


def _driver_is_idle(connection: Connection) -> bool:
    from postroom.databases.kinds import bare, find_kind

    driver_connection = bare(connection.connection.driver_connection)
    kind = find_kind(driver_connection)
    return True if kind is None else kind.link(driver_connection).commits_alone()


class AsyncSQLAlchemyLink:
    """Carries out statements on a `sqlalchemy.ext.asyncio.AsyncConnection`."""

    def __init__(self, connection: AsyncConnection) -> None:
        self.connection = connection
        self.dialect = manner_of(connection.dialect).dialect

    async def execute(self, statement: Statement) -> Rows:
        return await self.connection.run_sync(partial(_execute, statement))


def _execute(statement: Statement, connection: Connection) -> Rows:
    return SQLAlchemyLink(connection).execute(statement)


def session_link(
    session: Session | scoped_session[Any], bind: Engine | Connection | None = None
) -> SQLAlchemyLink:
    """A link on the connection of a session's transaction, opened if need be."""
    return SQLAlchemyLink(session.connection(bind_arguments={"bind": bind} if bind else None))


class AsyncSessionLink:
    """Carries out statements on the connection of an `AsyncSession`."""

    def __init__(self, session: AsyncSession | async_scoped_session[Any]) -> None:
        from sqlalchemy.ext.asyncio import AsyncSession

        self.session = session if isinstance(session, AsyncSession) else session()
        self.dialect = manner_of(self.session.get_bind().dialect).dialect

    async def execute(self, statement: Statement) -> Rows:
        return await self.session.run_sync(lambda session: session_link(session).execute(statement))
