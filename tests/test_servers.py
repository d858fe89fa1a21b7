"""The servers that other tests stand on: they serve, they die, and they come back whole."""

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import nats
import psycopg
import pymysql
import pytest

from helpers import eventually, eventually_async
from proxy import ChaosProxy
from servers import MariaDBServer, NatsServer, PostgresServer, Server, Unavailable
from servers.outcome import leave_out, left_out
from servers.places import port_is_free

Database = PostgresServer | MariaDBServer


def connect(url: str) -> Any:
    parts = urlsplit(url)
    if parts.scheme == "postgresql":
        return psycopg.connect(url, autocommit=True, connect_timeout=5)
    return pymysql.connect(
        host=parts.hostname,
        port=parts.port or 3306,
        user=parts.username,
        password=parts.password or "",
        database=parts.path.lstrip("/"),
        autocommit=True,
        connect_timeout=5,
    )


def query(url: str, statement: str) -> list[tuple[Any, ...]]:
    connection = connect(url)
    try:
        cursor = connection.cursor()
        cursor.execute(statement)
        return list(cursor.fetchall()) if cursor.description else []
    finally:
        connection.close()


def exchange(url: str, payload: bytes) -> int:
    """Publish to JetStream and give the sequence number of the receipt."""

    async def publish() -> int:
        client = await nats.connect(url, allow_reconnect=False)
        try:
            stream = client.jetstream()
            await stream.add_stream(name="things", subjects=["things.>"])
            return (await stream.publish("things.one", payload)).seq
        finally:
            await client.close()

    return asyncio.run(publish())


@pytest.fixture(params=["postgres", "postgres15", "mariadb"])
def database(request: pytest.FixtureRequest) -> Database:
    server: Database = request.getfixturevalue(request.param)
    return server


@pytest.fixture(
    params=[
        *("postgres", "postgres15", "mariadb", "nats_server", "pgbouncer"),
        *("redis_server", "rabbitmq_server"),
    ]
)
def private(request: pytest.FixtureRequest) -> Server:
    server: Server = request.getfixturevalue(request.param)
    server.require_private()
    return server


@pytest.fixture
def fresh(database: Database) -> Iterator[str]:
    name = f"fresh_{os.getpid()}"
    yield database.create_database(name)
    database.drop_database(name)


def test_a_fresh_database_is_empty_and_speaks_unicode(database_url: str) -> None:
    if database_url.startswith("sqlite"):
        assert not Path(database_url.removeprefix("sqlite:///")).exists()
        return
    query(database_url, "CREATE TABLE words (word VARCHAR(20))")
    query(database_url, "INSERT INTO words VALUES ('naïve 📮')")
    assert query(database_url, "SELECT word FROM words") == [("naïve 📮",)]


def test_postgres_is_configured_for_us(postgres: PostgresServer) -> None:
    postgres.require_private()
    for setting, value in {
        "wal_level": "logical",
        "max_prepared_transactions": "64",
        "max_connections": "200",
        "server_encoding": "UTF8",
    }.items():
        assert query(postgres.url, f"SHOW {setting}") == [(value,)]
    assert query(postgres.url, "SHOW server_version_num")[0][0].startswith("18")


def test_mariadb_is_configured_for_us(mariadb: MariaDBServer) -> None:
    mariadb.require_private()
    for setting, value in {
        "innodb_flush_log_at_trx_commit": 1,
        "character_set_server": "utf8mb4",
    }.items():
        assert query(mariadb.url, f"SELECT @@{setting}") == [(value,)]


def test_committed_data_survives_a_kill(database: Database, fresh: str) -> None:
    database.require_private()
    query(fresh, "CREATE TABLE facts (fact INTEGER)")
    query(fresh, "INSERT INTO facts VALUES (1)")
    unfinished = connect(fresh)
    cursor = unfinished.cursor()
    cursor.execute("BEGIN")
    cursor.execute("INSERT INTO facts VALUES (2)")
    port, pid = database.port, database.pid

    database.kill()

    assert port_is_free(port)
    with pytest.raises((psycopg.OperationalError, pymysql.OperationalError)):
        cursor.execute("COMMIT")
    unfinished.close()
    with pytest.raises((psycopg.OperationalError, pymysql.OperationalError)):
        connect(fresh)

    database.start()

    assert database.port == port
    assert database.pid != pid
    assert query(fresh, "SELECT fact FROM facts") == [(1,)]


def test_committed_data_survives_a_stop(database: Database, fresh: str) -> None:
    database.require_private()
    query(fresh, "CREATE TABLE facts (fact INTEGER)")
    query(fresh, "INSERT INTO facts VALUES (1)")
    idle = connect(fresh)
    database.stop()
    database.start()
    idle.close()
    assert query(fresh, "SELECT fact FROM facts") == [(1,)]


def test_jetstream_survives_a_kill(nats_server: NatsServer) -> None:
    nats_server.require_private()
    before = exchange(nats_server.url, b"before")
    nats_server.kill()
    assert port_is_free(nats_server.port)
    nats_server.start()
    assert exchange(nats_server.url, b"after") == before + 1


def test_a_paused_server_holds_its_answer_back(private: Server) -> None:
    answered = threading.Event()

    def ask() -> None:
        private.wait_ready()
        answered.set()

    asking = threading.Thread(target=ask)
    with private.paused():
        asking.start()
        assert not answered.wait(0.3)
    assert answered.wait(15)
    asking.join()


def test_a_paused_server_can_be_killed_and_stopped(private: Server) -> None:
    private.pause()
    private.kill()
    private.start()
    private.pause()
    private.stop()
    private.start()
    private.wait_ready()


class TestMending:
    """What one test breaks is whole for the next. The order of these two matters."""

    def test_leaves_the_server_dead(self, private: Server) -> None:
        private.kill()

    def test_finds_it_alive(self, private: Server) -> None:
        private.wait_ready(timeout=1)


def test_postgres_dies_with_its_children(postgres: PostgresServer) -> None:
    postgres.require_private()
    pids = [pid for (pid,) in query(postgres.url, "SELECT pid FROM pg_stat_activity")]
    assert len(pids) > 3
    postgres.kill()
    # A zombie is dead too, and its burial is up to the machine's first process.
    for pid in pids:
        status = Path(f"/proc/{pid}/status")
        assert not status.exists() or "State:\tZ" in status.read_text()


@pytest.mark.parametrize("fixture", ["postgres", "postgres15"])
def test_a_postgres_database_in_doubt_is_dropped(
    request: pytest.FixtureRequest, fixture: str
) -> None:
    server: PostgresServer = request.getfixturevalue(fixture)
    url = server.create_database("in_doubt")
    query(url, "CREATE TABLE facts (fact INTEGER)")
    query(url, "SELECT pg_create_logical_replication_slot('watcher', 'test_decoding')")
    with connect(url) as connection:
        connection.autocommit = False
        connection.execute("INSERT INTO facts VALUES (1)")
        connection.execute("PREPARE TRANSACTION 'it''s open'")
    connected = connect(url)
    server.drop_database("in_doubt")
    server.drop_database("in_doubt")
    connected.close()
    found = query(server.url, "SELECT count(*) FROM pg_database WHERE datname = 'in_doubt'")
    assert found == [(0,)]


def test_a_mariadb_database_in_doubt_is_dropped(mariadb: MariaDBServer) -> None:
    mariadb.require_private()
    url = mariadb.create_database("in_doubt")
    query(url, "CREATE TABLE facts (fact INTEGER)")
    connection = connect(url)
    cursor = connection.cursor()
    for statement in (
        "XA START 'one', 'part'",
        "INSERT INTO facts VALUES (1)",
        "XA END 'one', 'part'",
        "XA PREPARE 'one', 'part'",
    ):
        cursor.execute(statement)
    mariadb.drop_database("in_doubt")
    mariadb.drop_database("in_doubt")
    assert query(mariadb.url, "XA RECOVER") == []
    with pytest.raises(pymysql.OperationalError):
        cursor.execute("SELECT 1")
    connection.close()


def test_a_server_outlives_the_thread_that_started_it(private: Server) -> None:
    private.kill()
    starting = threading.Thread(target=private.start)
    starting.start()
    starting.join()
    private.wait_ready(timeout=2)


ORPHANS = """
import sys
sys.path.insert(0, {tests!r})
from servers import MariaDBServer, NatsServer, PostgresServer, RabbitMQServer, RedisServer
server = {make}
server.start()
{then}
print(server.pid, server.port, server.directory, flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no parent-death signal")
@pytest.mark.parametrize("then", ["pass", "server.pause()"], ids=["running", "paused"])
@pytest.mark.parametrize(
    ("fixture", "make"),
    [
        ("postgres", "PostgresServer(fsync=False)"),
        ("mariadb", "MariaDBServer(fsync=False)"),
        ("nats_server", "NatsServer()"),
        ("redis_server", "RedisServer(fsync=False)"),
        ("rabbitmq_server", "RabbitMQServer(fsync=False)"),
    ],
)
def test_servers_die_with_the_test_process(
    request: pytest.FixtureRequest, fixture: str, make: str, then: str
) -> None:
    request.getfixturevalue(fixture).require_private()
    script = ORPHANS.format(tests=str(Path(__file__).parent), make=make, then=then)
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        _, port, directory = process.stdout.readline().split()
        assert not port_is_free(int(port))
        process.kill()
    eventually(lambda: port_is_free(int(port)))
    eventually(lambda: not _processes_with(directory))
    # The next run would do it, or is just doing it; but memory is dear.
    shutil.rmtree(Path(directory).parent, ignore_errors=True)


def _processes_with(text: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command = (path / "cmdline").read_bytes() + os.fsencode(os.readlink(path / "cwd"))
        except OSError:
            continue
        if os.fsencode(text) in command:
            found.append(path.name)
    return found


def test_somebody_elses_server_is_not_ours_to_kill(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = PostgresServer(url=postgres.url)
    elsewhere.start()
    url = elsewhere.create_database("elsewhere")
    assert query(url, "SELECT 1") == [(1,)]
    elsewhere.drop_database("elsewhere")
    monkeypatch.delenv("POSTROOM_REQUIRE", raising=False)
    with pytest.raises(pytest.skip.Exception, match="cannot be killed"):
        elsewhere.require_private()
    monkeypatch.setenv("POSTROOM_REQUIRE", "all")
    with pytest.raises(pytest.fail.Exception, match="cannot be killed"):
        elsewhere.require_private()
    with pytest.raises(RuntimeError):
        elsewhere.kill()
    with pytest.raises(RuntimeError):
        elsewhere.pause()
    elsewhere.close()
    postgres.wait_ready(timeout=1)


def test_what_is_missing_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unavailable, match="apt-get install postgresql-9"):
        PostgresServer(version=9)
    monkeypatch.delenv("POSTROOM_REQUIRE", raising=False)
    with pytest.raises(pytest.skip.Exception, match="buy one") as skipped:
        leave_out("there is no oracle: buy one")

    class Report:
        longrepr = ("test_it.py", 1, f"Skipped: {skipped.value.msg}")

    assert left_out([Report, Report]) == {"there is no oracle: buy one": 2}


def test_a_start_that_fails_shows_the_log() -> None:
    server = PostgresServer(fsync=False, settings={"wal_level": "sideways"})
    with pytest.raises(RuntimeError, match="invalid value for parameter"):
        server.start()
    server.close()


@pytest.fixture
def echo() -> Iterator[str]:
    """A server that answers every line with the same line."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer(connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(65536):
                    connection.sendall(data)
            except OSError:
                pass  # reset, as the tests intend

    def welcome() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    threading.Thread(target=welcome, daemon=True).start()
    yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


@pytest.fixture
def proxy(echo: str) -> Iterator[ChaosProxy]:
    with ChaosProxy(echo) as proxy:
        yield proxy


@pytest.fixture
def client(proxy: ChaosProxy) -> Iterator[socket.socket]:
    with dial(proxy) as client:
        yield client


def dial(proxy: ChaosProxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=5)


def echoed(client: socket.socket, data: bytes) -> bytes:
    client.sendall(data)
    return client.recv(65536)


def test_proxy_forwards(proxy: ChaosProxy, client: socket.socket) -> None:
    assert echoed(client, b"hello") == b"hello"
    assert proxy.connections == 1


def test_proxy_cuts(proxy: ChaosProxy, client: socket.socket) -> None:
    assert echoed(client, b"hello") == b"hello"
    assert proxy.cut() == 1
    with pytest.raises(ConnectionResetError):
        client.recv(1)
    with dial(proxy) as again:
        assert echoed(again, b"again") == b"again"


def test_proxy_refuses_and_accepts(proxy: ChaosProxy, client: socket.socket) -> None:
    assert echoed(client, b"hello") == b"hello"
    proxy.refuse()
    with pytest.raises(ConnectionRefusedError):
        dial(proxy)
    assert echoed(client, b"still here") == b"still here"
    proxy.accept()
    with dial(proxy) as again:
        assert echoed(again, b"again") == b"again"


@pytest.mark.parametrize("direction", ["to_server", "to_client"])
def test_proxy_freezes_one_direction(
    proxy: ChaosProxy, client: socket.socket, direction: Any
) -> None:
    assert echoed(client, b"hello") == b"hello"
    proxy.freeze(direction)
    client.settimeout(0.2)
    with pytest.raises(TimeoutError):
        echoed(client, b"slow")
    proxy.thaw()
    client.settimeout(5)
    assert client.recv(65536) == b"slow"


def test_proxy_loses_the_next_reply(proxy: ChaosProxy, client: socket.socket) -> None:
    loss = proxy.lose_reply()
    with pytest.raises(ConnectionResetError):
        echoed(client, b"hello")
    loss.wait()
    with dial(proxy) as again:
        assert echoed(again, b"only one is lost") == b"only one is lost"


def test_proxy_loses_the_rest_of_a_reply(proxy: ChaosProxy, client: socket.socket) -> None:
    proxy.lose_reply(after=4)
    assert echoed(client, b"half a word") == b"half"
    with pytest.raises(ConnectionResetError):
        client.recv(1)


def test_proxy_loses_the_reply_to_one_request(proxy: ChaosProxy, client: socket.socket) -> None:
    assert echoed(client, b"COMMIT") == b"COMMIT"
    loss = proxy.lose_reply(to=b"COMMIT")
    with dial(proxy) as other:
        assert echoed(client, b"BEGIN") == b"BEGIN"
        assert echoed(client, b"COM") == b"COM"
        assert not loss.happened
        with pytest.raises(ConnectionResetError):
            echoed(client, b"MIT")
        assert loss.happened
        assert echoed(other, b"unharmed") == b"unharmed"


def test_proxy_loses_the_reply_with_certain_bytes(proxy: ChaosProxy, client: socket.socket) -> None:
    proxy.lose_reply(containing=b"receipt")
    assert echoed(client, b"ping") == b"ping"
    with pytest.raises(ConnectionResetError):
        echoed(client, b"a receipt")


def test_proxy_resets_the_client_of_a_dead_server(nats_server: NatsServer) -> None:
    nats_server.require_private()
    with ChaosProxy(nats_server.url) as proxy:
        assert exchange(proxy.url, b"through the proxy") > 0
        nats_server.kill()
        with pytest.raises(ConnectionResetError), dial(proxy) as client:
            client.recv(1)
        nats_server.start()
        assert exchange(proxy.url, b"again") > 0


def test_a_commit_whose_reply_is_lost_is_committed(database: Database, fresh: str) -> None:
    query(fresh, "CREATE TABLE facts (fact INTEGER)")
    with ChaosProxy(database.url) as proxy:
        connection = connect(proxy.through(fresh))
        cursor = connection.cursor()
        cursor.execute("BEGIN")
        cursor.execute("INSERT INTO facts VALUES (1)")
        loss = proxy.lose_reply(to=b"COMMIT")
        with pytest.raises((psycopg.OperationalError, pymysql.OperationalError)):
            cursor.execute("COMMIT")
        assert loss.happened
        connection.close()
    assert query(fresh, "SELECT fact FROM facts") == [(1,)]


def test_eventually() -> None:
    answers = iter([0, 0, 7])
    assert eventually(lambda: next(answers), interval=0) == 7
    with pytest.raises(AssertionError, match=r"not within 0.01 s; last: \[\]"):
        eventually(list, timeout=0.01, interval=0)

    def refuse() -> bool:
        raise OSError("refused")

    with pytest.raises(OSError, match="refused"):
        eventually(refuse)
    with pytest.raises(AssertionError, match="refused"):
        eventually(refuse, timeout=0.01, retry=(OSError,))


async def test_eventually_async() -> None:
    answers = iter([0, 7, 0, 8])

    async def check() -> int:
        return next(answers)

    assert await eventually_async(check, interval=0) == 7
    assert await eventually_async(lambda: next(answers), interval=0) == 8
    started = time.perf_counter()
    with pytest.raises(AssertionError, match="last: None"):
        await eventually_async(lambda: None, timeout=0.05)
    assert time.perf_counter() - started < 5
