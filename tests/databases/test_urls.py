"""Every form of database URL connects to a real server; a wrong one is one clear sentence."""

import asyncio
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pymysql
import pytest
from sqlalchemy.exc import StatementError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from postroom.databases import urls
from postroom.databases.trouble import explain, not_of_it
from postroom.databases.urls import Target, resolve
from postroom.errors import ConfigurationError, MissingDriver, PostroomError
from servers import MariaDBServer, PostgresServer, Unavailable, leave_out


async def ask(url: str, question: str = "SELECT 1") -> Any:
    """Connect as the relay would, and give the first answer; errors are explained."""
    target = resolve(url)
    engine = create_async_engine(target.url, poolclass=NullPool, connect_args=target.connect_args)
    try:
        async with engine.connect() as connection:
            return (await connection.exec_driver_sql(question)).scalar()
    except Exception as error:
        if not_of_it(error) is not None:
            raise AssertionError("it is the database's own") from error
        raise explain(error, target) from error
    finally:
        await engine.dispose()


def only(monkeypatch: pytest.MonkeyPatch, *drivers: str) -> None:
    """Pretend that of all drivers only these are installed."""
    monkeypatch.setattr(urls, "find_spec", lambda name: True if name in drivers else None)


# PostgreSQL.

POSTGRES_SCHEMES = [
    "postgres",
    "postgresql",
    "postgresql+psycopg2",
    "postgresql+psycopg",
    "postgresql+psycopg_async",
    "postgresql+asyncpg",
]


def _with_scheme(url: str, scheme: str) -> str:
    return f"{scheme}://{url.partition('://')[2]}"


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
@pytest.mark.parametrize("scheme", POSTGRES_SCHEMES)
async def test_postgresql_schemes(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch, scheme: str, driver: str
) -> None:
    only(monkeypatch, driver)
    url = _with_scheme(postgres.url, scheme)
    assert resolve(url).url.drivername == f"postgresql+{driver}"
    assert await ask(url) == 1


def test_named_async_driver_is_used() -> None:
    assert resolve("postgres://h/d").url.drivername == "postgresql+asyncpg"
    assert resolve("postgresql+psycopg://h/d").url.drivername == "postgresql+psycopg"
    assert resolve("mysql://h/d").url.drivername == "mysql+asyncmy"
    assert resolve("mariadb+aiomysql://h/d").url.drivername == "mysql+aiomysql"


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
@pytest.mark.parametrize(
    ("options", "question", "answer"),
    [
        ("application_name=billing", "SHOW application_name", "billing"),
        ("fallback_application_name=billing", "SHOW application_name", "billing"),
        ("options=-csearch_path%3Dshop", "SHOW search_path", "shop"),
        ("options=-c%20search_path%3Dshop%20-c%20work_mem%3D5MB", "SHOW work_mem", "5MB"),
        ("sslmode=disable", "SELECT 1", 1),
        ("sslmode=allow", "SELECT 1", 1),
        ("sslmode=prefer", "SELECT 1", 1),
        ("connect_timeout=3&target_session_attrs=read-write", "SELECT 1", 1),
        ("connect_timeout=0", "SELECT 1", 1),
        ("client_encoding=latin1", "SHOW client_encoding", "UTF8"),
        ("keepalives=1&keepalives_idle=30&gssencmode=disable", "SELECT 1", 1),
        ("channel_binding=prefer", "SELECT 1", 1),
        ("prepared_statement_cache_size=0&statement_cache_size=0", "SELECT 1", 1),
    ],
)
async def test_postgresql_options(
    postgres: PostgresServer,
    monkeypatch: pytest.MonkeyPatch,
    driver: str,
    options: str,
    question: str,
    answer: object,
) -> None:
    only(monkeypatch, driver)
    got = await ask(f"{postgres.url}?{options}", question)
    assert str(got).upper() == str(answer).upper()


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_postgresql_addresses(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch, driver: str
) -> None:
    only(monkeypatch, driver)
    if not postgres.private:
        leave_out("the address of somebody else's PostgreSQL is not ours to take apart")
    port, dead = postgres.port, 1
    for url in (
        f"postgres://postgres@localhost:{port}/postgres",
        f"postgres:///postgres?host=127.0.0.1&port={port}&user=postgres",
        f"postgres://postgres@/postgres?host=127.0.0.1:{port}",
        f"postgres:///?dbname=postgres&host=127.0.0.1&port={port}&user=postgres&password=x",
        f"postgres://postgres@127.0.0.1:{dead},127.0.0.1:{port}/postgres",
        f"postgres://postgres@/postgres?host=127.0.0.1,127.0.0.1&port={dead},{port}",
        f"postgres://postgres@/postgres?host=127.0.0.1:{dead}&host=127.0.0.1:{port}",
        f"postgres://postgres@127.0.0.1,localhost/postgres?port={port}",
    ):
        assert await ask(url, "SELECT current_user") == "postgres", url


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`ca.pem`, and `server.pem` with `server.key` for localhost."""
    if shutil.which("openssl") is None:
        leave_out("there is no openssl to make certificates")
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    for name in ("ca", "other"):
        openssl(
            *f"req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN={name}".split(),
            *f"-keyout {name}.key -out {name}.pem".split(),
        )
    subject = "-subj /CN=localhost -addext subjectAltName=DNS:localhost"
    openssl(*f"req -newkey rsa:2048 -nodes -keyout server.key -out server.csr {subject}".split())
    signed = "-CA ca.pem -CAkey ca.key -CAcreateserial -copy_extensions copy"
    openssl(*f"x509 -req -in server.csr -days 2 -out server.pem {signed}".split())
    return folder


def _server_copy(certificates: Path, directory: Path) -> Path:
    """The server's key where only the server's own account can read it."""
    folder = directory / "tls"
    folder.mkdir()
    for name in ("ca.pem", "server.pem", "server.key"):
        (folder / name).write_bytes((certificates / name).read_bytes())
        (folder / name).chmod(0o600)
    owner = directory.stat()
    for path in (folder, *folder.iterdir()):
        shutil.chown(path, owner.st_uid, owner.st_gid)
    return folder


@pytest.fixture(scope="module")
def guarded_postgres(certificates: Path) -> Iterator[PostgresServer]:
    """A PostgreSQL with TLS and a socket in its directory."""
    try:
        server = PostgresServer(version=15, fsync=False)  # the wheel's is built without TLS
    except Unavailable as error:
        leave_out(str(error))
    tls = _server_copy(certificates, server.directory)
    server.settings |= {
        "ssl": "on",
        "ssl_cert_file": str(tls / "server.pem"),
        "ssl_key_file": str(tls / "server.key"),
        "unix_socket_directories": str(server.directory),
    }
    with server:
        yield server


TLS_IN_USE = "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()"


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_postgresql_tls(
    guarded_postgres: PostgresServer,
    certificates: Path,
    monkeypatch: pytest.MonkeyPatch,
    driver: str,
) -> None:
    only(monkeypatch, driver)
    base = f"postgres://postgres@localhost:{guarded_postgres.port}/postgres"
    ca, other = certificates / "ca.pem", certificates / "other.pem"
    assert await ask(f"{base}?sslmode=disable", TLS_IN_USE) is False
    for options in (
        "sslmode=prefer",
        "sslmode=require",
        "ssl=true",
        "ssl=require",
        f"sslmode=require&sslrootcert={ca}",
        f"sslmode=verify-ca&sslrootcert={ca}",
        f"sslmode=verify-full&sslrootcert={ca}",
    ):
        assert await ask(f"{base}?{options}", TLS_IN_USE) is True, options
    by_number = base.replace("localhost", "127.0.0.1")
    assert await ask(f"{by_number}?sslmode=verify-ca&sslrootcert={ca}", TLS_IN_USE) is True
    for url in (
        f"{base}?sslmode=verify-full&sslrootcert={other}",
        f"{by_number}?sslmode=verify-full&sslrootcert={ca}",
        f"{base}?sslmode=verify-full&sslrootcert=system",
    ):
        with pytest.raises(ConfigurationError, match="TLS"):
            await ask(url)


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_postgresql_socket(
    guarded_postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch, driver: str
) -> None:
    only(monkeypatch, driver)
    folder, port = guarded_postgres.directory, guarded_postgres.port
    encoded = str(folder).replace("/", "%2F")
    for url in (
        f"postgres://postgres@/postgres?host={folder}&port={port}",
        f"postgres://postgres@:{port}/postgres?host={folder}",
        f"postgres://postgres@{encoded}:{port}/postgres",
    ):
        assert await ask(url, "SELECT inet_server_port()") is None, url


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_tls_that_the_server_lacks(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch, driver: str
) -> None:
    only(monkeypatch, driver)
    with pytest.raises(ConfigurationError, match="does not offer TLS"):
        await ask(f"{postgres.url}?sslmode=require")


def test_protection_is_never_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "postgres://u:hunter22@h/d?channel_binding=require"
    assert resolve(url).url.drivername == "postgresql+psycopg"
    only(monkeypatch, "asyncpg")
    with pytest.raises(MissingDriver, match=r"channel_binding.*pip install 'postroom\[psycopg\]'"):
        resolve(url)
    only(monkeypatch, "aiomysql")
    with pytest.raises(MissingDriver, match=r"TLS.*pip install 'postroom\[mysql\]'"):
        resolve("mysql://u:hunter22@h/d?ssl_mode=REQUIRED")


# MariaDB.


@pytest.mark.parametrize("driver", ["asyncmy", "aiomysql"])
@pytest.mark.parametrize(
    "scheme",
    [
        f"{base}{suffix}"
        for base in ("mysql", "mariadb")
        for suffix in ("", "+pymysql", "+mysqldb", "+mysqlclient", "+aiomysql", "+asyncmy")
    ],
)
async def test_mysql_schemes(
    mariadb: MariaDBServer, monkeypatch: pytest.MonkeyPatch, scheme: str, driver: str
) -> None:
    only(monkeypatch, driver)
    url = _with_scheme(mariadb.url, scheme)
    assert resolve(url).url.drivername == f"mysql+{driver}"
    assert await ask(url) == 1


@pytest.mark.parametrize("driver", ["asyncmy", "aiomysql"])
@pytest.mark.parametrize(
    ("options", "question", "answer"),
    [
        ("charset=latin1", "SELECT @@character_set_client", "utf8mb4"),
        ("charset=utf8mb4&use_unicode=1", "SELECT '🐌'", "🐌"),
        ("connect_timeout=3&read_timeout=5&write_timeout=5", "SELECT 1", 1),
        ("init_command=SET%20@town%3D%27Bern%27", "SELECT @town", "Bern"),
        ("sql_mode=ANSI_QUOTES", "SELECT @@sql_mode", "ANSI_QUOTES"),
        ("autocommit=true&local_infile=0", "SELECT 1", 1),
        ("ssl_mode=DISABLED", "SELECT 1", 1),
        ("ssl-mode=preferred", "SELECT 1", 1),
        ("ssl_disabled=true", "SELECT 1", 1),
    ],
)
async def test_mysql_options(
    mariadb: MariaDBServer,
    monkeypatch: pytest.MonkeyPatch,
    driver: str,
    options: str,
    question: str,
    answer: object,
) -> None:
    only(monkeypatch, driver)
    assert await ask(f"{mariadb.url}?{options}", question) == answer


@pytest.mark.parametrize("driver", ["asyncmy", "aiomysql"])
async def test_passwords_of_every_kind(
    mariadb: MariaDBServer, monkeypatch: pytest.MonkeyPatch, driver: str
) -> None:
    only(monkeypatch, driver)
    user = f"u_{uuid.uuid4().hex[:8]}"
    with mariadb._connect() as admin, admin.cursor() as cursor:
        cursor.execute(f"CREATE USER {user}@'%%' IDENTIFIED BY %s", ("p@:/?#% ö&=",))
        base = mariadb.url.replace("postroom:postroom@", f"{user}:%s@").replace(
            "/postroom", "/mysql"
        )
        cursor.execute(f"GRANT SELECT ON mysql.* TO {user}@'%'")
        assert await ask(base % "p%40:/?#%25 ö&=") == 1
        assert await ask(base % "p%40%3A%2F%3F%23%25%20%C3%B6%26%3D") == 1
        cursor.execute(f"DROP USER {user}@'%'")


@pytest.fixture(scope="module")
def guarded_mariadb(certificates: Path) -> Iterator[MariaDBServer]:
    try:
        server = MariaDBServer(fsync=False)
    except Unavailable as error:
        leave_out(str(error))
    tls = _server_copy(certificates, server.directory)
    server.settings |= {
        "ssl-ca": str(tls / "ca.pem"),
        "ssl-cert": str(tls / "server.pem"),
        "ssl-key": str(tls / "server.key"),
    }
    with server:
        yield server


async def test_mysql_tls(guarded_mariadb: MariaDBServer, certificates: Path) -> None:
    base = guarded_mariadb.url.replace("127.0.0.1", "localhost")
    ca, other = certificates / "ca.pem", certificates / "other.pem"
    cipher = "SELECT variable_value <> '' FROM information_schema.session_status"
    cipher += " WHERE variable_name = 'Ssl_cipher'"
    assert await ask(base, cipher) == 0
    for options in (
        "ssl=true",
        "ssl_mode=REQUIRED",
        "ssl-mode=REQUIRED",
        f"ssl_ca={ca}",
        f"ssl_ca={ca}&ssl_check_hostname=false",
        f"ssl_mode=VERIFY_CA&ssl_ca={ca}",
        f"ssl_mode=VERIFY_IDENTITY&ssl_ca={ca}",
        f"ssl_ca={ca}&ssl_verify_cert=true&ssl_verify_identity=true",
    ):
        assert await ask(f"{base}?{options}", cipher) == 1, options
    by_number = guarded_mariadb.url
    assert await ask(f"{by_number}?ssl_mode=VERIFY_CA&ssl_ca={ca}", cipher) == 1
    for url in (
        f"{base}?ssl_ca={other}",
        f"{base}?ssl_verify_cert=true",
        f"{by_number}?ssl_mode=VERIFY_IDENTITY&ssl_ca={ca}",
    ):
        with pytest.raises(ConfigurationError, match="TLS"):
            await ask(url)


@pytest.mark.parametrize("driver", ["asyncmy", "aiomysql"])
async def test_mysql_socket(
    guarded_mariadb: MariaDBServer, monkeypatch: pytest.MonkeyPatch, driver: str
) -> None:
    only(monkeypatch, driver)
    socket = guarded_mariadb.directory / "socket"
    url = f"mysql://postroom:postroom@/postroom?unix_socket={socket}"
    assert str(await ask(url, "SELECT user()")) == "postroom@localhost"


# SQLite.


@pytest.mark.parametrize("scheme", ["sqlite", "sqlite+aiosqlite", "sqlite+pysqlite"])
async def test_sqlite(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await ask(f"{scheme}:///{tmp_path}/absolute.db", "PRAGMA user_version") == 0
    assert (tmp_path / "absolute.db").exists()
    monkeypatch.chdir(tmp_path)
    await ask(f"{scheme}:///relative.db?timeout=3&check_same_thread=false", "PRAGMA user_version")
    assert (tmp_path / "relative.db").exists()
    url = f"{scheme}:///file:{tmp_path}/absolute.db?mode=ro&uri=true"
    assert await ask(url, "PRAGMA query_only") == 0


# What cannot work, and what must stay secret.

WRONG = {
    "": "not a URL",
    "localhost/app": "not a URL",
    "hunter22": "not a URL",
    "oracle://u:hunter22@h/d": "oracle:// is not a database",
    "http://h/d": "http:// is not a database",
    "postgresql+pg8000://u:hunter22@h/d": "pg8000",
    "mysql+mariadbconnector://u:hunter22@h/d": "mariadbconnector",
    "postgres://u:hunter22@x@h/d": "more than one @",
    "postgres://u:hunter22@h:port/d": "host:port",
    "postgres://h:99999/d": "host:port",
    "postgres://u:hunter22@h/d?sslmode=strict": "sslmode must be one of",
    "postgres://u:hunter22@h/d?sslmode=verify-ca&sslrootcert=/no/file": "sslrootcert",
    "postgres://u:hunter22@h/d?sslmode=require&sslrootcert=system": "verify-full",
    "postgres://u:hunter22@h/d?connect_timeout=soon": "connect_timeout",
    "postgres://u:hunter22@h/d?colour=red": "colour is not an option",
    "postgres://a,b/d?port=1,2,3": "port",
    "postgres://a/d?port=x": "port",
    "mysql://u:hunter22@h": "names no database",
    "mysql://u:hunter22@a,b/d": "one host",
    "mysql://u:hunter22@h/d?ssl_mode=some": "ssl_mode",
    "mysql://u:hunter22@h/d?ssl_ca=/no/file": "ssl_ca",
    "mysql://u:hunter22@h/d?colour=red": "colour is not an option",
    "sqlite://": "in-memory",
    "sqlite:///": "in-memory",
    "sqlite:///:memory:": "in-memory",
    "sqlite:///file:x?mode=memory&uri=true": "in-memory",
    "sqlite://app.db": "third slash",
    "sqlite:///app.db?colour=red": "colour is not an option",
}


@pytest.mark.parametrize("url", WRONG)
def test_wrong_urls(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        resolve(url)
    sentence = str(caught.value)
    assert WRONG[url] in sentence
    assert "\n" not in sentence
    assert "hunter22" not in sentence


@pytest.mark.parametrize(
    ("url", "extra"),
    [("postgres://u:hunter22@h/d", "asyncpg"), ("mysql://u:hunter22@h/d", "mysql")],
)
def test_missing_driver(monkeypatch: pytest.MonkeyPatch, url: str, extra: str) -> None:
    only(monkeypatch)
    with pytest.raises(MissingDriver, match=rf"pip install 'postroom\[{extra}\]'") as caught:
        resolve(url)
    assert "hunter22" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "postgres://u:hunter22@h:5433/d?sslpassword=hunter22&passfile=hunter22",
        "postgres://u@h:5433/d?password=hunter22",
        "mysql://u:hunter22@h/d?init_command=hunter22",
    ],
)
def test_target_shows_no_secret(url: str) -> None:
    target = resolve(url)
    assert "hunter22" not in f"{target} {target!r} {target.safe} {target.url!r}"
    assert target.safe.startswith(("postgresql://u@h:5433/d", "mysql://u@h/d"))


# What goes wrong when connecting.


async def _trouble(url: str, question: str = "SELECT 1") -> PostroomError:
    with pytest.raises(PostroomError) as caught:
        await ask(url, question)
    assert "\n" not in str(caught.value)
    assert "hunter22" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("scheme", "ours"),
    [
        ("postgresql+asyncpg", "postgres"),
        ("postgresql+psycopg", "postgres"),
        ("mysql+asyncmy", "mariadb"),
        ("mysql+aiomysql", "mariadb"),
    ],
)
async def test_trouble(request: pytest.FixtureRequest, scheme: str, ours: str) -> None:
    server: PostgresServer | MariaDBServer = request.getfixturevalue(ours)
    url = _with_scheme(server.url, scheme)

    def kind(error: PostroomError) -> str:
        return f"{type(error).__name__}: {error}"

    refused = kind(await _trouble(f"{scheme}://u:hunter22@127.0.0.1:1/d?connect_timeout=5"))
    assert refused.startswith("Unreachable: Nothing listens at")
    unknown = kind(await _trouble(f"{scheme}://u:hunter22@no-such-host.invalid/d"))
    assert unknown.startswith("Unreachable: The host name of")
    no_database = kind(await _trouble(url.rpartition("/")[0] + "/no_such_database"))
    assert no_database.startswith("ConfigurationError: The server has no such database")
    prefix = "postroom." if ours == "postgres" else "postroom_"
    no_table = kind(await _trouble(url, f"SELECT * FROM {prefix}outbox"))
    assert no_table.startswith("SchemaError: Postroom's tables are not in")
    assert "run `postroom db install`" in no_table
    nonsense = kind(await _trouble(url, "SELEC 'password=hunter22'"))
    assert nonsense.startswith("PostroomError:")
    if ours == "mariadb":
        denied = kind(await _trouble(url.replace("postroom:postroom@", "postroom:hunter22@")))
        assert denied.startswith("ConfigurationError:")
        assert "refused the user name or password" in denied
    else:
        denied = kind(await _trouble(url.replace("postgres@", "nobody@")))
        assert "refused the user name or password" in denied
        read_only = f"{url}?options=-cdefault_transaction_read_only%3Don"
        assert "read-only" in kind(await _trouble(read_only, "CREATE TABLE x (y int)"))
        primary = f"{read_only}&target_session_attrs=read-write"
        assert "read-only" in kind(await _trouble(primary))


async def test_silent_server_is_given_up(postgres: PostgresServer, mariadb: MariaDBServer) -> None:
    postgres.require_private()
    mariadb.require_private()
    for server, schemes in (
        (postgres, ("postgresql+asyncpg", "postgresql+psycopg")),
        (mariadb, ("mysql+asyncmy", "mysql+aiomysql")),
    ):
        with server.paused():
            for scheme in schemes:
                url = _with_scheme(server.url, scheme) + "?connect_timeout=2"
                assert "did not answer in time" in str(await _trouble(url)), scheme


async def test_trouble_with_files(tmp_path: Path) -> None:
    no_directory = await _trouble(f"sqlite:///{tmp_path}/no/such.db", "PRAGMA user_version")
    assert "cannot be opened" in str(no_directory)
    text = tmp_path / "text.db"
    text.write_text("this is not a database, but it is long enough to look like one" * 20)
    not_sqlite = await _trouble(f"sqlite:///{text}", "SELECT * FROM x")
    assert "not a SQLite database" in str(not_sqlite)
    no_table = await _trouble(f"sqlite:///{tmp_path}/new.db", "SELECT * FROM postroom_outbox")
    assert "postroom db install" in str(no_table)


def test_raw_errors_are_explained_too() -> None:
    target = Target("mysql", resolve("mysql://u:hunter22@h/d").url, {}, "mysql://u@h/d")
    lost = explain(pymysql.err.OperationalError(2013, "Lost connection (hunter22)"), target)
    assert str(lost) == "The connection to mysql://u@h/d was lost."
    odd = explain(RuntimeError("something with hunter22\nand a second line"), target)
    assert str(odd) == "mysql://u@h/d answered: something with ***."
    missing = explain(ModuleNotFoundError("No module named 'asyncmy'"), target)
    assert isinstance(missing, MissingDriver)
    ours = ConfigurationError("ours")
    assert explain(ours, target) is ours


def test_what_breaks_in_is_no_error_of_a_database() -> None:
    class TimeLimit(Exception):
        """As of a task queue, which raises it by a signal."""

    limit = TimeLimit()
    assert not_of_it(limit) is limit
    assert not_of_it(StatementError("", "SELECT 1", {}, limit)) is limit
    closed = RuntimeError("unable to perform operation on <TCPTransport closed=True>")
    for theirs in (closed, TimeoutError(), asyncio.IncompleteReadError(b"", 4), EOFError()):
        assert not_of_it(theirs) is None


def test_a_file_that_does_not_answer_is_locked(tmp_path: Path) -> None:
    said = str(explain(TimeoutError(), resolve(f"sqlite:///{tmp_path}/app.db")))
    assert "not to be had in time" in said
    assert "firewall" not in said
