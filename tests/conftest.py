"""Servers for all tests: started when a test first asks, one of each for the whole run."""

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from planted import plant_chosen
from postroom import signals
from servers import (
    KafkaServer,
    MariaDBServer,
    MotoServer,
    NatsServer,
    PgBouncerServer,
    PostgresServer,
    RabbitMQServer,
    RedisServer,
    Server,
    Unavailable,
    WebhookServer,
    leave_out,
    left_out,
)
from stages import Stages

S = TypeVar("S", bound=Server)

_started = pytest.StashKey[list[Server]]()

signals.check_fields()
plant_chosen()


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """Leave no setting behind for the next test: commands set variables for what they start."""
    before = _settings()
    yield
    for name in _settings():
        del os.environ[name]
    os.environ.update(before)


def _settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("POSTROOM_")}


def _serve(config: pytest.Config, variable: str, make: Callable[[str | None], S]) -> Iterator[S]:
    try:
        server = make(os.environ.get(variable) or None)
    except Unavailable as error:
        leave_out(str(error))
    with server:
        started = config.stash.setdefault(_started, [])
        started.append(server)
        yield server
        started.remove(server)


# A kill of the server loses nothing without fsync: the operating system still holds the pages.


@pytest.fixture(scope="session")
def postgres(pytestconfig: pytest.Config) -> Iterator[PostgresServer]:
    yield from _serve(
        pytestconfig,
        "POSTROOM_TEST_POSTGRES_URL",
        lambda url: PostgresServer(fsync=False, url=url),
    )


@pytest.fixture(scope="session")
def postgres15(pytestconfig: pytest.Config) -> Iterator[PostgresServer]:
    yield from _serve(
        pytestconfig,
        "POSTROOM_TEST_POSTGRES15_URL",
        lambda url: PostgresServer(version=15, fsync=False, url=url),
    )


@pytest.fixture(scope="session")
def mariadb(pytestconfig: pytest.Config) -> Iterator[MariaDBServer]:
    yield from _serve(
        pytestconfig,
        "POSTROOM_TEST_MARIADB_URL",
        lambda url: MariaDBServer(fsync=False, url=url),
    )


@pytest.fixture(scope="session")
def pgbouncer(pytestconfig: pytest.Config, postgres: PostgresServer) -> Iterator[PgBouncerServer]:
    """In transaction mode, before `postgres`."""
    yield from _serve(
        pytestconfig,
        "POSTROOM_TEST_PGBOUNCER_URL",
        lambda url: PgBouncerServer(postgres, url=url),
    )


@pytest.fixture(scope="session")
def nats_server(pytestconfig: pytest.Config) -> Iterator[NatsServer]:
    yield from _serve(
        pytestconfig,
        "POSTROOM_TEST_NATS_URL",
        lambda url: NatsServer(url=url),
    )


@pytest.fixture(scope="session")
def kafka_server(pytestconfig: pytest.Config) -> Iterator[KafkaServer]:
    yield from _serve(
        pytestconfig,
        "POSTROOM_TEST_KAFKA_URL",
        lambda url: KafkaServer(url=url),
    )


@pytest.fixture(scope="session")
def redis_server(pytestconfig: pytest.Config) -> Iterator[RedisServer]:
    yield from _serve(
        pytestconfig,
        "POSTROOM_TEST_REDIS_URL",
        lambda url: RedisServer(fsync=False, url=url),
    )


@pytest.fixture(scope="session")
def rabbitmq_server(pytestconfig: pytest.Config) -> Iterator[RabbitMQServer]:
    yield from _serve(
        pytestconfig,
        "POSTROOM_TEST_RABBITMQ_URL",
        lambda url: RabbitMQServer(fsync=False, url=url),
    )


@pytest.fixture(scope="session")
def moto_server(pytestconfig: pytest.Config) -> Iterator[MotoServer]:
    """SQS, SNS and STS."""
    yield from _serve(
        pytestconfig,
        "POSTROOM_TEST_AWS_URL",
        lambda url: MotoServer(url=url),
    )


@pytest.fixture(scope="session")
def webhook_server(pytestconfig: pytest.Config) -> Iterator[WebhookServer]:
    yield from _serve(pytestconfig, "", lambda _: WebhookServer())


@pytest.fixture(scope="session")
def webhook_tls_server(pytestconfig: pytest.Config) -> Iterator[WebhookServer]:
    yield from _serve(pytestconfig, "", lambda _: WebhookServer(tls=True))


@pytest.fixture(params=["postgresql", "mariadb", "sqlite"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a fresh, empty database: the test runs once on each kind."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'postroom.db'}"
        return
    fixture = {"postgresql": "postgres", "mariadb": "mariadb"}[request.param]
    server: PostgresServer | MariaDBServer = request.getfixturevalue(fixture)
    name = f"test_{uuid.uuid4().hex[:12]}"
    yield server.create_database(name)
    server.drop_database(name)


@pytest.fixture(scope="module")
def stages(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stages]:
    # Anew for each module: others kill the servers, and connections with them.
    stages = Stages(request, tmp_path_factory.mktemp("stages"))
    yield stages
    stages.close()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Give the next test whole servers, and this one's fixtures too, which tidy up in them."""
    for server in item.config.stash.get(_started, []):
        server.mend()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reasons = left_out(terminalreporter.stats.get("skipped", []))
    if reasons:
        terminalreporter.section("left out")
        for reason, tests in sorted(reasons.items()):
            terminalreporter.line(f"{tests} test{'s' if tests > 1 else ''}: {reason}")
        terminalreporter.line("POSTROOM_REQUIRE=all makes these fail.")
