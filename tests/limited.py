"""Databases that limit the connections of a worker, and end the open ones on demand.

PostgreSQL and MariaDB limit the connections of an account. SQLite has no such limit, so a failpoint
stands for it: there an open that is one too many fails with the error of a process out of files.
"""

import errno
import uuid
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from postroom import failpoints
from stages import Stage

KINDS = ("postgresql", "mariadb", "sqlite")


class Limited:
    """A database with Postroom installed. Workers use `url`, tests look at it through `stage`."""

    reason = "takes no more connections"

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.url = stage.url
        self.account = f"small_{uuid.uuid4().hex[:8]}"

    def allow(self, connections: int | None) -> None:
        """Admit at most `connections`; None means no limit."""
        raise NotImplementedError

    def end_sessions(self) -> None:
        """End every connection that workers have."""
        raise NotImplementedError

    def close(self) -> None:
        """Remove the account."""

    def _as_account(self, password: str) -> str:
        parts = urlsplit(self.stage.url)
        place = f"{self.account}{password}@{parts.hostname}:{parts.port}"
        return urlunsplit(parts._replace(netloc=place))


class _PostgreSQL(Limited):
    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self.url = self._as_account("")
        name = urlsplit(stage.url).path[1:]
        for statement in (
            f"CREATE ROLE {self.account} LOGIN",
            f"GRANT pg_read_all_data, pg_write_all_data TO {self.account}",
            f"GRANT ALL ON DATABASE {name} TO {self.account}",
            f"GRANT ALL ON SCHEMA postroom TO {self.account}",
            f"GRANT ALL ON ALL TABLES IN SCHEMA postroom TO {self.account}",
            f"GRANT ALL ON ALL SEQUENCES IN SCHEMA postroom, public TO {self.account}",
            f"GRANT ALL ON ALL FUNCTIONS IN SCHEMA postroom TO {self.account}",
        ):
            stage.query(statement)

    def allow(self, connections: int | None) -> None:
        limit = -1 if connections is None else connections
        self.stage.query(f"ALTER ROLE {self.account} CONNECTION LIMIT {limit}")

    def end_sessions(self) -> None:
        self.stage.query(
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE usename = %s",
            self.account,
        )

    def close(self) -> None:
        self.end_sessions()
        self.stage.query(f"DROP OWNED BY {self.account}")
        self.stage.query(f"DROP ROLE {self.account}")


class _MariaDB(Limited):
    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self.url = self._as_account(":small")
        name = urlsplit(stage.url).path[1:]
        stage.query(f"CREATE USER {self.account}@'%%' IDENTIFIED BY 'small'")
        stage.query(f"GRANT ALL ON `{name}`.* TO {self.account}@'%%'")

    def allow(self, connections: int | None) -> None:
        limit = 0 if connections is None else connections or -1
        self.stage.query(f"ALTER USER {self.account}@'%%' WITH MAX_USER_CONNECTIONS {limit}")
        self.stage.query("FLUSH PRIVILEGES")

    def end_sessions(self) -> None:
        self.stage.query(f"KILL USER {self.account}@'%%'")

    def close(self) -> None:
        self.stage.query(f"DROP USER {self.account}@'%%'")


class _SQLite(Limited):
    reason = "Too many open files"
    _limit: int | None = None
    _opened = 0

    def allow(self, connections: int | None) -> None:
        self._limit, self._opened = connections, 0
        failpoints.arm("link.open.before", self._open)

    def end_sessions(self) -> None:
        self._opened = 0
        # Each statement that a worker sends from time to time fails once, with its connection.
        for point in ("beat", "worker_beat", "depth"):
            failpoints.arm(f"sql.{point}.before", _once())
        failpoints.arm("tx.begin.before", _once())

    def close(self) -> None:
        failpoints.clear()

    def _open(self) -> None:
        if self._limit is not None and self._opened >= self._limit:
            raise OSError(errno.EMFILE, self.reason)
        self._opened += 1


def _once() -> Any:
    left = [True]

    def fail() -> None:
        if left and left.pop():
            raise ConnectionResetError("the connection was ended")

    return fail


def limited(stage: Stage) -> Limited:
    """A limited account on a stage."""
    kinds = {"postgresql": _PostgreSQL, "mariadb": _MariaDB, "sqlite": _SQLite}
    return kinds[stage.database](stage)
