"""Kill -9 of API, relays and exchange under load: each order is in the exchange's book once,
whoever is asked gives the same bytes, and nothing stays with a relay that is dead.

Every day a few orders and kills on one database; POSTROOM_GUARANTEES=big: 20,000 orders and 100
kills on each.
"""

import asyncio
import contextlib
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from helpers import eventually_async
from postroom.gateway.children import Child
from postroom.gateway.exchange import Book, Manners
from postroom.gateway.load import Load
from postroom.gateway.serving import free_port
from postroom.leasing import lease_us
from stages import MICROSECONDS, Stage, Stages

pytestmark = pytest.mark.guarantee

BIG = os.environ.get("POSTROOM_GUARANTEES") == "big"
ORDERS, KILLS = (20_000, 100) if BIG else (150, 3)
KINDS = ["postgresql", "mariadb", "sqlite"] if BIG else ["postgresql"]
# What a dead relay had is worked again within `lease_seconds` of its death: its lease is shorter by
# as much as another may take to find it over. It takes longer only while every relay is dead, as an
# answer does while every gateway is. Every day the machine may be as slow as it likes.
LEASE_SECONDS = 4
LATE_SECONDS = LEASE_SECONDS if BIG else 15 * LEASE_SECONDS
ANSWER_SECONDS = 4 * LEASE_SECONDS if BIG else 60 * LEASE_SECONDS
ASKING = 8  # clients that compare answers
MANNERS = "latency_seconds=0.002,rejects=0.05,silent=0.002,lost=0.002,twice=0.02,hang_seconds=2"
SETTINGS = {
    "POSTROOM_RELAY_LEASE_SECONDS": str(LEASE_SECONDS),
    "POSTROOM_RELAY_SEND_TIMEOUT_SECONDS": "1.5",
    # More attempts than six: how often a send takes too long is a matter of the machine.
    "POSTROOM_RELAY_RETRY_DELAYS_SECONDS": "0.3, 0.6, 1.2, 2.4, 4.8, 4.8, 4.8, 4.8, 4.8, 4.8, 4.8",
    "POSTROOM_RELAY_BATCH_ROWS": "16",
    "POSTROOM_EXCHANGE_TIMEOUT_SECONDS": "0.7",
}
NOW = {
    "postgresql": MICROSECONDS["postgresql"].format("clock_timestamp()"),
    "mariadb": MICROSECONDS["mariadb"].format("UTC_TIMESTAMP(6)"),
    "sqlite": "CAST((julianday('now') - 2440587.5) * 86400000000 AS INTEGER)",
}
SEED = int(os.environ.get("POSTROOM_SEED") or random.randrange(10**6))
POSTROOM = ("-m", "postroom.ops.cli")


@contextlib.asynccontextmanager
async def running(
    stage: Stage, folder: Path, book: Path
) -> AsyncIterator[tuple[list[str], list[Child]]]:
    """Two gateways, two relays and an exchange, each a process."""
    ports = [free_port(), free_port()]
    exchange = free_port()
    environment = SETTINGS | {"POSTROOM_EXCHANGE_URL": f"http://127.0.0.1:{exchange}"}
    database = ("--database", stage.url)
    adapter = ("--broker", "call:postroom.gateway.adapter:send")
    served = ("-m", "postroom.gateway.exchange", str(book), str(exchange), MANNERS)
    programs = {"exchange": served}
    for number, port in enumerate(ports):
        gateway = ("gateway", "--no-relay", "--port", str(port))
        programs[f"api {number}"] = (*POSTROOM, *gateway, *database)
        programs[f"relay {number}"] = (*POSTROOM, "relay", *adapter, *database)
    async with contextlib.AsyncExitStack() as stack:
        children = [
            await stack.enter_async_context(
                Child(name, program, environment=environment, log=folder / f"{name}.log")
            )
            for name, program in programs.items()
        ]
        yield [f"http://127.0.0.1:{port}" for port in ports], children


async def kill_some(
    children: list[Child], dice: random.Random, load: Load, over: asyncio.Event
) -> None:
    """So many kills, spread over the load: none before it went on since the last, however slow the
    machine is."""
    done = 0
    while done < KILLS:
        share = ORDERS * (done + 1) / (KILLS + 2)
        while len(load.told.ids) < share and not over.is_set():
            await asyncio.sleep(0.02)
        child = dice.choice(children)
        deaths = child.deaths
        if child.kill():
            while child.deaths == deaths:
                await asyncio.sleep(0.01)
            done += 1
        await asyncio.sleep(dice.random() * 0.5)


class Watch:
    """Looks at the lanes all the while: how long any was not worked, while there was a relay that
    lived and had said so. A dead relay may have worked its lanes until its lease was renewed for
    the last time; one that gave a lane up, until then."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.longest_seconds = 0.0
        self.dead = 0  # looks at which a lane was with a dead relay

    async def look(self) -> None:
        kind = self._stage.database
        us, now = MICROSECONDS[kind].format, NOW[kind]
        lanes = f"SELECT lane, {now}, {us('lease_until')} FROM {{p}}lane"
        relays = f"SELECT name, {us('started_at')} FROM {{p}}worker WHERE kind = 'relay'"
        given_up: dict[int, int] = {}
        while True:
            up = [begun for name, begun in self._stage.query(relays) if lives(name)]
            found = self._stage.query(lanes)
            given_up = {
                lane: given_up.get(lane, now_us) for lane, now_us, ends_us in found if not ends_us
            }
            for lane, now_us, ends_us in found:
                if ends_us and now_us <= ends_us:
                    continue
                self.dead += bool(ends_us)
                left_us = ends_us - lease_us(LEASE_SECONDS) if ends_us else given_up[lane]
                if up:
                    waits = (now_us - max(left_us, min(up))) / 1e6
                    self.longest_seconds = max(self.longest_seconds, float(waits))
            await asyncio.sleep(0.05)


def lives(name: str) -> bool:
    """Whether there is such a process: a relay is called by its machine and number."""
    _, _, number = name.rpartition(":")
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(number), 0)
        return True
    return False


@pytest.mark.parametrize("kind", KINDS)
async def test_each_order_is_in_the_book_once(kind: str, stages: Stages, tmp_path: Path) -> None:
    stage = stages[kind]
    stage.query("DELETE FROM {p}meta WHERE name = 'routes'")
    stage.query("DELETE FROM {p}lane_batch")
    book = tmp_path / "book.db"
    dice = random.Random(SEED)
    print(f"POSTROOM_SEED={SEED}")
    async with running(stage, tmp_path, book) as (urls, children):
        load = Load(urls, orders=ORDERS, concurrency=16, repeats=0.2, seed=SEED)
        over, watch = asyncio.Event(), Watch(stage)
        watching = asyncio.create_task(watch.look())
        killing = asyncio.create_task(kill_some(children, dice, load, over))
        told = await load.run()
        over.set()
        await killing
        await all_ended(stage)
        watching.cancel()
        differing = await told_differently(urls, load.keys())
        deaths = {child.name: child.deaths for child in children}
    assert told.wrong == []
    assert differing == [], "identical bytes, whoever is asked"
    assert len(told.ids) == ORDERS
    column = "`key`" if kind == "mariadb" else "key"
    rows = stage.query(f"SELECT {column}, id, state FROM {{p}}ledger")
    assert {key: str(id) for key, id, _ in rows} == told.ids
    states = {str(id): state for _, id, state in rows}
    ours = Book(str(book))
    counts, entries = ours.counts(), Counter(ours.ids())
    rejected = {id for id in entries if ours.find(id)["status"] == "rejected"}  # type: ignore[index]
    ours.close()
    print(f"{kind}: {Counter(states.values())}, {counts}, deaths {deaths}, {told.statuses}")
    print(
        f"{kind}: {ORDERS} keys told alike; {watch.dead} looks at a lane of a dead relay, none "
        f"waited for more than {watch.longest_seconds:.2f} of {LEASE_SECONDS} s; longest answer of "
        f"a gateway {max(told.seconds):.1f} s, longest from a first try to a clear one "
        f"{told.longest_seconds:.1f} s"
    )
    assert watch.longest_seconds < LATE_SECONDS, "a key is stuck no longer than its lease"
    assert told.longest_seconds < ANSWER_SECONDS
    assert entries == dict.fromkeys(told.ids.values(), 1), "each order once, and nothing else"
    assert {id for id, state in states.items() if state == "failed"} == rejected
    assert {id for id, state in states.items() if state == "succeeded"} == set(entries) - rejected
    assert sum(deaths.values()) >= KILLS
    assert Manners.parse(MANNERS).refuses_copies


async def told_differently(urls: list[str], keys: list[str]) -> list[str]:
    """The keys of which gateways say different things, all orders having ended."""
    todo, found = iter(keys), []

    async def compare(client: httpx.AsyncClient) -> None:
        for key in todo:
            answers = {await ask(client, f"{url}/do/order/{key}") for url in urls}
            if len(answers) != 1:
                found.append(key)

    async with httpx.AsyncClient(timeout=120) as client, asyncio.TaskGroup() as group:
        for _ in range(ASKING):
            group.create_task(compare(client))
    return found


async def ask(client: httpx.AsyncClient, url: str) -> bytes:
    async def once() -> bytes:
        answer = await client.get(url)
        assert answer.status_code == 200
        return answer.content

    retry = (httpx.TransportError, AssertionError)  # it may have been killed a moment ago
    return await eventually_async(once, 180, retry=retry)


async def all_ended(stage: Stage) -> None:
    open_ones = "SELECT count(*) FROM {p}ledger WHERE finished_at IS NULL"
    last, since = -1, time.monotonic()
    while (left := stage.query(open_ones)[0][0]) > 0:
        if left != last:
            last, since = left, time.monotonic()
        assert time.monotonic() - since < 180, f"{left} orders have not come to their end"
        await asyncio.sleep(0.1)
