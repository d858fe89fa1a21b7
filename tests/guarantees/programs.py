"""What the children run: a relay whose broker writes its deliveries to a file, and writers.

Everything a checker needs is written outside the system under test, by single appends that outlive
a kill of the process.
"""

import asyncio
import datetime as dt
import itertools
import json
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tables import connect, note_standing, run

from postroom import failpoints
from postroom.brokers.base import (
    DELIVERED,
    Broker,
    BrokerOptions,
    Capabilities,
    Outcome,
    Permanent,
    Transient,
    open_broker,
)
from postroom.messages import Draft, Message, new_id
from postroom.outbox.publish import Outbox
from postroom.outbox.relay import Relay
from postroom.retry import RetryPolicy

FILE = "file://record"
POISONED = 66
BUSY = Transient("busy", "only the first time")
BEHIND = Transient("behind", "an earlier message of its key failed")


class Record:
    """A file to which each line is one write: all of it or nothing, in one order for everybody."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, *values: Any) -> None:
        os.write(self._file, json.dumps(values).encode() + b"\n")


def is_first(mark: str) -> bool:
    """Whether nobody has asked with this mark before, in any process."""
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


class FileBroker:
    """Delivers into a file. A payload may say what becomes of it:

    `transient` fails once and then succeeds, whoever sends it; `permanent` is refused; `poison`
    ends the process. While the file `gate` exists the broker is down.
    """

    def __init__(self, record: str, *, delay_seconds: float = 0.0, gate: str | None = None) -> None:
        self.capabilities = Capabilities()
        self._record = Record(record)
        self._marks = record
        self._delay_seconds = delay_seconds
        self._gate = gate

    async def send(self, batch: Sequence[Message], *, epoch: int = 0) -> list[Outcome]:
        await asyncio.sleep(self._delay_seconds)
        return [self._take(message, epoch) for message in batch]

    def _take(self, message: Message, epoch: int) -> Outcome:
        if self._gate and os.path.exists(self._gate):
            return Transient("gate", "the gate is shut", down="broker")
        content = json.loads(message.payload)
        match content.get("do"):
            case "poison":
                os._exit(POISONED)
            case "permanent":
                return Permanent("refused", "it says so itself")
            case "transient" if is_first(f"{self._marks}.{message.id}"):
                return BUSY
        self._record.write(message.id, message.key, content["n"], epoch, os.getpid())
        return DELIVERED

    async def ping(self) -> None:
        """It is always there."""

    async def close(self) -> None:
        """Nothing to close."""


class BusyOnce:
    """Another broker, behind one that is busy the first time a payload says `transient`.

    What comes after such a message of its key stays behind it.
    """

    def __init__(self, behind: Broker, marks: str) -> None:
        self.capabilities = behind.capabilities
        self._behind = behind
        self._marks = marks

    async def send(self, batch: Sequence[Message], *, epoch: int = 0) -> list[Outcome]:
        held: dict[str, Outcome] = {}
        stopped: set[tuple[str, str]] = set()
        for message in batch:
            if message.order in stopped:
                held[message.id] = BEHIND
            elif self._is_busy(message):
                held[message.id] = BUSY
                stopped.add(message.order)
        passed = [message for message in batch if message.id not in held]
        outcomes = iter(await self._behind.send(passed, epoch=epoch) if passed else ())
        return [held.get(message.id) or next(outcomes) for message in batch]

    def _is_busy(self, message: Message) -> bool:
        says_so = b"transient" in message.payload
        return says_so and is_first(f"{self._marks}.{message.id}")

    async def ping(self) -> None:
        await self._behind.ping()

    async def close(self) -> None:
        await self._behind.close()


# ── The relay ──────────────────────────────────────────────────────────────────────────────────


def relay(
    url: str,
    *,
    record: str | None = None,
    broker: str | None = None,
    marks: str = "",
    delay_seconds: float = 0.0,
    gate: str | None = None,
    settings: dict[str, Any],
    clock_skew_seconds: float = 0.0,
    errors: Sequence[tuple[str, int]] = (),
    faults: str | None = None,
) -> int:
    """A relay until SIGTERM; a second SIGTERM ends it at once.

    `errors` are points that fail at a pass; what stands in the tables then is noted in `faults`.
    """
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    if clock_skew_seconds:
        true = time.time
        time.time = lambda: true() + clock_skew_seconds
    for point, at in errors:
        assert faults is not None
        failpoints.arm(point, partial(_fail, url, faults), at=at)
    asyncio.run(_relay(url, record, broker, marks, delay_seconds, gate, settings))
    return 0


def _fail(url: str, faults: str) -> None:
    note_standing(url, faults)
    raise failpoints.FailpointError("failpoint")


async def _relay(
    url: str,
    record: str | None,
    broker: str | None,
    marks: str,
    delay_seconds: float,
    gate: str | None,
    settings: dict[str, Any],
) -> None:
    brokers: dict[str, Broker] = {}
    if broker:
        # The source tells which process has sent a message.
        options = BrokerOptions(
            send_timeout_seconds=settings["send_timeout_seconds"], source=f"/{os.getpid()}"
        )
        brokers[broker] = BusyOnce(open_broker(broker, options), marks)
    else:
        assert record is not None
        brokers[FILE] = FileBroker(record, delay_seconds=delay_seconds, gate=gate)
    retry = RetryPolicy(delays_seconds=(0.05,), attempts=6)
    mover = Relay(url, broker or FILE, brokers=brokers, retry=retry, listen=False, **settings)
    told = 0

    def terminate() -> None:
        nonlocal told
        told += 1
        if told > 1:
            os._exit(1)
        mover.stop()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminate)
    await mover.run()


def command(url: str, *, words: list[str]) -> int:
    """The command line `postroom`, as it is installed."""
    from postroom.ops.cli import main

    sys.argv = ["postroom", *words, "--database", url]
    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    return 0


# ── Writers ────────────────────────────────────────────────────────────────────────────────────


def writer(
    url: str,
    *,
    log: str,
    count: int,
    keys: int,
    seed: str,
    pause_seconds: float = 0.0,
    rest_seconds: float = 0.0,
    busy_share: float = 0.0,
    topic: str = "facts",
    leave: str | None = None,
) -> int:
    """Commit `count` messages, one to three with each change of an aggregate.

    The aggregate's row is locked by its change, so the order of its messages is the order of `n`.
    Now and then a transaction stays open for a while, as they do, and between two is a rest. Some
    messages find their broker busy once. The file `leave` says how much of it may be done by now.
    """
    record, dice, outbox = Record(log), random.Random(seed), Outbox()
    done = 0
    connection: Any = None
    while done < count:
        try:
            while leave is not None and done >= count * _share(leave):
                time.sleep(0.02)
            connection = connection or connect(url)
            most, key = (
                min(count - done, dice.choice((1, 1, 1, 2, 3))),
                f"key-{dice.randrange(keys)}",
            )
            busy = dice.random() < busy_share
            pause = dice.random() * pause_seconds if dice.random() < 0.1 else 0.0
            _write_some(
                connection, outbox, record, topic, key, most, busy=busy, pause_seconds=pause
            )
            done += most
            time.sleep(rest_seconds)
        except Exception as error:
            record.write("trouble", f"{type(error).__name__}: {error}"[:200])
            if connection is not None:
                _let_go(connection)
            connection = None
            time.sleep(0.05)
    return 0


def _share(leave: str) -> float:
    with open(leave, encoding="utf-8") as file:
        return float(file.read() or 0)


def _write_some(
    connection: Any,
    outbox: Outbox,
    record: Record,
    topic: str,
    key: str,
    size: int,
    *,
    busy: bool,
    pause_seconds: float,
) -> None:
    run(connection, "UPDATE counter SET n = n + %s WHERE k = %s", size, key)
    ((last,),) = run(connection, "SELECT n FROM counter WHERE k = %s", key)
    facts = [(new_id(), key, n) for n in range(last - size + 1, last + 1)]
    for id, _, n in facts:
        run(connection, "INSERT INTO business (id, k, n) VALUES (%s, %s, %s)", id, key, n)
        payload = {"n": n, "do": "transient"} if busy else {"n": n}
        outbox.publish(connection, payload, type="fact", topic=topic, key=key, id=id)
    time.sleep(pause_seconds)
    record.write("begun", facts)
    connection.commit()
    record.write("committed", facts)


def _let_go(connection: Any) -> None:
    try:
        connection.close()
    except Exception as error:
        print("close:", error, file=sys.stderr)


def publisher(url: str, *, log: str) -> int:
    """For each way to publish a transaction with the change first, and one with the message first.

    A failpoint stands at every border of ours, as they do at those of publishing.
    """
    record, outbox, connection = Record(log), Outbox(), connect(url)
    for number, (way, change_first) in enumerate(itertools.product(WAYS, (True, False))):
        facts = [(new_id(), f"key-{way}", number) for _ in range(3 if way == "many" else 1)]
        if change_first:
            _change(connection, facts)
        drafts = [_draft(way, *fact) for fact in facts]
        failpoints.hit("writer.publish.before")
        outbox.publish_many(connection, drafts, serialize_key=way == "serialized")
        failpoints.hit("writer.publish.after")
        if not change_first:
            _change(connection, facts)
        record.write("begun", facts)
        failpoints.hit("writer.commit.before")
        connection.commit()
        failpoints.hit("writer.commit.after")
        record.write("committed", facts)
    return 0


def _change(connection: Any, facts: list[tuple[str, str, int]]) -> None:
    failpoints.hit("writer.business.before")
    for fact in facts:
        run(connection, "INSERT INTO business (id, k, n) VALUES (%s, %s, %s)", *fact)
    failpoints.hit("writer.business.after")


WAYS = ("plain", "serialized", "deduplicated", "delayed", "many")


def _draft(way: str, id: str, key: str, n: int) -> Draft:
    later = dt.datetime.now(dt.UTC) + dt.timedelta(hours=1)
    return Draft(
        payload={"n": n},
        type="fact",
        topic="facts",
        key=key,
        id=id,
        deliver_at=later if way == "delayed" else None,
        dedup_key=id if way == "deduplicated" else None,
    )


def _consumer(url: str, **options: Any) -> int:
    from counters import consumer

    return consumer(url, **options)


def _bookkeeper(url: str, **options: Any) -> int:
    from books import bookkeeper

    return bookkeeper(url, **options)


def _clerk(url: str, **options: Any) -> int:
    from clerks import clerk

    return clerk(url, **options)


def _quitter(url: str, **options: Any) -> int:
    from quitters import quitter

    return quitter(url, **options)


def _trader(url: str, **options: Any) -> int:
    from traders import trader

    return trader(url, **options)


PROGRAMS: dict[str, Callable[..., int]] = {
    "relay": relay,
    "command": command,
    "writer": writer,
    "publisher": publisher,
    "consumer": _consumer,
    "bookkeeper": _bookkeeper,
    "clerk": _clerk,
    "quitter": _quitter,
    "trader": _trader,
}
# What the cradle imports for the first of them, so that the others need not.
MODULES = {"clerk": "clerks", "quitter": "quitters", "trader": "traders"}
