"""What went wrong with a database, in one sentence: `explain` turns any driver's error into ours.

Drivers agree on little: PostgreSQL's have an SQLSTATE unless the connection failed, MySQL's a
number, SQLite's and libpq's only words; SQLAlchemy wraps all of them. Each is looked at for what it
has, most telling first. A sentence never holds the password, whatever the driver wrote.
"""

from __future__ import annotations

import re
import socket
import ssl
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from postroom.errors import (
    ConfigurationError,
    MissingDriver,
    PostroomError,
    Refused,
    SchemaError,
    Unreachable,
)
from postroom.signals import redact

if TYPE_CHECKING:
    from postroom.databases.urls import Target

__all__ = ["explain", "is_conflict", "is_locked", "not_of_it", "waited_too_long"]

_REFUSED = "Nothing listens at {safe}; check the address and that the server is running."
_NO_NAME = "The host name of {safe} cannot be found; check its spelling and the network."
_SILENT = "{safe} did not answer in time; check its address, its firewall and that it is running."
_GONE = "The connection to {safe} was lost."
_LOGIN = "{safe} refused the user name or password."
_NO_DATABASE = "The server has no such database: {safe}; create it or correct the URL."
_NO_TABLE = "Postroom's tables are not in {safe}; run `postroom db install`."
_NO_COLUMN = "Postroom's tables in {safe} are of another version; run `postroom db upgrade`."
_DENIED = "The user of {safe} lacks a right it needs ({text}); see `postroom db grants`."
_READ_ONLY = "{safe} is read-only; point the URL at the primary."
_STARTING = "{safe} is starting up, recovering or shutting down."
_FULL = "{safe} takes no more connections."
# A file has no address: whoever waits for it waits for somebody else's transaction.
_HELD = "The lock of {safe} was not to be had in time; see which process keeps a transaction open."
_BUSY = "A lock in {safe} was not to be had in time, so nothing was changed; try again."
_NO_TLS = "{safe} does not offer TLS, but the URL asks for it."
_UNTRUSTED = "TLS with {safe} failed: {text}."
_NOT_SQLITE = "{safe} is not a SQLite database."
_NO_FILE = "The file of {safe} cannot be opened; check that its directory exists and is writable."

_OTHER_SERVER = "The pooler at {safe} went over to another server, or its server was restarted."
_STATEMENTS = (
    "{safe} is a pooler in statement mode, which allows no transactions; "
    "give it pool_mode = transaction, or use a URL of the server itself."
)
_NO_OPTION = "The pooler at {safe} refuses an option of the URL ({text}); leave it out."
_NO_SERVER = "The pooler at {safe} has no server to offer: {text}."

# Whose errors may be a database's. Of Python's own all may: a driver on a connection or a loop that
# was closed under it raises RuntimeError, AttributeError and the like.
_LIBRARIES = sys.stdlib_module_names | {
    "MySQLdb", "aiomysql", "aiosqlite", "asyncmy", "asyncpg", "greenlet", "postroom", "psycopg",
    "psycopg2", "psycopg_binary", "psycopg_c", "pymysql", "sqlalchemy", "uvloop",
}  # fmt: skip

_Verdict = tuple[type[PostroomError], str]
_CONFLICTS = {"40001", "40P01", "55P03"}
_TOO_LONG = {"55P03", "57014"}

_SQLSTATES: dict[str, _Verdict] = {
    "28": (ConfigurationError, _LOGIN),
    "3D000": (ConfigurationError, _NO_DATABASE),
    "42P01": (SchemaError, _NO_TABLE),
    "3F000": (SchemaError, _NO_TABLE),
    "42703": (SchemaError, _NO_COLUMN),
    "42883": (SchemaError, _NO_COLUMN),
    "42501": (ConfigurationError, _DENIED),
    "25006": (Unreachable, _READ_ONLY),
    "55P03": (Refused, _BUSY),
    "57P": (Unreachable, _STARTING),
    "53300": (Unreachable, _FULL),
    "08": (Unreachable, _GONE),
}
_MYSQL_NUMBERS: dict[int, _Verdict] = {
    1040: (Unreachable, _FULL),
    1044: (ConfigurationError, _LOGIN),
    1045: (ConfigurationError, _LOGIN),
    1049: (ConfigurationError, _NO_DATABASE),
    1053: (Unreachable, _STARTING),
    1054: (SchemaError, _NO_COLUMN),
    1142: (ConfigurationError, _DENIED),
    1143: (ConfigurationError, _DENIED),
    1146: (SchemaError, _NO_TABLE),
    1203: (Unreachable, _FULL),
    1205: (Refused, _BUSY),
    1226: (Unreachable, _FULL),
    1227: (ConfigurationError, _DENIED),
    1290: (Unreachable, _READ_ONLY),
    1698: (ConfigurationError, _LOGIN),
    1836: (Unreachable, _READ_ONLY),
    2003: (Unreachable, _REFUSED),
    2005: (Unreachable, _NO_NAME),
    2006: (Unreachable, _GONE),
    2013: (Unreachable, _GONE),
    2026: (ConfigurationError, _NO_TLS),
}
# Only words are left when libpq fails to connect, and always with SQLite.
_WORDS: tuple[tuple[str, _Verdict], ...] = (
    ("certificate", (ConfigurationError, _UNTRUSTED)),
    ("server does not support SSL|rejected SSL", (ConfigurationError, _NO_TLS)),
    ("authentication failed|no password supplied|pg_hba.conf", (ConfigurationError, _LOGIN)),
    ('role ".*" does not exist', (ConfigurationError, _LOGIN)),
    ("another server behind the pooler", (Unreachable, _OTHER_SERVER)),
    ("statement pooling", (ConfigurationError, _STATEMENTS)),
    ("unsupported startup parameter", (ConfigurationError, _NO_OPTION)),
    ("query_wait_timeout|no working server|server_login_retry|cannot connect to server|"
     "server (login|conn)", (Unreachable, _NO_SERVER)),
    ('database ".*" does not exist|no such database', (ConfigurationError, _NO_DATABASE)),
    ("Name or service not known|nodename nor servname|getaddrinfo|resolve host|name resolution",
     (Unreachable, _NO_NAME)),
    ("timed? ?out|timeout expired", (Unreachable, _SILENT)),
    ("target_session_attrs|session is read-only|read-only transaction", (Unreachable, _READ_ONLY)),
    ("starting up|shutting down|recovery mode", (Unreachable, _STARTING)),
    ("too many clients|remaining connection slots|no more connections allowed",
     (Unreachable, _FULL)),
    ("refused|No such file or directory|Connect call failed", (Unreachable, _REFUSED)),
    ("closed|lost connection|terminating connection|reset by peer|broken pipe",
     (Unreachable, _GONE)),
    ("unable to open database", (ConfigurationError, _NO_FILE)),
    ("no such table", (SchemaError, _NO_TABLE)),
    ("no such column|has no column", (SchemaError, _NO_COLUMN)),
    ("database (table )?is locked", (Refused, _BUSY)),
    ("readonly database", (Unreachable, _READ_ONLY)),
    ("not a database|malformed", (ConfigurationError, _NOT_SQLITE)),
)  # fmt: skip


def explain(error: BaseException, target: Target) -> PostroomError:
    """The error in one sentence for people; its class says what kind of trouble it is."""
    chain = list(_chain(error))
    for link in chain:
        if isinstance(link, PostroomError):
            return link
    for judge in (_by_class, _by_code, _by_words):
        for link in reversed(chain):
            verdict = judge(link)
            if verdict is not None and verdict[1] == _SILENT and target.dialect == "sqlite":
                verdict = Unreachable, _HELD
            if verdict is not None:
                return _say(verdict, link, target)
    if any(isinstance(link, OSError) or _is_connection_error(link) for link in chain):
        return Unreachable(f"{target.safe} cannot be used: {_text(chain[-1], target)}.")
    return PostroomError(f"{target.safe} answered: {_text(chain[-1], target)}.")


def not_of_it(error: BaseException) -> BaseException | None:
    """What broke into a statement and is no error of a database's: a time limit, such as Celery's,
    that a signal raises wherever it comes. It belongs to whoever set it."""
    # SQLAlchemy wraps others too, before a statement is sent.
    wrapped = getattr(error, "orig", None)
    inner = wrapped if isinstance(wrapped, BaseException) else error
    if isinstance(inner, OSError) or _library(inner) in _LIBRARIES:
        return None
    return inner


def is_conflict(error: BaseException) -> bool:
    """Whether the database let another transaction go first: a deadlock, a lock not got in time, a
    transaction that could not be put in order, or tables that were changed under a statement that
    was prepared before. The same work may go through at another try."""
    for link in _chain(error):
        if type(link).__name__ == "InvalidCachedStatementError":  # asyncpg's
            return True
        if _library(link) in ("asyncmy", "aiomysql", "pymysql", "MySQLdb"):
            if link.args and link.args[0] in (1205, 1213, 1020):
                return True
        elif _library(link) == "sqlite3":
            return "locked" in str(link)
        elif (getattr(link, "sqlstate", None) or getattr(link, "pgcode", None)) in _CONFLICTS:
            return True
    return False


def is_locked(error: BaseException) -> bool:
    """Whether SQLite's one lock was not to be had: another process has a transaction open."""
    return is_conflict(error) or any(isinstance(link, TimeoutError) for link in _chain(error))


def waited_too_long(error: BaseException) -> bool:
    """Whether the database ended a statement that took too long: a limit for locks, or for any."""
    for link in _chain(error):
        if _library(link) in ("asyncmy", "aiomysql", "pymysql", "MySQLdb"):
            if link.args and link.args[0] in (1205, 1969, 3024):
                return True
        elif _library(link) == "sqlite3":
            # After its busy_timeout; what has read before it writes is told at once, otherwise.
            return getattr(link, "sqlite_errorname", "") == "SQLITE_BUSY"
        elif (getattr(link, "sqlstate", None) or getattr(link, "pgcode", None)) in _TOO_LONG:
            return True
    return False


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what it wraps, outermost first."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        wrapped = getattr(link, "orig", None)
        link = wrapped if isinstance(wrapped, BaseException) else link.__cause__


def note_remedy(error: BaseException) -> None:
    """Add a remedy to a driver's error about Postroom's tables, which passes to the caller."""
    for link in _chain(error):
        verdict = _by_code(link) or _by_words(link)
        if verdict is not None and verdict[1] in (_NO_TABLE, _NO_COLUMN):
            error.add_note(verdict[1].format(safe="this database"))
            return


def _by_class(error: BaseException) -> _Verdict | None:
    if isinstance(error, ImportError):
        return MissingDriver, "The driver for {safe} cannot be loaded: {text}."
    if isinstance(error, ssl.SSLError):
        return ConfigurationError, _UNTRUSTED
    if isinstance(error, socket.gaierror):
        return Unreachable, _NO_NAME
    if isinstance(error, TimeoutError):
        return Unreachable, _SILENT
    if isinstance(error, ConnectionRefusedError | FileNotFoundError):
        return Unreachable, _REFUSED
    if isinstance(error, ConnectionResetError | BrokenPipeError):
        return Unreachable, _GONE
    if type(error).__name__ == "TargetServerAttributeNotMatched":
        return Unreachable, _READ_ONLY
    return None


def _by_code(error: BaseException) -> _Verdict | None:
    if _library(error) in ("asyncmy", "aiomysql", "pymysql", "MySQLdb"):
        # First, since some of them have an SQLSTATE too, of MySQL's own kind.
        return _MYSQL_NUMBERS.get(error.args[0]) if error.args else None
    code = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    if code == "08P01":
        # PgBouncer has this one for whatever it says by itself, so its words tell more.
        return _by_words(error) or _SQLSTATES["08"]
    if isinstance(code, str):
        return next((_SQLSTATES[code[:n]] for n in (5, 3, 2) if code[:n] in _SQLSTATES), None)
    return None


def _by_words(error: BaseException) -> _Verdict | None:
    text = str(error)
    return next((verdict for words, verdict in _WORDS if re.search(f"(?i){words}", text)), None)


def _is_connection_error(error: BaseException) -> bool:
    return type(error).__name__ in ("InterfaceError", "OperationalError") or bool(
        getattr(error, "connection_invalidated", False)
    )


def _library(error: BaseException) -> str:
    return type(error).__module__.partition(".")[0]


def _say(verdict: _Verdict, error: BaseException, target: Target) -> PostroomError:
    kind, sentence = verdict
    return kind(sentence.format(safe=target.safe, text=_text(error, target)))


def _text(error: BaseException, target: Target) -> str:
    """The driver's own words: one line, without the password."""
    text = str(error.args[-1]) if error.args and _library(error) != "sqlalchemy" else str(error)
    line = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    password = target.url.password
    if password:
        line = line.replace(str(password), "***")
    return redact(line)[:300].rstrip(".")
