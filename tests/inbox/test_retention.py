"""How long a consumer remembers: what is pruned is a new message to it, and nothing else is."""

import asyncio

import pytest
from consuming import House, note

from postroom.config import RelaySettings
from postroom.databases.database import Database
from postroom.outbox.pruning import prune

KEEP = RelaySettings().keep_inbox_seconds
A_MINUTE = 60
EARLIER = {
    "postgresql": "handled_at - %s * interval '1 second'",
    "mariadb": "handled_at - INTERVAL %s SECOND",
    "sqlite": "handled_at - %s * 1000000",
}


def let_pass(house: House, seconds: int) -> None:
    """As if that much time had gone by: the records are so much older."""
    earlier = EARLIER[house.stage.database]
    house.stage.query(f"UPDATE {{p}}inbox SET handled_at = {earlier}", seconds)


async def tidy(house: House) -> None:
    """Prune as a relay with default settings does."""
    link = await Database(house.stage.url).connect()
    await prune(link, RelaySettings(), asyncio.Event(), lambda: None)
    await link.close()


async def test_a_copy_a_minute_before_the_end_is_skipped(house: House) -> None:
    message, billing = note("k", 1), house.applying()
    await house.send(message)
    assert (await billing.drain_once()).handled == 1
    let_pass(house, KEEP - A_MINUTE)
    await tidy(house)
    await house.send(message)
    done = await billing.drain_once()
    assert (done.handled, done.duplicates) == (0, 1)
    assert house.effects() == [("k", 1)]


@pytest.mark.parametrize("pruned", [True, False], ids=["pruned", "not pruned yet"])
async def test_a_copy_a_minute_after_the_end(house: House, pruned: bool) -> None:
    """Handled again, once, and remembered anew; as long as nobody has pruned it is skipped. Copies
    that came in between do not make the memory last longer."""
    message, billing = note("k", 1), house.applying()
    await house.send(message)
    await billing.drain_once()
    let_pass(house, KEEP - A_MINUTE)
    await house.send(message)
    assert (await billing.drain_once()).duplicates == 1
    let_pass(house, 2 * A_MINUTE)
    if pruned:
        await tidy(house)
        assert house.inbox() == []
    await house.send(message, message)
    done = await billing.drain_once()
    assert (done.handled, done.duplicates) == ((1, 1) if pruned else (0, 2))
    assert house.effects() == [("k", 1)] * (2 if pruned else 1)
    await tidy(house)
    assert house.inbox() == ([message.id] if pruned else [])
