"""A task may be cancelled at any await: no transaction stays open, and no connection is missing.

Every await is tried, in order, until the work comes to its end before it is cancelled: once while
the question is on its way, and once when the answer is there and has not been seen.
"""

import asyncio
import gc
import os
import random
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from pools import POOLS, SIZE, Opener, Pool
from programs import FILE, FileBroker
from scenario import SMALL, publish_scenario
from stepping import Stepper
from sweeping import full_size, tell
from tables import Tables
from worlds import KINDS, QUICK, World

import postroom
from helpers import eventually_async
from postroom.databases.database import Database
from postroom.messages import LANES, new_id
from postroom.outbox.relay import Relay
from postroom.outbox.store import ROOM, Store
from postroom.retry import RetryPolicy

pytestmark = pytest.mark.guarantee

SOURCE = str(Path(postroom.__file__).parent)
SECONDS = 20
MOST_AWAITS = 200
EVERYDAY = 8
# Made so that nobody has a handle on them by which they could be cancelled.
SHELTERED = {
    "Database._open_one",
    "Office._close",
    "_Asyncpg.end",
    "_File.end",
    "_Psycopg.end",
    "_ThroughSQLAlchemy.end",
}
MISSED = "fewer passes this time"


# ── Publishing ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("answered", [False, True], ids=["asked", "answered"])
@pytest.mark.parametrize("name", POOLS)
def test_publishing_is_cancelled_at_every_await(
    name: str, answered: bool, new_world: Callable[[str], World]
) -> None:
    kind, opened = POOLS[name]
    tables = new_world(kind).tables
    ends = asyncio.run(publish_and_cancel(opened, tables, answered))
    print(f"{name}: {ends.total()} awaits, {dict(ends)}")
    assert ends["rolled back"] > 1


async def publish_and_cancel(opened: Opener, tables: Tables, answered: bool) -> Counter[str]:
    ends: Counter[str] = Counter()
    async with opened(tables.url) as pool:
        await pool.write(new_id())
        for at in range(1, MOST_AWAITS):
            stepper, id = Stepper(at, answered=answered), new_id()
            task = asyncio.create_task(stepper.watch(pool.write(id)))
            with suppress(asyncio.CancelledError):
                await asyncio.wait_for(task, SECONDS)
            committed = id in tables.business()
            if not stepper.cancelled:
                assert committed
                return ends
            ends["committed" if committed else "rolled back"] += 1
            await demand_whole(pool, tables, stepper.where)
    raise AssertionError(f"more than {MOST_AWAITS} awaits")


async def demand_whole(pool: Pool, tables: Tables, where: str) -> None:
    """Nothing is open, nobody has a connection, and as many as ever can work at once."""
    gc.collect()  # where SQLAlchemy leaves a cancelled connection
    await eventually_async(lambda: not tables.transactions(), SECONDS)
    await eventually_async(lambda: pool.taken() == 0, SECONDS)
    users = [pool.write(new_id()) for _ in range(SIZE)]
    try:
        await asyncio.wait_for(asyncio.gather(*users), SECONDS)
    except Exception as error:
        raise AssertionError(f"the next users fail after a cancellation in {where}") from error
    assert tables.connections() <= SIZE, where
    assert tables.ids("outbox") == tables.business(), where


# ── A connection of the relay's own ────────────────────────────────────────────────────────────


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    """What was forgotten is not tidied up behind our back."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def use_a_link(url: str) -> None:
    """Connect, change something in a transaction, and once without one."""
    database, owner = Database(url, timeout_seconds=10), str(uuid.uuid4())
    link = await database.connect()
    try:
        store = Store(database.dialect, owner, archive=True)
        fences = await store.take_lanes(link, range(LANES), 30)
        await store.load_lane(link, 0)
        await store.promote(link, fences, 10)
        numbers = [fence.number for fence in fences]
        await link.query(ROOM, "lanes_release", owner=owner, fence_list=numbers)
    finally:
        await link.close()


@pytest.mark.parametrize("answered", [False, True], ids=["asked", "answered"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("no_garbage_collection")
def test_a_link_is_cancelled_at_every_await(
    kind: str, answered: bool, new_world: Callable[[str], World]
) -> None:
    tables = new_world(kind).tables
    others = tables.connections()

    async def cancel_everywhere() -> int:
        for at in range(1, MOST_AWAITS):
            stepper = Stepper(at, answered=answered)
            task = asyncio.create_task(stepper.watch(use_a_link(tables.url)))
            with suppress(asyncio.CancelledError):
                await asyncio.wait_for(task, SECONDS)
            if not stepper.cancelled:
                return at - 1
            try:
                await eventually_async(lambda: not tables.transactions(), SECONDS)
                await eventually_async(lambda: tables.connections() == others, SECONDS)
            except AssertionError as error:
                raise AssertionError(f"left open, cancelled at {stepper.where}") from error
        raise AssertionError(f"more than {MOST_AWAITS} awaits")

    print(f"{kind}: {asyncio.run(cancel_everywhere())} awaits")


# ── The relay ──────────────────────────────────────────────────────────────────────────────────


@asynccontextmanager
async def every_task_of_ours(stepper: Stepper) -> AsyncIterator[None]:
    """All tasks that are made from Postroom's own coroutines are stepped."""

    def make(
        loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **how: Any
    ) -> asyncio.Task[Any]:
        code = getattr(work, "cr_code", None)
        ours = code is not None and code.co_filename.startswith(SOURCE)
        if not ours or code.co_qualname in SHELTERED:
            return asyncio.Task(work, loop=loop, **how)
        task = asyncio.Task(stepper.watch(work), loop=loop, **how)
        task.add_done_callback(lambda _: work.close())  # it may be cancelled before it began
        return task

    loop = asyncio.get_running_loop()
    loop.set_task_factory(make)
    try:
        yield
    finally:
        loop.set_task_factory(None)


def relay_in(world: World) -> Relay:
    return Relay(
        world.tables.url,
        FILE,
        brokers={FILE: FileBroker(str(world.record))},
        retry=RetryPolicy(delays_seconds=(0.05,), attempts=6),
        listen=False,
        **(QUICK | SMALL | {"lease_seconds": 30}),
    )


async def drain(relay: Relay, world: World) -> None:
    """What a scheduler calls, again for what had to wait."""
    while not world.settled():
        await asyncio.create_task(relay.drain_once())
        await asyncio.sleep(0.05)


async def run(relay: Relay, world: World) -> None:
    """What a process does, until all is done."""
    work = asyncio.create_task(relay.run())
    try:
        while not world.settled() and not work.done():
            await asyncio.sleep(0.02)
        relay.stop()
        await work
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


WAYS = {"drain": drain, "run": run}


async def play(world: World, way: str, stepper: Stepper) -> str:
    """One relay that is cancelled somewhere, and a healthy one that finishes; how it ended."""
    good, dead = publish_scenario(world)
    others = world.tables.connections()
    relay, end = relay_in(world), "went on"
    stepper.note = world.note_fault
    async with every_task_of_ours(stepper):
        try:
            await asyncio.wait_for(WAYS[way](relay, world), SECONDS)
        except TimeoutError:
            raise AssertionError("it hangs") from None
        except (Exception, asyncio.CancelledError) as error:
            end = type(error).__name__
        await relay.close()
    await eventually_async(lambda: not world.tables.transactions(), SECONDS)
    await eventually_async(lambda: world.tables.connections() == others, SECONDS)
    if not world.settled():
        world.tables.end_leases()
        await asyncio.wait_for(run(relay_in(world), world), SECONDS)
    if stepper.cancelled:
        world.disturbed.add(os.getpid())
    report = world.judge(every_fault_noted=True)
    assert not report.violations, report
    assert world.settled()
    assert world.delivered() == good
    assert world.tables.dead() == dead
    return end


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("no_garbage_collection")
def test_a_relay_is_cancelled_at_every_await(
    kind: str, way: str, new_world: Callable[[str], World], seed: str
) -> None:
    begun = time.perf_counter()
    world = new_world(kind)
    healthy = Stepper()
    assert asyncio.run(play(world, way, healthy)) == "went on"
    cases = choose(healthy.passed, random.Random(seed))
    ends: Counter[str] = Counter()
    for place, at, answered in cases:
        world.clear()
        stepper = Stepper(at, place=place, answered=answered)
        try:
            end = asyncio.run(play(world, way, stepper))
        except AssertionError as error:
            raise AssertionError(f"cancelled at {place} #{at}, {answered=}: {error}") from error
        ends[end if stepper.cancelled else MISSED] += 1
    tell(f"{kind} {way}", begun, len(cases), f"{len(healthy.passed)} awaits", ends)
    # Later passes depend on who is faster.
    assert ends[MISSED] < len(cases) / 2


def choose(passed: Counter[str], dice: random.Random) -> list[tuple[str, int, bool]]:
    """Each await in the code at its first pass and at another, or one pass of some awaits."""
    if full_size():
        return [
            (place, at, answered)
            for place, passes in sorted(passed.items())
            for at in sorted({1, dice.randint(1, passes)})
            for answered in (False, True)
        ]
    some = dice.sample(sorted(passed), min(EVERYDAY, len(passed)))
    return [(place, dice.randint(1, passed[place]), dice.random() < 0.5) for place in some]
