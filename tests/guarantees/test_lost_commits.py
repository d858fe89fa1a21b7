"""A COMMIT whose reply is lost: the caller is told of an error, and can ask what became of it.

A proxy loses the reply to each request of a publishing transaction in turn, or cuts the connection
just before it. Nothing is ever there twice, nothing is silently lost, and `was_committed` says what
is true. SQLite has no network between: there a commit is done when it returns.
"""

import asyncio
from collections import Counter
from collections.abc import Callable

import pytest
from pools import POOLS, Opener
from tables import Tables
from worlds import World

from lossy import Fault, LossyProxy
from postroom.messages import new_id

pytestmark = pytest.mark.guarantee

# A connection that cannot be made is the pool's affair; nothing is under way yet.
BEFORE_ANYTHING = {"greeting", "password", "login"}


def is_commit(what: str) -> bool:
    return what.startswith("COMMIT")


async def learn(opened: Opener, proxy: LossyProxy) -> list[tuple[str, int]]:
    """What a transaction asks for, and how often."""
    proxy.begin()
    async with opened(proxy.url) as pool:
        await pool.write(new_id())
        passed = Counter(proxy.passed)
    return [
        (what, at)
        for what, passes in passed.items()
        for at in range(1, passes + 1)
        if what not in BEFORE_ANYTHING
    ]


async def publish_once(opened: Opener, proxy: LossyProxy, tables: Tables, fault: Fault) -> str:
    """As a careful caller does it: on an error ask, and try again only what was not committed."""
    id = new_id()
    proxy.begin([fault])
    told = "ok"
    try:
        async with opened(proxy.url) as pool:
            await asyncio.wait_for(pool.write(id), 20)
    except Exception as error:
        told = type(error).__name__
    proxy.end()
    assert fault.happened
    committed = id in tables.business()
    assert committed == (id in tables.ids("outbox"))
    assert committed or told != "ok", "silently lost"
    assert told != "ok" or not is_commit(fault.what), "nobody was told"
    if is_commit(fault.what):
        assert committed == fault.lost
    async with opened(tables.url) as pool:
        assert await pool.ask(id) == committed
        if not committed:
            await pool.write(id)
            assert await pool.ask(id)
    assert tables.ids("outbox") == tables.business()
    assert len(tables.query("SELECT id FROM {p}outbox WHERE id = %s", id)) == 1
    state = "committed" if committed else "not committed"
    return f"{'reply lost' if fault.lost else 'cut before'}: told {told}, {state}"


@pytest.mark.parametrize("name", [name for name, (kind, _) in POOLS.items() if kind != "sqlite"])
def test_the_caller_can_find_out_what_became_of_a_commit(
    name: str, new_world: Callable[[str], World]
) -> None:
    kind, opened = POOLS[name]
    tables = new_world(kind).tables
    ends: Counter[str] = Counter()
    with LossyProxy(tables.url) as proxy:
        requests = asyncio.run(learn(opened, proxy))
        assert any(is_commit(what) for what, _ in requests)
        for lost in (True, False):
            for what, at in requests:
                fault = Fault(what, at, lost)
                try:
                    ends[asyncio.run(publish_once(opened, proxy, tables, fault))] += 1
                except BaseException as error:
                    raise AssertionError(f"{fault}: {error!r}") from error
    print(f"{name}: {len(requests)} requests")
    for end, count in sorted(ends.items()):
        print(f"  {count:4} {end}")
