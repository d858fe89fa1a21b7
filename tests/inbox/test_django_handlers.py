"""Handlers on Django's own connection: changes through the ORM commit with the inbox's row, or not
at all, for every failure, alone and beside others in one transaction."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from consuming import QUICK, QUICK_RETRY, House, make_house, note, notes
from django.db import IntegrityError, models

import django_doors
from django_doors import connections, entry, transaction
from helpers import eventually_async
from postroom import Consumer, Outbox, RetryPolicy, framework
from postroom.brokers.memory import MemoryBroker
from postroom.errors import ConfigurationError
from postroom.inbox import giving
from stages import Stages

assert django_doors.settings.configured

ALIAS = "consumed"


class Effect(models.Model):
    """What `effect` is to Django's ORM."""

    place = models.BigAutoField(primary_key=True)
    who = models.CharField(max_length=99)
    k = models.CharField(max_length=99, null=True)
    n = models.IntegerField()

    class Meta:
        app_label = "consumed"
        managed = False
        db_table = "effect"


def write(event: Any, n: int | None = None) -> None:
    """Write a row as the handler of a Django project does."""
    Effect.objects.using(ALIAS).create(
        who="billing", k=event["key"], n=event["n"] if n is None else n
    )


@pytest.fixture(autouse=True)
def _in_a_django_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framework, "_present", django_doors.FRAMEWORK)
    monkeypatch.setattr(giving, "is_set_up", lambda: True)


@pytest.fixture(params=["postgresql", "mariadb", "sqlite"])
def house(request: pytest.FixtureRequest, stages: Stages) -> Iterator[House]:
    """A house whose database is an alias of DATABASES too."""
    stage = stages[request.param]
    both = {"default": connections.settings["default"], ALIAS: entry(stage.url)}
    connections.settings[ALIAS] = connections.configure_settings(both)[ALIAS]
    yield from make_house(stage)
    connections[ALIAS].close()
    del connections[ALIAS], connections.settings[ALIAS]


def consumer_of(house: House, handler: Callable[..., Any] | None, **how: Any) -> Consumer:
    how = QUICK | {"retry": QUICK_RETRY, "topics": ["orders"], "using": ALIAS} | how
    consumer = Consumer("billing", broker=f"memory://{house.broker.name}", **how)
    if handler is not None:
        consumer.on("note")(handler)
    return consumer


async def eventually_handled(consumer: Consumer, number: int) -> None:
    await eventually_async(lambda: consumer.tally.handled >= number)


async def test_a_handler_that_fails_twice_leaves_one_row(house: House) -> None:
    tries = []

    def bill(event: Any, tx: Any) -> None:
        write(event)
        tries.append(event["n"])
        if len(tries) < 3:
            raise RuntimeError("the bank is closed")

    consumer = consumer_of(house, bill)
    await house.send(note("a", 1))
    async with consumer:
        await eventually_handled(consumer, 1)
    assert (len(tries), house.effects()) == (3, [("a", 1)])
    assert len(house.inbox()) == 1


async def test_many_share_a_transaction_and_the_one_that_fails_is_alone(house: House) -> None:
    sizes: list[int] = []

    def bill(event: Any, tx: Any) -> None:
        assert tx is connections[ALIAS]
        assert tx.in_atomic_block
        write(event)
        sizes.append(len(tx.run_on_commit))
        tx.on_commit(lambda: None)
        if event["n"] == 3:
            raise RuntimeError("no")

    consumer = consumer_of(house, bill, retry=RetryPolicy(attempts=1), concurrency=1)
    await house.send(*(note(f"k{n}", n) for n in range(6)))
    done = await consumer.drain_once()
    assert (done.handled, done.buried) == (5, 1)
    assert max(sizes) >= 3  # they shared one
    assert sorted(n for _, n in house.effects()) == [0, 1, 2, 4, 5]
    assert [letter["error_code"] for letter in house.letters()] == ["RuntimeError"]


async def test_in_the_order_of_keys_and_each_once(house: House) -> None:
    consumer = consumer_of(house, lambda event, tx: write(event))
    batch = notes(keys=3, each=8)
    await house.send(*batch, *batch[:5])
    done = await consumer.drain_once()
    assert (done.handled, done.duplicates) == (24, 5)
    assert house.by_key() == {f"k{key}": list(range(8)) for key in range(3)}


async def test_what_a_handler_publishes_shares_its_fate(house: House) -> None:
    tries = []

    def bill(event: Any, tx: Any) -> None:
        Outbox().publish(tx, {"n": event["n"]}, type="billed")
        tries.append(1)
        if len(tries) == 1:
            raise RuntimeError("no")

    consumer = consumer_of(house, bill)
    await house.send(note("a", 1))
    async with consumer:
        await eventually_handled(consumer, 1)
    assert len(house.stage.payloads()) == 1


async def test_hooks_run_after_the_commit_and_undo_nothing(house: House) -> None:
    seen: list[tuple[int, int]] = []

    def bill(event: Any, tx: Any) -> None:
        write(event)

        def hook() -> None:
            seen.append((event["n"], len(house.effects())))
            if event["n"] == 0:
                raise RuntimeError("the mail server is down")

        transaction.on_commit(hook, using=ALIAS)

    consumer = consumer_of(house, bill, concurrency=1)
    await house.send(*(note("a", n) for n in range(3)))
    done = await consumer.drain_once()
    assert (done.handled, done.failed, done.duplicates) == (3, 0, 0)
    assert [n for n, _ in seen] == [0, 1, 2]
    assert all(there > n for n, there in seen)  # each saw its own row committed


async def test_a_savepoint_of_a_handler_may_fail(house: House) -> None:
    def bill(event: Any, tx: Any) -> None:
        write(event)
        with transaction.atomic(using=ALIAS):
            write(event, 99)
            transaction.set_rollback(True, using=ALIAS)  # only of this part

    consumer = consumer_of(house, bill)
    await house.send(note("a", 1))
    assert (await consumer.drain_once()).handled == 1
    assert house.effects() == [("a", 1)]


def swallow(event: Any, tx: Any) -> None:
    write(event)
    with pytest.raises(IntegrityError):
        Effect.objects.using(ALIAS).create(place=Effect.objects.using(ALIAS).last().place)


def roll_back(event: Any, tx: Any) -> None:
    write(event)
    transaction.set_rollback(True, using=ALIAS)


def commit(event: Any, tx: Any) -> None:
    write(event)
    tx.commit()


@pytest.mark.parametrize("handler", [swallow, roll_back, commit])
async def test_who_ends_the_transaction_has_failed(
    house: House, handler: Callable[..., Any]
) -> None:
    consumer = consumer_of(house, handler, retry=RetryPolicy(attempts=1))
    await house.send(note("a", 1))
    done = await consumer.drain_once()
    assert (done.handled, done.buried) == (0, 1)
    assert house.effects() == []


@pytest.mark.parametrize("house", ["mariadb"], indirect=True)
async def test_a_deadlock_that_nobody_minds(house: House) -> None:
    def bill(event: Any, tx: Any) -> None:
        with tx.cursor() as cursor, pytest.raises(Exception, match="1213"):
            cursor.execute("SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = 1213")

    consumer = consumer_of(house, bill, retry=RetryPolicy(attempts=1))
    await house.send(note("a", 1))
    done = await consumer.drain_once()
    assert (done.handled, done.buried) == (0, 1)


@pytest.mark.parametrize("house", ["postgresql"], indirect=True)
async def test_an_error_that_a_cursor_met_and_nobody_saw(house: House) -> None:
    """PostgreSQL then answers COMMIT with a rollback, and the drivers raise no error."""

    def bill(event: Any, tx: Any) -> None:
        write(event)
        with tx.cursor() as cursor, pytest.raises(Exception, match="nowhere"):
            cursor.execute("SELECT 1 FROM nowhere")

    consumer = consumer_of(house, bill, retry=RetryPolicy(attempts=1))
    await house.send(note("a", 1))
    done = await consumer.drain_once()
    assert (done.handled, done.buried) == (0, 1)
    assert house.letters()[0]["error_code"] == "WrongCall"


async def test_connections_are_kept_and_closed_at_the_end(house: House) -> None:
    used, threads = [], set()

    def bill(event: Any, tx: Any) -> None:
        write(event)
        used.append(tx.connection)
        threads.add(threading.current_thread().name)

    consumer = consumer_of(house, bill, concurrency=1, chunk_rows=1)
    await house.send(*(note("a", n) for n in range(5)))
    await consumer.drain_once()
    assert len(set(map(id, used))) == 1
    assert all(name.startswith("consumer-billing") for name in threads)
    await consumer.close()
    assert connections[ALIAS].connection is None  # of this thread: it was not touched
    with pytest.raises(Exception, match=r"(?i)closed|^$|0, ''"):
        used[0].cursor().execute("SELECT 1")


@pytest.mark.parametrize("house", ["postgresql", "mariadb"], indirect=True)
async def test_a_lost_connection_is_no_handler_s_fault(house: House) -> None:
    number, kill = {
        "postgresql": ("pg_backend_pid()", "SELECT pg_terminate_backend(%s)"),
        "mariadb": ("CONNECTION_ID()", "KILL %s"),
    }[house.stage.database]
    lost = []

    def bill(event: Any, tx: Any) -> None:
        write(event)
        if not lost:
            lost.append(1)
            with tx.cursor() as cursor:
                cursor.execute(f"SELECT {number}")
                house.stage.query(kill, cursor.fetchone()[0])
            write(event)

    consumer = consumer_of(house, bill, retry=RetryPolicy(attempts=1))
    await house.send(note("a", 1))
    async with consumer:
        await eventually_handled(consumer, 1)
    assert (consumer.tally.buried, house.effects()) == (0, [("a", 1)])


# ── what is refused ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("house", ["sqlite"], indirect=True)
async def test_an_async_handler_is_refused_at_start(house: House) -> None:
    consumer = consumer_of(house, None)

    @consumer.on("note")
    async def bill(event: Any, tx: Any) -> None: ...

    with pytest.raises(ConfigurationError, match=r"bill is async; .* write it with `def`"):
        await consumer.run()


@pytest.mark.parametrize("house", ["sqlite"], indirect=True)
async def test_a_session_beside_django_is_refused_unless_it_is_asked_for(house: House) -> None:
    broker = MemoryBroker("beside")
    consumer = Consumer("billing", house.stage.url, broker, topics=["orders"])
    consumer.on("note")(lambda event, tx: None)
    with pytest.raises(ConfigurationError, match=r"would not commit together .* gives=\"session\""):
        await consumer.run()
    with pytest.raises(ConfigurationError, match=r"Consumer\('billing'\) without a database URL"):
        await consumer.drain_once()
    asked = Consumer("billing", house.stage.url, broker, topics=["orders"], gives="session")
    asked.on("note")(lambda event, tx: None)
    await asked.drain_once()


@pytest.mark.parametrize("house", ["sqlite"], indirect=True)
def test_what_does_not_fit_is_said(house: House) -> None:
    url = house.stage.url
    with pytest.raises(ConfigurationError, match="takes no database URL"):
        Consumer("billing", url, "memory://", gives="django")
    with pytest.raises(ConfigurationError, match='needs gives="django"'):
        Consumer("billing", url, "memory://", using=ALIAS)


@pytest.mark.parametrize("house", ["sqlite"], indirect=True)
async def test_another_database_than_that_of_the_alias_is_found_out(
    house: House, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    from postroom.databases import migrate

    other = f"sqlite:///{tmp_path}/other.db"
    await migrate.install(other)
    monkeypatch.setenv("POSTROOM_DATABASE_URL", other)
    consumer = consumer_of(house, lambda event, tx: write(event))
    with pytest.raises(ConfigurationError, match=r"work on 'consumed' of DATABASES"):
        await consumer.drain_once()
