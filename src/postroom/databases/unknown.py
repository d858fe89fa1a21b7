"""What people give in place of a connection, and what to tell them: each in words they can act on.

Found by name, as kinds are, so that no library is imported to say it.
"""

from __future__ import annotations

import inspect

from postroom.messages import message_type_of

__all__ = ["remedy"]

_SESSION = "open a session from it, `with {} as session:`, and give the session"
_TAKE = "take a connection from the pool, `{} as connection:`, and give that"
_DJANGO = (
    "inside `transaction.atomic()`, write `postroom.django.publish(message)`, or give "
    "`django.db.connection`"
)

# By library and class, for a class or any of its bases.
_KNOWN = {
    ("sqlalchemy", "Engine"): "write `with engine.begin() as connection:` and give the connection",
    ("sqlalchemy", "AsyncEngine"): "write `async with engine.begin() as connection:` and give the "
    "connection",
    ("sqlalchemy", "sessionmaker"): _SESSION.format("Session()"),
    ("sqlalchemy", "async_sessionmaker"): "open a session from it, `async with Session() as "
    "session:`, and give the session",
    ("sqlalchemy", "Pool"): "write `with engine.begin() as connection:` and give the connection",
    ("flask_sqlalchemy", "SQLAlchemy"): "give `db.session`",
    ("psycopg_pool", "ConnectionPool"): _TAKE.format("with pool.connection()"),
    ("psycopg_pool", "AsyncConnectionPool"): _TAKE.format("async with pool.connection()"),
    ("psycopg2", "AbstractConnectionPool"): "take a connection from the pool, "
    "`connection = pool.getconn()`, and give that",
    ("asyncpg", "Pool"): _TAKE.format("async with pool.acquire()"),
    ("asyncmy", "Pool"): _TAKE.format("async with pool.acquire()"),
    ("aiomysql", "Pool"): _TAKE.format("async with pool.acquire()"),
    ("dbutils", "PooledDB"): "take a connection from the pool, `connection = pool.connection()`, "
    "and give that",
    ("django", "Model"): f"that is a row, not a connection: {_DJANGO}",
    ("django", "BaseManager"): f"that is no connection: {_DJANGO}",
    ("django", "QuerySet"): f"that is no connection: {_DJANGO}",
}


def remedy(given: object) -> str | None:
    """What to give instead, or None if what was given is like nothing known."""
    if given is None:
        return "give the session or connection of your transaction"
    if isinstance(given, str):
        return "open a session or connection to it, and give that"
    if inspect.iscoroutine(given):
        return "it has not been awaited; await it, and give what that returns"
    if inspect.isgenerator(given) or inspect.isasyncgen(given):
        return "give the session it yields (in FastAPI, `Depends` hands it to you)"
    for cls in type(given).__mro__:
        library = cls.__module__.partition(".")[0]
        if (known := _KNOWN.get((library, cls.__name__))) is not None:
            return known
    return _by_look(given)


def _by_look(given: object) -> str | None:
    name = type(given).__name__.lower()
    if name.endswith("cursor"):
        return "give the cursor's connection, not the cursor"
    if name.endswith("transaction"):
        return "give the session or connection that the transaction is of"
    if "contextmanager" in name or name.endswith("acquirecontext"):
        return "it has not been entered; write `with … as connection:`, and give the connection"
    if hasattr(type(given), "__mapper__") or message_type_of(given) is not None:
        return "the session or connection comes first, then the message"
    return None
