"""Canary passwords on every path on which an error can happen; none of them comes out anywhere."""

import asyncio
import json
import logging
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from commands import Here, postroom

from helpers import eventually_async
from postroom import Outbox, Relay, RetryPolicy, signals
from postroom.brokers.base import Outcome, Permanent, Transient, Unknown
from postroom.databases import migrate
from postroom.messages import Draft, Message
from postroom.ops import metrics
from postroom.ops.health import answer
from postroom.ops.logs import JsonFormatter
from servers import MariaDBServer, PostgresServer

CANARY = "canary-pa55"
# Each of these characters ends a URL for somebody who looks for one in a text.
ODD = [
    f"amqp://app:p,{CANARY}@127.0.0.1:9/",
    f"amqp://app:p<>'\"@{CANARY}@127.0.0.1:9/",
    f"redis://app:p<>'\",@{CANARY}@127.0.0.1:9/0",
    f"kafka://app:p<>'@,{CANARY}@127.0.0.1:9?security.protocol=sasl_plaintext",
    f"redis://127.0.0.1:9/?password=p,{CANARY}",
]
SECRETS = f"whsec_{'A' * 32},whsec_{CANARY.replace('-', '+') * 3}"[: 6 + 32 + 1 + 6 + 32]
SPILL = (
    f"cannot reach nats://relay:{CANARY}@host:4222 or postgresql://u:{CANARY}@h/d?password={CANARY}"
    f" (password='{CANARY}', Authorization: Bearer {CANARY})"
)


def spill(message: Message) -> Outcome | None:
    """A receiver that puts its secrets into every kind of error."""
    kind = message.key
    if kind == "raises":
        raise RuntimeError(SPILL)
    if kind == "refuses":
        return Permanent("refused", SPILL)
    if kind == "unknown":
        return Unknown("unknown", SPILL)
    if kind == "long":
        return Permanent("long", "x" * 1990 + SPILL)
    if kind == "topic":
        return Transient("down", SPILL, down="topic")
    return None


@pytest.mark.parametrize("debug", ["", "1"])
@pytest.mark.parametrize(
    "arguments",
    [
        ("status", "--database", f"postgresql://app:{CANARY}@127.0.0.1:9/x"),
        ("status", "--database", f"postgresql://app@127.0.0.1:9/x?password={CANARY}"),
        ("status", "--database", f"postgresql+psycopg://app:{CANARY}@127.0.0.1:9/x"),
        ("status", "--database", f"postgresql+psycopg://app:{CANARY}@nowhere.invalid/x"),
        ("status", "--database", f"mysql://app:{CANARY}@127.0.0.1:9/x"),
        ("status", "--database", f"oracle://app:{CANARY}@127.0.0.1:9/x"),
        ("relay", "--database", "SQLITE", "--broker", f"pigeon://app:{CANARY}@host"),
        ("relay", "--database", "SQLITE", "--broker", f"nats://app:{CANARY}@127.0.0.1:x"),
        ("relay", "--once", "--database", "SQLITE", "--broker", f"nats://a:{CANARY}@127.0.0.1:9"),
        ("relay", "--once", "--database", "SQLITE", "--broker", f"nats://{CANARY}@127.0.0.1:9"),
        ("relay", "--database", f"mysql://app:{CANARY}@127.0.0.1:9/x", "--broker", "stdout://"),
        *(("relay", "--once", "--database", "SQLITE", "--broker", url) for url in ODD),
        *(("doctor", "--database", "SQLITE", "--broker", url) for url in ODD),
        ("relay", "--database", "SQLITE", "--broker", f"https://127.0.0.1/x#whsec_{CANARY}"),
        ("relay", "--database", "SQLITE", "--broker", f"https://127.0.0.1/x#whsec_{CANARY}="),
    ],
)
def test_commands_that_fail(
    here: Here,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    debug: str,
) -> None:
    url = f"sqlite:///{tmp_path}/app.db"
    asyncio.run(migrate.install(url))
    monkeypatch.setenv("POSTROOM_DEBUG", debug)
    done = here(*(url if word == "SQLITE" else word for word in arguments))
    assert done.returncode in (1, 2, 3), done.stderr
    assert CANARY not in done.stdout + done.stderr


def test_a_webhook_that_is_wrong(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/app.db"
    asyncio.run(migrate.install(url))
    done = postroom(
        *("relay", "--once", "--database", url, "--broker", "stdout://"),
        cwd=tmp_path,
        POSTROOM_DEBUG="1",
        POSTROOM_ALERTS_WEBHOOK_URL=f"hooks.example/{CANARY}",
    )
    assert done.returncode == 2
    assert CANARY not in done.stdout + done.stderr


@pytest.mark.parametrize("kind", ["postgres", "mariadb"])
def test_a_server_that_refuses(here: Here, kind: str, request: pytest.FixtureRequest) -> None:
    server: PostgresServer | MariaDBServer = request.getfixturevalue(kind)
    scheme, _, rest = server.url.partition("://")
    place = rest.rpartition("@")[2].partition("/")[0]
    for database in ("none_such", "information_schema"):
        url = f"{scheme}://nobody:{CANARY}@{place}/{database}"
        done = here("relay", "--database", url, "--broker", "stdout://")
        assert done.returncode != 0
        assert done.stderr.count("\n") == 1
        assert CANARY not in done.stdout + done.stderr


class Log(logging.Handler):
    """Every line that an application would see."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(JsonFormatter())
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))
        self.lines.append(logging.Formatter().format(record))
        self.lines.append(repr({k: v for k, v in vars(record).items() if k != "exc_info"}))


async def test_what_receivers_spill_goes_nowhere(database_url: str) -> None:
    await migrate.install(database_url)
    from sqlalchemy.ext.asyncio import create_async_engine

    from postroom.databases.urls import resolve

    target = resolve(database_url)
    engine = create_async_engine(target.url, connect_args=target.connect_args)
    kinds = ["raises", "refuses", "unknown", "long"]
    drafts = [Draft(payload=1, type="note", key=kind) for kind in kinds]
    drafts.append(Draft(payload=1, type="note", key="topic", topic="down"))
    async with engine.begin() as connection:
        await Outbox().publish_many_async(connection, drafts)
    heard: list[Any] = []
    log = Log()
    logger = logging.getLogger("postroom")
    level = logger.level
    logger.addHandler(log)
    logger.setLevel(logging.DEBUG)
    told: list[Any] = []
    metrics.install()
    stop = signals.listen(lambda name, fields: heard.append((name, fields)))
    relay = Relay(
        database_url,
        f"call:{__name__}:spill",
        retry=RetryPolicy((0.02,), attempts=2),
        alerts=[told.append],
    )
    try:
        async with relay:
            await eventually_async(lambda: relay.tally.dead == 4, 20)
            await eventually_async(lambda: relay.report()["destinations"], 20)
            answers = [answer(relay, "GET", path) for path in ("/healthz", "/readyz", "/metrics")]
            report = json.dumps(relay.report())
    finally:
        stop()
        logger.removeHandler(log)
        logger.setLevel(level)
    prefix = "postroom." if target.dialect == "postgresql" else "postroom_"
    async with engine.begin() as connection:
        rows = []
        for table, columns in (
            ("dead_letter", "error, history, error_code"),
            ("held", "error, history, error_code"),
            ("meta", "name, value"),
            ("worker", "name, kind"),
        ):
            found = await connection.exec_driver_sql(f"SELECT {columns} FROM {prefix}{table}")
            rows += [tuple(row) for row in found]
    await engine.dispose()
    everything = {
        "log": "\n".join(log.lines),
        "signals": repr(heard),
        "alerts": repr(told),
        "answers": repr(answers),
        "report": report,
        "rows": repr(rows),
    }
    assert "***" in everything["rows"]
    assert any(name == "destination.down" for name, _ in heard)
    assert [place for place, text in everything.items() if CANARY in text] == []
    # Cut in the middle of a URL, it would not be known for one.
    assert "canary" not in everything["rows"]


def test_a_broker_of_the_routes_table_leaves_no_secret_on_record(
    here: Here, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path}/app.db"
    asyncio.run(migrate.install(url))
    (tmp_path / "postroom.toml").write_text(
        f'[relay.routes]\n"orders.*" = "nats://relay:{CANARY}@127.0.0.1:9"\n'
    )
    done = here("relay", "--once", "--database", url, "--broker", "stdout://")
    assert done.returncode == 3
    with closing(sqlite3.connect(tmp_path / "app.db")) as connection:
        recorded = connection.execute("SELECT * FROM postroom_meta").fetchall()
    assert CANARY not in done.stderr + repr(recorded)


@pytest.mark.parametrize(
    "broker",
    [
        *ODD,
        f"https://app:{CANARY}@127.0.0.1:9/x?sig={CANARY}#secret={SECRETS}&allow=127.0.0.1:9",
    ],
)
async def test_a_relay_shows_and_keeps_nothing_secret_of_a_brokers_url(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, broker: str
) -> None:
    """It tells of its brokers when it starts and when one is down, and puts them on record."""
    url = f"sqlite:///{tmp_path}/app.db"
    await migrate.install(url)
    heard: list[Any] = []
    caplog.set_level(logging.INFO, "postroom")
    stop = signals.listen(lambda name, fields: heard.append((name, fields)))
    relay = Relay(url, broker)
    try:
        async with relay:
            await eventually_async(lambda: relay.report()["destinations"], 30)
            adapter = relay.sender.adapter("orders")
            report = json.dumps([relay.report(), relay.sender.destinations.brokers_down(), adapter])
    finally:
        stop()
    with closing(sqlite3.connect(tmp_path / "app.db")) as connection:
        recorded = connection.execute("SELECT * FROM postroom_meta").fetchall()
    assert {"relay.started", "destination.down"} <= {name for name, _ in heard}
    for text in (caplog.text, repr(heard), report, repr(recorded)):
        assert "127.0.0.1:9" in text
        assert CANARY not in text
        assert SECRETS[-32:] not in text
