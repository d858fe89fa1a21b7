"""A broker that stands still for moments while receivers come and go: the order of a key holds.

Of three receivers in processes of their own, the one at work is stopped or killed again and again,
and the server is halted for fractions of a second all the while, so that take-overs meet a server
that is slow to answer. Each receiver has many unacknowledged messages and records those that it
acknowledges, in one file. A small everyday size;
POSTROOM_GUARANTEES=big is that of `make guarantees`.
"""

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from helpers import eventually_async
from helpers_messages import make_message
from helpers_receiving import ids
from proxy import ChaosProxy, Direction, Link
from receiving_places import PLACES, Place
from servers import NatsServer

pytestmark = pytest.mark.guarantee

BIG = os.environ.get("POSTROOM_GUARANTEES") == "big"
KEYS = 25
RECEIVERS = 3
PAYLOAD = b"x" * 20_000
STALLS = (0.2, 0.5)  # seconds
PATIENCE_SECONDS = 600.0 if BIG else 120.0


@dataclass(frozen=True)
class Size:
    """The size of a run; a receiver holds `hold` unacknowledged messages."""

    messages: int
    restarts: int
    hold: int


BIG_SIZE, EVERYDAY = Size(12_000, 40, 800), Size(400, 2, 150)
# Its stalls are aimed at take-overs, which must be long enough to be hit.
EVERYDAY_NATS = Size(1500, 5, 800)

# Moto redelivers messages out of order after a timeout, and memory has no server.
NAMES = ["nats", "kafka", "redis", "amqp", *(["amqp_classic"] if BIG else [])]

PROGRAM = """
import asyncio, json, os, signal, sys
from postroom.brokers import BrokerOptions, open_broker
from postroom.errors import Unreachable

async def main(url, topic, consumer, extra, path, hold):
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    broker = open_broker(url, BrokerOptions(extra=json.loads(extra)))
    subscription, hand = None, []
    while not stopped.is_set():
        try:
            if subscription is None:
                subscription = await broker.receive([topic], consumer=consumer)
            taken = await subscription.take(25)
            hand += taken
            if len(hand) > int(hold) or not taken:
                done, hand = hand[:50], hand[50:]
                os.write(log, "".join(f"{each.id} {os.getpid()}\\n" for each in done).encode())
                await subscription.ack(done)
            await subscription.extend(hand)
            await asyncio.sleep(0.01)
        except Unreachable:
            hand = []
            await asyncio.sleep(0.05)
    if subscription is not None:
        await subscription.close()
    await broker.close()

asyncio.run(main(*sys.argv[1:]))
"""


class Crew:
    """Receivers of one consumer, and the file in which they write down what they have handled."""

    def __init__(self, place: Place, url: str, path: Path, dice: random.Random, hold: int) -> None:
        extra = json.dumps(place.options.extra)
        words = [url, place.topic, place.named("billing"), extra, str(path), str(hold)]
        self._command = [sys.executable, "-c", PROGRAM, *words]
        self._path, self._dice = path, dice
        self._ended: list[subprocess.Popen[bytes]] = []
        self._crew = [self._new() for _ in range(RECEIVERS)]

    def _new(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command)

    def _lines(self) -> list[list[str]]:
        text = self._path.read_text() if self._path.exists() else ""
        return [line.split() for line in text.splitlines()]

    def handled(self) -> list[str]:
        """The ids in the order in which they were first handled."""
        return list(dict.fromkeys(id for id, _ in self._lines()))

    def restart_one(self) -> None:
        """Stop or kill the receiver that handled something last, and start another."""
        at_work = int(self._lines()[-1][1])
        pids = [process.pid for process in self._crew]
        number = pids.index(at_work) if at_work in pids else self._dice.randrange(RECEIVERS)
        self._crew[number].send_signal(self._dice.choice([signal.SIGTERM, signal.SIGKILL]))
        self._ended.append(self._crew[number])
        self._crew[number] = self._new()

    def end(self) -> None:
        for process in (*self._crew, *self._ended):
            process.kill()
            process.wait()


@contextlib.asynccontextmanager
async def stalling(place: Any, dice: random.Random) -> AsyncIterator[str]:
    """The server is halted for 0.2 to 0.5 seconds, again and again; yields the way to it."""

    async def stall() -> None:
        while True:
            async with place.paused():
                await asyncio.sleep(dice.uniform(*STALLS))
            await asyncio.sleep(dice.choice([0.005, 0.01, 0.02, 0.05, 0.2]))

    task = asyncio.create_task(stall())
    try:
        yield place.url
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


class Aimed(ChaosProxy):
    """Halts a NATS server when a receiver has refused what another left and pulls it: within a few
    milliseconds, when some of it was sent."""

    def __init__(self, server: NatsServer, dice: random.Random) -> None:
        server.require_private()
        super().__init__(server.url)
        self._pid, self._dice, self._one_at_a_time = server.pid, dice, threading.Lock()
        self.stalls = 0

    def _new_link(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Link:
        return _AimedLink(self, self._target, self._flowing, self._losses, reader, writer)

    def stall(self) -> None:
        with self._one_at_a_time:
            time.sleep(self._dice.uniform(0, 0.02))
            os.kill(self._pid, signal.SIGSTOP)
            try:
                self.stalls += 1
                time.sleep(self._dice.uniform(*STALLS))
            finally:
                os.kill(self._pid, signal.SIGCONT)


class _AimedLink(Link):
    def __init__(self, aimed: Aimed, *rest: Any) -> None:
        self._aimed, self._refused = aimed, False
        super().__init__(*rest)

    def _admit(self, data: bytes, direction: Direction) -> tuple[bytes, bool]:
        if direction == "to_server":
            self._refused |= b"-NAK" in data
            if self._refused and b"MSG.NEXT" in data:
                self._refused = False
                asyncio.get_running_loop().run_in_executor(None, self._aimed.stall)
        return super()._admit(data, direction)


@contextlib.asynccontextmanager
async def stalling_at_take_overs(place: Any, dice: random.Random) -> AsyncIterator[str]:
    with Aimed(place._server, dice) as proxy:
        yield proxy.url
        assert proxy.stalls, "no take-over met a stall"


@pytest.mark.parametrize("name", NAMES)
async def test_take_overs_keep_the_order_of_a_slow_server(
    name: str, request: pytest.FixtureRequest, tmp_path: Path, seed: str
) -> None:
    size = BIG_SIZE if BIG else EVERYDAY_NATS if name == "nats" else EVERYDAY
    place: Place = PLACES[name](request.getfixturevalue(PLACES[name].server))
    await place.begin()
    sent = [
        make_message(PAYLOAD, topic=place.topic, key=f"k{number % KEYS}")
        for number in range(size.messages)
    ]
    await place.send(sent)
    dice = random.Random(seed)
    slow = stalling_at_take_overs if name == "nats" else stalling
    async with slow(place, dice) as url:
        crew = Crew(place, url, tmp_path / "handled", dice, size.hold)
        try:
            for number in range(size.restarts):
                due = len(sent) * number // size.restarts
                await eventually_async(lambda due=due: len(crew.handled()) > due, 120)
                crew.restart_one()
            await eventually_async(lambda: len(crew.handled()) == len(sent), PATIENCE_SECONDS)
        finally:
            crew.end()
    order = {id: number for number, id in enumerate(crew.handled())}
    inversions = 0
    for key in {message.key for message in sent}:
        places = [order[message.id] for message in sent if message.key == key]
        inversions += sum(later < earlier for earlier, later in itertools.pairwise(places))
    assert inversions == 0
    assert set(order) == set(ids(sent))
    await place.end()
