"""MariaDB from its Debian package."""

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

import pymysql

from .outcome import Unavailable
from .places import account, copy_of_template
from .processes import wait_until
from .server import Server

_HOW = "there is no MariaDB: apt-get install mariadb-server, or set POSTROOM_TEST_MARIADB_URL"

_LOG_SIZE = "32M"  # small, because every new server copies it

_FIRST_SQL = """\
CREATE USER IF NOT EXISTS 'postroom'@'%' IDENTIFIED BY 'postroom';
GRANT ALL PRIVILEGES ON *.* TO 'postroom'@'%' WITH GRANT OPTION;
CREATE DATABASE IF NOT EXISTS postroom;
"""


class MariaDBServer(Server):
    """A MariaDB server with an all-powerful account `postroom`, password `postroom`.

    `fsync=False` makes it faster, in memory where there is room; what is committed then survives
    a kill of the server still, though not a crash of the machine.
    """

    name = "MariaDB"

    def __init__(
        self,
        *,
        fsync: bool = True,
        settings: Mapping[str, str] | None = None,
        url: str | None = None,
    ) -> None:
        self.settings = {
            "character-set-server": "utf8mb4",
            "innodb-flush-log-at-trx-commit": "1",
            "innodb-log-file-size": _LOG_SIZE,
            "max-connections": "200",
        }
        if not fsync:
            self.settings["innodb-flush-method"] = "nosync"
        self.settings |= settings or {}
        super().__init__(fsync=fsync, url=url)

    def _find_programs(self) -> None:
        self._server = _find("mariadbd")
        self._install = _find("mariadb-install-db")

    @property
    def _data(self) -> Path:
        return self.directory / "data"

    def _prepare(self) -> None:
        if not self._data.exists():
            copy_of_template("mariadb", self._data, self._install_db)
            (self.directory / "first.sql").write_text(_FIRST_SQL)

    def _install_db(self, data: Path) -> None:
        account().run(
            self._install,
            "--no-defaults",
            f"--datadir={data}",
            # A server that starts removes the temporary tables of others that share its tmpdir.
            f"--tmpdir={data.parent}",
            "--auth-root-authentication-method=normal",
            "--skip-test-db",
            "--skip-name-resolve",
            f"--innodb-log-file-size={_LOG_SIZE}",
        )

    def _command(self) -> list[str]:
        return [
            self._server,
            "--no-defaults",
            f"--datadir={self._data}",
            f"--tmpdir={self.directory}",
            f"--socket={self.directory / 'socket'}",
            f"--pid-file={self.directory / 'pid'}",
            f"--init-file={self.directory / 'first.sql'}",
            "--bind-address=127.0.0.1",
            f"--port={self.port}",
            "--skip-name-resolve",
            *(f"--{setting}={value}" for setting, value in self.settings.items()),
        ]

    def _own_url(self) -> str:
        return f"mysql://postroom:postroom@127.0.0.1:{self.port}/postroom"

    def _ask(self) -> None:
        with self._connect() as connection:
            _rows(connection, "SELECT 1")

    def _connect(self) -> Any:
        url = urlsplit(self.url)
        return pymysql.connect(
            host=url.hostname,
            port=url.port or 3306,
            user=unquote(url.username or ""),
            password=unquote(url.password or ""),
            charset="utf8mb4",
            autocommit=True,
            connect_timeout=5,
            read_timeout=30,
        )

    def database_url(self, name: str) -> str:
        return urlunsplit(urlsplit(self.url)._replace(path=f"/{name}"))

    def create_database(self, name: str) -> str:
        """Create an empty database and give its URL."""
        with self._connect() as connection:
            _rows(connection, f"CREATE DATABASE {_quote(name)} CHARACTER SET utf8mb4")
        return self.database_url(name)

    def drop_database(self, name: str) -> None:
        """Drop a database with everything that would hold it back. No harm when there is none."""
        with self._connect() as connection:
            self._end_sessions(connection, name)
            if self.private:
                # In doubt, transactions keep their locks and belong to no database by name: on a
                # server of somebody else's they might not be ours.
                for row in _rows(connection, "XA RECOVER FORMAT='SQL'"):
                    _rows(connection, f"XA ROLLBACK {row[3]}")
            _rows(connection, f"DROP DATABASE IF EXISTS {_quote(name)}")

    def _end_sessions(self, connection: Any, name: str) -> None:
        sessions = "SELECT id FROM information_schema.processlist WHERE db = %s"
        for (session,) in _rows(connection, sessions, name):
            with suppress(pymysql.MySQLError):  # it may go by itself
                _rows(connection, f"KILL {session}")
        wait_until(lambda: not _rows(connection, sessions, name), 10, f"sessions in {name} to end")


def _find(program: str) -> str:
    # Debian keeps servers where the PATH of an ordinary user does not look.
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"])
    found = shutil.which(program, path=path)
    if found is None:
        raise Unavailable(_HOW)
    return found


def _rows(connection: Any, statement: str, *values: object) -> list[tuple[Any, ...]]:
    with connection.cursor() as cursor:
        cursor.execute(statement, values or None)
        return list(cursor.fetchall())


def _quote(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
