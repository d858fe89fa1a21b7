"""`postroom doctor`: all is well on a good day, and each planted trouble is named with a remedy."""

import asyncio
import json
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nats
import pytest
import receivers
from commands import Here
from house_tools import House, said

from helpers import eventually_async
from postroom.brokers import memory
from postroom.config import RelaySettings, Routes
from postroom.databases import migrate
from postroom.messages import new_id
from postroom.ops import doctor_servers
from postroom.ops.doctor import Limits, examine
from postroom.outbox.relay import Relay
from servers import MariaDBServer, NatsServer, PgBouncerServer, PostgresServer

DAY = 86_400
QUICK: dict[str, Any] = {"lease_seconds": 6, "send_timeout_seconds": 1}


@pytest.fixture(autouse=True)
def _forget() -> None:
    receivers.received.clear()


def url(house: House) -> tuple[str, str]:
    return ("--database", house.url)


async def found(house: House, **limits: Any) -> dict[str, list[tuple[str, str]]]:
    """What is not well: level and sentence by the name of the check."""
    checks = await examine(house.url, RelaySettings(), Routes(), Limits(**limits))
    trouble: dict[str, list[tuple[str, str]]] = {}
    for check in checks:
        if check.level != "ok":
            assert check.remedy, check
            trouble.setdefault(check.name, []).append((check.level, check.text))
    return trouble


async def test_a_good_day_has_no_trouble(house: House) -> None:
    memory.broker(house.name)
    async with Relay(house.url, f"memory://{house.name}", **QUICK) as relay:
        await eventually_async(
            lambda: house.sql("SELECT 1 FROM {p}worker WHERE report IS NOT NULL")
        )
        trouble = await found(house)
        assert relay.owner
    # The servers of tests give durability up for speed, and doctor sees it.
    for level, _ in trouble.pop("durability", []):
        assert level == "warning"
    assert trouble == {}


def test_programs_and_people(here: Here, house: House) -> None:
    report = said(here, "doctor", *url(house))
    assert report["ok"]
    names = {check["name"] for check in report["checks"]}
    assert {"schema", "workers", "backlog", "clocks", "retention", "publishers"} <= names
    assert {check["level"] for check in report["checks"]} <= {"ok", "warning"}
    people = here("doctor", *url(house))
    assert people.returncode == 0
    assert "0 wrong." in people.stdout
    house.publish("x")
    house.sql("UPDATE {p}outbox SET created_at = %s", house.ago(3600))
    report = said(here, "doctor", *url(house), code=1)
    assert not report["ok"]
    assert "start a relay" in here("doctor", *url(house)).stdout


def _no_relay(house: House) -> None:
    house.publish("x")
    house.sql("UPDATE {p}outbox SET created_at = %s", house.ago(3600))


def _beat(house: House, name: str, *, seen: float = 0, at: float = 0, version: str = "9.9") -> None:
    report = json.dumps({"at": time.time() + at, "version": version, "delivered": 0})
    house.sql("INSERT INTO {p}worker (incarnation, kind, name, seen_at, report)"
              " VALUES (%s, 'relay', %s, %s, %s)",
              new_id(), name, house.ago(seen), report)  # fmt: skip


def _down(house: House) -> None:
    down = {"name": "nats://x", "error_code": "timeout", "error": "e", "retry_in_seconds": 3}
    report = json.dumps({"at": time.time(), "destinations": [down]})
    house.sql("INSERT INTO {p}worker (incarnation, kind, name, report)"
              " VALUES ('i', 'relay', 'mail-1', %s)", report)  # fmt: skip


def _paused(house: House) -> None:
    house.publish("x")
    house.sql("UPDATE {p}lane SET paused = %s", True)


def _letter(house: House) -> None:
    house.publish("poison")
    columns = "lane, position, id, topic, {key}, type, content_type, payload, size, created_at"
    house.sql(
        f"INSERT INTO {{p}}dead_letter (source, {columns}, state, holds_key, error_code, error,"
        f" attempts, history, died_at) SELECT 'outbox', {columns}, 'dead', %s, 'bad', 'e', 1, '[]',"
        " created_at FROM {p}outbox",
        True,
    )
    house.sql("DELETE FROM {p}outbox")


def _old_dedup(house: House) -> None:
    house.sql("INSERT INTO {p}dedup (dedup_key, message_id, created_at) VALUES ('a', %s, %s)",
              new_id(), house.ago(30 * DAY))  # fmt: skip


def _old_archive(house: House) -> None:
    if house.dialect == "postgresql":
        house.sql("CREATE TABLE postroom.archive_20240102 PARTITION OF postroom.archive"
                  " FOR VALUES FROM ('2024-01-02') TO ('2024-01-03')")  # fmt: skip
        return
    house.publish("x")
    columns = (
        "lane, position, id, topic, {key}, type, content_type, payload, size, redrives, created_at"
    )
    house.sql(f"INSERT INTO {{p}}archive ({columns}, day, attempts, delivered_at) SELECT {columns},"
              " '2024-01-02', 1, created_at FROM {p}outbox")  # fmt: skip
    house.sql("DELETE FROM {p}outbox")


def _kept(house: House) -> None:
    house.sql("INSERT INTO {p}meta (name, value) VALUES ('keep_delivered_seconds', '60')")


def _doubt(house: House, status: str, mode: str) -> None:
    house.sql("INSERT INTO {p}idempotency_key (scope, operation, {key}, fingerprint, mode, status,"
              " owner, created_at, locked_until, expires_at, error) VALUES"
              " ('ada', 'charge', 'k', 'f', %s, %s, '', %s, %s, %s, 'lost')",
              mode, status, house.ago(7200), house.ago(3600) if mode == "resume" else None,
              house.ago(-DAY))  # fmt: skip


TROUBLES: dict[str, tuple[str, str, str, Callable[[House], Any]]] = {
    "no relay": ("workers", "wrong", "messages wait and no relay is alive", _no_relay),
    "lanes nobody works": ("lanes", "wrong", "which nobody works", _no_relay),
    "an old message": ("backlog", "wrong", "oldest pending message waits for 60 m", _no_relay),
    "an overdue one": (
        "backlog", "wrong", "delayed message is overdue",
        lambda h: h.publish("x", delay_seconds=-7200),
    ),
    "a silent relay": (
        "workers", "warning", "mail-1 has not been seen for", lambda h: _beat(h, "mail-1", seen=300)
    ),
    "another version": ("versions", "warning", "version 9.9", lambda h: _beat(h, "mail-1")),
    "a clock that is off": (
        "clocks", "warning", "mail-1 by +60", lambda h: _beat(h, "mail-1", at=60)
    ),
    "a destination down": ("destinations", "warning", "nats://x is down, says mail-1", _down),
    "a paused lane": ("lanes", "warning", "which are paused", _paused),
    "one id twice": (
        "ids", "wrong", "several waiting messages share an id, 1 times",
        lambda h: (
            h.publish("x"), h.publish("y"), h.sql("UPDATE {p}outbox SET id = %s", new_id())
        ),
    ),
    "a dead letter": (
        "dead letters", "warning", "1 dead letters wait for a person, 1 of them hold", _letter
    ),
    "dedup keys not pruned": ("retention", "warning", "dedup keys are 30 d old", _old_dedup),
    "an archive not pruned": ("retention", "warning", "delivered messages are", _old_archive),
    "a request in doubt": (
        "keys", "warning", "of 1 requests nobody knows whether they were carried out, the oldest",
        lambda h: _doubt(h, "indeterminate", "external"),
    ),
    "a request at rest": (
        "keys", "warning", "1 resumable requests are at rest, the first for 60 m",
        lambda h: _doubt(h, "pending", "resume"),
    ),
    "another retention": ("retention", "warning", "the settings here say 7 d", _kept),
}  # fmt: skip


@pytest.mark.parametrize("trouble", TROUBLES)
async def test_a_planted_trouble_is_found(house: House, trouble: str) -> None:
    name, level, text, plant = TROUBLES[trouble]
    before = (await found(house)).get(name, [])
    assert not any(text in sentence for _, sentence in before)
    plant(house)
    after = (await found(house)).get(name, [])
    assert any(level == each and text in sentence for each, sentence in after), after


async def test_an_open_publisher_is_named(house: House) -> None:
    connection = house.connect(autocommit=False)
    cursor = connection.cursor()
    try:
        from postroom import Draft, Outbox

        Outbox().publish_many(connection, [Draft(payload={}, type="t", topic="notes")])
        time.sleep(1.1)
        trouble = await found(house, publisher_seconds=0.5)
        if house.dialect == "sqlite":
            report = await examine(house.url, RelaySettings(), Routes())
            assert any("cannot be known with SQLite" in check.text for check in report)
            return
        if house.dialect == "postgresql":
            pid = connection.info.backend_pid
        else:
            pid = connection.thread_id()
        ((level, text),) = trouble["publishers"]
        assert level == "warning"
        assert f"process {pid} (" in text
    finally:
        cursor.close()
        connection.rollback()
        connection.close()

    async def gone() -> bool:
        return "publishers" not in await found(house, publisher_seconds=0.5)

    await eventually_async(gone)


# ── PostgreSQL ─────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def elephant(postgres: PostgresServer) -> Any:
    name = f"doctor_{new_id()[-12:]}"
    house = House(postgres.create_database(name))
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as thread:
        thread.submit(house.install).result()
    yield house
    house.close()
    postgres.drop_database(name)


async def test_what_goes_wrong_with_postgresql(elephant: House) -> None:
    house = elephant
    first = await found(house)
    assert not {"schema", "vacuum", "partitions", "isolation", "pooler"} & set(first)
    house.sql("ALTER TABLE postroom.outbox RESET (autovacuum_vacuum_scale_factor)")
    ((database,),) = house.sql("SELECT current_database()")
    house.sql(f"ALTER DATABASE {database} SET default_transaction_isolation = 'serializable'")
    days = house.sql(
        "SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid"
        " WHERE i.inhparent = 'postroom.archive'::regclass AND c.relname ~ '\\d{8}$' ORDER BY 1"
    )
    for (day,) in days[2:]:
        house.sql(f"DROP TABLE postroom.{day}")
    trouble = await found(house)
    assert "lost its own autovacuum settings" in trouble["vacuum"][0][1]
    assert "serializable" in trouble["isolation"][0][1]
    assert trouble["partitions"] == [("warning", "the archive has partitions for 2 days only")]
    house.sql(f"DROP TABLE postroom.{days[0][0]}")
    trouble = await found(house)
    assert trouble["partitions"] == [("wrong", "the archive has no partition for today")]
    house.sql("ALTER TABLE postroom.outbox ALTER COLUMN position SET CACHE 20")
    (check,) = await examine(house.url, RelaySettings(), Routes())
    assert (check.name, check.level) == ("schema", "wrong")
    assert "20 positions at a time" in check.text


async def test_overflow_is_seen(elephant: House) -> None:
    elephant.publish("x")
    columns = "lane, position, id, topic, key, type, content_type, payload, size, redrives"
    elephant.sql(
        f"INSERT INTO postroom.archive ({columns}, day, attempts, created_at, delivered_at)"
        f" SELECT {columns}, '2020-01-01', 1, now(), now() FROM postroom.outbox"
    )
    retention = (await found(elephant))["retention"]
    assert any("no partition of their day" in text for _, text in retention)


async def test_what_pins_dead_rows_is_named(elephant: House) -> None:
    house = elephant
    assert "horizon" not in await found(house, transaction_seconds=0.2)
    holder = house.connect(autocommit=False)
    holder.execute("SET application_name = 'report-of-the-year'")
    holder.commit()
    holder.execute("UPDATE postroom.meta SET value = value")
    prepared = house.connect(autocommit=True)
    prepared.execute("BEGIN")
    prepared.execute("CREATE TABLE two_phases (n int)")
    prepared.execute(f"PREPARE TRANSACTION '{house.name}'")
    house.sql("SELECT pg_create_physical_replication_slot(%s, true)", f"slot_{house.name}")
    try:
        time.sleep(0.6)
        texts = [text for _, text in (await found(house, transaction_seconds=0.2))["horizon"]]
        assert any("report-of-the-year" in text for text in texts), texts
        assert any(f"prepared transaction {house.name}" in text for text in texts), texts
        assert any(f"replication slot slot_{house.name}" in text for text in texts), texts
    finally:
        house.sql("SELECT pg_drop_replication_slot(%s)", f"slot_{house.name}")
        prepared.execute(f"ROLLBACK PREPARED '{house.name}'")
        prepared.close()
        holder.close()


# ── MariaDB and SQLite ─────────────────────────────────────────────────────────────────────────


async def test_settings_of_mariadb(mariadb: MariaDBServer) -> None:
    mariadb.require_private()
    name = f"doctor_{new_id()[-12:]}"
    house = House(mariadb.create_database(name))
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as thread:
        thread.submit(house.install).result()
    settings = ("innodb_flush_log_at_trx_commit", "tx_isolation", "max_allowed_packet")
    before = {n: house.sql(f"SELECT @@global.{n}")[0][0] for n in settings}
    try:
        house.sql("SET GLOBAL innodb_flush_log_at_trx_commit = 1")
        assert not {"durability", "isolation", "packets"} & set(await found(house))
        house.sql("SET GLOBAL innodb_flush_log_at_trx_commit = 2")
        house.sql("SET GLOBAL tx_isolation = 'SERIALIZABLE'")
        house.sql("SET GLOBAL max_allowed_packet = 1048576")
        trouble = await found(house)
        assert "may be lost in a crash" in trouble["durability"][0][1]
        assert "SERIALIZABLE" in trouble["isolation"][0][1]
        assert trouble["packets"][0][0] == "wrong"
    finally:
        for name_, value in before.items():
            shown = f"'{value}'" if isinstance(value, str) else value
            house.sql(f"SET GLOBAL {name_} = {shown}")
        house.close()
        mariadb.drop_database(name)


async def test_a_file_of_sqlite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    house = House(f"sqlite:///{tmp_path}/app.db")
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as thread:
        thread.submit(house.install).result()
    house.publish("x")
    assert "file" not in await found(house)
    house.sql("BEGIN")
    house.sql("SELECT count(*) FROM {p}outbox")
    house.publish("y")
    monkeypatch.setattr(doctor_servers, "LARGE_WAL_BYTES", 1)
    assert "keeps it from being folded in" in (await found(house))["file"][0][1]
    house.close()
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/sda / ext4 rw 0 0\nserver:/x {tmp_path} nfs4 rw 0 0\n")
    assert doctor_servers._file_system(tmp_path / "app.db", str(mounts)) == "nfs4"
    assert doctor_servers._file_system(Path("/etc/hosts"), str(mounts)) == "ext4"
    assert doctor_servers._is_network("nfs4")
    assert doctor_servers._is_network("fuse.sshfs")
    assert not doctor_servers._is_network("ext4")
    assert not doctor_servers._is_network(None)


# ── brokers, and wrong input ───────────────────────────────────────────────────────────────────


def test_brokers_are_asked(here: Here, tmp_path: Path) -> None:
    house = House(f"sqlite:///{tmp_path}/app.db")
    house.install()
    done = here("relay", "--once", *url(house), "--broker", "call:receivers:take")
    assert done.returncode == 0
    ok = said(here, "doctor", *url(house), "--broker", "call:receivers:take")["checks"]
    assert {(c["name"], c["level"]) for c in ok if c["name"] in ("brokers", "routes")} == {
        ("brokers", "ok"), ("routes", "ok")
    }  # fmt: skip
    gone = "nats://user:secret@127.0.0.1:9"
    report = said(here, "doctor", *url(house), "--broker", gone, code=1)["checks"]
    by_name = {check["name"]: check for check in report}
    assert by_name["brokers"]["level"] == "wrong"
    assert by_name["routes"]["level"] == "warning"
    assert "secret" not in json.dumps(report)


@pytest.mark.parametrize(
    ("broker", "text"),
    [
        ("pigeon://x:secret@y", "no broker for pigeon"),
        ("pigeon", "is not a broker URL"),
        ("nats://127.0.0.1:9?speed=1", "'speed' is not an option of nats"),
        ("amqp://u:secret@127.0.0.1:x", "bad broker URL"),
        ("https://hooks.example/x#secret@1=", "has no option"),
        ("call:receivers:nobody", "nobody"),
    ],
)
def test_a_broker_that_cannot_be_opened_is_a_finding_among_others(
    here: Here, tmp_path: Path, broker: str, text: str
) -> None:
    house = House(f"sqlite:///{tmp_path}/app.db")
    house.install()
    Path("postroom.toml").write_text('[relay.routes]\n"orders" = "stdout://"\n')
    report = said(here, "doctor", *url(house), "--broker", broker, code=1)["checks"]
    brokers = {each["level"]: each for each in report if each["name"] == "brokers"}
    assert text in brokers["wrong"]["text"]
    assert "correct its URL" in brokers["wrong"]["remedy"]
    assert "stdout:// can be reached" in brokers["ok"]["text"]
    assert "secret@" not in json.dumps(report)
    assert {"schema", "clocks"} <= {each["name"] for each in report}


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("--max-age", "soon"), 2, "write 90s, 15m, 24h or 7d"),
        (("--nonsense",), 2, "nonsense"),
        (("--database", "postgresql://127.0.0.1:9/x"), 3, "127.0.0.1"),
        (("--database", "mysql://127.0.0.1:9/x"), 3, "127.0.0.1"),
        (("--database", "oracle://x"), 2, "oracle"),
    ],
)
def test_wrong_input_is_one_sentence(
    here: Here, tmp_path: Path, arguments: tuple[str, ...], code: int, text: str
) -> None:
    house = House(f"sqlite:///{tmp_path}/app.db")
    house.install()
    given = () if "--database" in arguments else url(house)
    done = here("doctor", *given, *arguments)
    assert done.returncode == code, done.stderr
    assert text in done.stderr
    assert done.stderr.startswith("postroom: ")
    assert done.stderr.count("\n") == 1


def test_tables_that_are_not_there(here: Here, database_url: str) -> None:
    report = said(here, "doctor", "--database", database_url, code=1)
    (check,) = report["checks"]
    assert (check["name"], check["level"]) == ("schema", "wrong")
    assert "postroom db install" in check["text"]


async def test_a_pooler_in_transaction_mode_is_named(
    postgres: PostgresServer, pgbouncer: PgBouncerServer
) -> None:
    """Relays work through it, but cannot be woken unless they have a way around it."""
    name = f"doctor_{uuid.uuid4().hex[:12]}"
    direct = postgres.create_database(name)
    pooled = pgbouncer.through(direct)
    await migrate.install(pooled)

    async def pooler(**settings: Any) -> list[tuple[str, str]]:
        checks = await examine(pooled, RelaySettings(**settings), Routes(), Limits())
        return [(one.level, one.text) for one in checks if one.name == "pooler"]

    ((level, text),) = await pooler()
    assert level == "warning"
    assert "transaction mode" in text
    ((level, text),) = await pooler(notify_url=direct)
    assert (level, text) == ("ok", "a pooler stands between, its mode is transaction")
    postgres.drop_database(name)


# ── what a broker says of itself ───────────────────────────────────────────────────────────────


async def test_a_brokers_own_word_about_its_topology(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    house = House(f"sqlite:///{tmp_path}/app.db")
    await asyncio.to_thread(house.install)
    topic, named = f"t{new_id()}", f"n{new_id()}"
    house.publish("x")
    house.sql("UPDATE {p}outbox SET topic = %s", topic)
    routes = Routes(((named, nats_server.url), ("other.*", "stdout://")), nats_server.url)

    async def topology(**brokers: Any) -> list[tuple[str, str]]:
        checks = await examine(house.url, RelaySettings(), routes, Limits(), brokers)
        return [(one.level, one.text) for one in checks if one.name == "topology"]

    told = await topology()
    assert [level for level, _ in told] == ["warning"] * 2
    for each in (topic, named):
        assert any(f"no JetStream stream captures subject {each}" in text for _, text in told)
    async with await nats.connect(nats_server.url) as client:
        await client.jetstream().add_stream(name=topic, subjects=[topic, named], max_age=600)
        told = await topology()
        assert any("deletes messages after 10 minutes" in text for _, text in told)
        assert not any("no JetStream stream" in text for _, text in told)
        await client.jetstream().delete_stream(topic)
    house.close()
