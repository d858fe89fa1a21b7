"""A process of its own that receives, to be killed or halted while it has messages in hand."""

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator

from helpers_receiving import PATIENCE_SECONDS
from receiving_places import Place

PROGRAM = """
import asyncio, json, sys
from postroom.brokers import BrokerOptions, open_broker
from postroom.errors import Unreachable

def say(taken):
    print(json.dumps([[each.id, each.claim] for each in taken]), flush=True)

async def main(url, topic, consumer, extra):
    broker = open_broker(url, BrokerOptions(extra=json.loads(extra)))
    subscription = await broker.receive([topic], consumer=consumer)
    hand = []
    while len(hand) < 7:
        hand += await subscription.take(7 - len(hand))
    await subscription.ack(hand[:2])
    hand += await subscription.take(1)  # an ack that is not waited for has gone before
    say(hand)
    told = asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    while not told.done():
        try:
            await subscription.extend(hand[2:])
        except Unreachable:
            pass
        await asyncio.sleep(0.1)
    while True:
        try:
            say(await subscription.take(10))
        except Unreachable:
            await asyncio.sleep(0.1)

asyncio.run(main(*sys.argv[1:]))
"""


class Program:
    """Another process that receives: seven messages, of which it acknowledges two, and one more.
    Told to, it goes on."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    async def took(self) -> dict[str, int]:
        """The next messages it has taken, with their claims."""
        assert self._process.stdout is not None
        line = await asyncio.wait_for(
            asyncio.to_thread(self._process.stdout.readline), PATIENCE_SECONDS
        )
        return dict(json.loads(line))

    def go_on(self) -> None:
        assert self._process.stdin is not None
        print(file=self._process.stdin, flush=True)

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)


@contextlib.asynccontextmanager
async def program(place: Place) -> AsyncIterator[Program]:
    words = [place.url, place.topic, place.named("billing"), json.dumps(place.options.extra)]
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield Program(process)
        finally:
            process.kill()
