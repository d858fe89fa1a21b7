"""PgBouncer from its Debian package, before a PostgreSQL of ours."""

import os
import shutil
from urllib.parse import urlsplit, urlunsplit

import psycopg

from .outcome import Unavailable
from .postgres import PostgresServer
from .server import Server

_HOW = "there is no PgBouncer: apt-get install pgbouncer, or set POSTROOM_TEST_PGBOUNCER_URL"


class PgBouncerServer(Server):
    """A pooler in transaction mode, unless told, that serves every database of its PostgreSQL.

    One given by URL must do so too, before the same PostgreSQL.
    """

    name = "PgBouncer"

    def __init__(
        self,
        postgres: PostgresServer,
        *,
        mode: str = "transaction",
        pool_size: int = 20,
        url: str | None = None,
    ) -> None:
        self.postgres = postgres
        self.mode = mode
        self.pool_size = pool_size
        super().__init__(fsync=False, url=url)

    def _find_programs(self) -> None:
        # Debian keeps servers where the PATH of an ordinary user does not look.
        path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"])
        found = shutil.which("pgbouncer", path=path)
        if found is None:
            raise Unavailable(_HOW)
        self._server = found

    def _prepare(self) -> None:
        server = urlsplit(self.postgres.url)
        (self.directory / "pgbouncer.ini").write_text(
            f"""\
[databases]
* = host={server.hostname} port={server.port or 5432} user={server.username or "postgres"}

[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {self.port}
unix_socket_dir =
auth_type = any
pool_mode = {self.mode}
default_pool_size = {self.pool_size}
max_client_conn = 400
server_login_retry = 0.2
"""
        )

    def _command(self) -> list[str]:
        return [self._server, str(self.directory / "pgbouncer.ini")]

    def _own_url(self) -> str:
        return self.through(self.postgres.url)

    def through(self, url: str) -> str:
        """The URL of a database of its PostgreSQL by way of the pooler."""
        place = urlsplit(self._given_url).netloc.rpartition("@")[2] if self._given_url else ""
        parts = urlsplit(url)
        credentials, at, _ = parts.netloc.rpartition("@")
        netloc = f"{credentials}{at}{place or f'127.0.0.1:{self.port}'}"
        return urlunsplit(parts._replace(netloc=netloc))

    def _ask(self) -> None:
        with psycopg.connect(self.url, autocommit=True, connect_timeout=5) as connection:
            connection.execute("SELECT 1")
