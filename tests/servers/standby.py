"""A PostgreSQL server that follows another one, until it is told to take its place."""

from .places import account
from .postgres import PostgresServer


class StandbyServer(PostgresServer):
    """A streaming standby of `primary`, which it reaches on `port` of this machine."""

    def __init__(self, primary: PostgresServer, port: int) -> None:
        self._source = f"host=127.0.0.1 port={port} user=postgres application_name=standby"
        super().__init__(version=primary.version, fsync=False)

    def _prepare(self) -> None:
        if not self._data.exists():
            how = ["--write-recovery-conf", "--wal-method=stream", "--checkpoint=fast", "--no-sync"]
            copy = [self._programs / "pg_basebackup", "-D", self._data, "-d", self._source]
            account().run(*copy, *how)

    def received(self) -> int:
        """The last byte of the primary's log that it has, and has applied."""
        with self._connect() as connection:
            row = connection.execute(
                "SELECT pg_wal_lsn_diff(pg_last_wal_replay_lsn(), '0/0')::bigint"
                " WHERE pg_last_wal_replay_lsn() = pg_last_wal_receive_lsn()"
            ).fetchone()
        return int(row[0]) if row else 0

    def promote(self) -> None:
        """Take the primary's place; answers once it takes writes."""
        with self._connect() as connection:
            connection.execute("SELECT pg_promote(true, 60)")
