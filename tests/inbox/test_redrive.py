"""A dead letter of a consumer goes back to that consumer, and to nobody else."""

from collections import Counter
from typing import Any

import pytest
from consuming import House, apply, note, notes

from helpers import eventually_async
from postroom import Consumer
from postroom.dead_letters import redriver
from postroom.errors import Refused
from postroom.ops import actions
from postroom.ops import jobs as jobs_room
from postroom.ops.jobs import Wish
from postroom.ops.prune import prune
from postroom.retry import RetryPolicy

ONCE = RetryPolicy(attempts=1)


def dying(house: House, name: str, *bad: int, **how: Any) -> Consumer:
    """A consumer that cannot handle these numbers, and buries them at once."""
    consumer = house.consumer(name, retry=ONCE, **how)

    @consumer.on("note")
    async def handle(event: Any, tx: Any) -> None:
        if event["n"] in bad:
            raise RuntimeError("no")
        await apply(tx, event, name)

    return consumer


async def test_it_goes_first_and_its_key_follows(house: House) -> None:
    batch = notes(keys=2, each=4)
    await house.send(*batch)
    assert (await dying(house, "billing", 1).drain_once()).buried == 2
    assert house.by_key() == {"k0": [0], "k1": [0]}
    letter = next(each for each in batch if each.key == "k0" and b'"n": 1' in each.payload)
    done = await actions.retry(house.stage.url, letter.id, why="mended")
    assert done.in_order
    await house.send(note("k0", 4))
    assert (await dying(house, "billing").drain_once()).handled == 4
    assert house.by_key() == {"k0": [0, 1, 2, 3, 4], "k1": [0]}
    states = Counter(each["state"] for each in house.letters())
    assert states == {"resolved": 1, "dead": 1}
    # The broker was not asked to send anything again, nor was anybody else.
    assert (await house.applying("shipping").drain_once()).handled == 9
    assert (await house.applying("shipping").drain_once()).duplicates == 0


async def test_one_that_dies_again_is_the_same_letter(house: House) -> None:
    sent = note("k", 1)
    await house.send(sent)
    for redrives in range(3):
        await dying(house, "billing", 1).drain_once()
        (letter,) = house.letters()
        assert letter["state"] == "dead"
        assert len(letter["history"]) == redrives + 1
        await actions.retry(house.stage.url, sent.id)
    assert (await dying(house, "billing").drain_once()).handled == 1
    assert house.letters()[0]["state"] == "resolved"
    assert house.held() == []


async def test_what_was_set_aside_comes_back_and_order_is_given_up(house: House) -> None:
    batch = [note("k", n) for n in range(4)]
    await house.send(*batch)
    await dying(house, "billing", 1, on_dead="continue").drain_once()
    assert house.by_key() == {"k": [0, 2, 3]}
    done = await actions.retry(house.stage.url, batch[1].id)
    assert not done.in_order
    assert (await dying(house, "billing").drain_once()).handled == 1
    assert house.by_key() == {"k": [0, 2, 3, 1]}


async def test_a_discarded_one_lets_its_key_go_on(house: House) -> None:
    batch = [note("k", n) for n in range(4)]
    await house.send(*batch)
    await dying(house, "billing", 1).drain_once()
    await actions.discard(house.stage.url, batch[1].id, why="not needed")
    assert (await dying(house, "billing").drain_once()).handled == 2
    assert house.by_key() == {"k": [0, 2, 3]}
    assert house.letters()[0]["state"] == "discarded"
    with pytest.raises(Refused, match="discarded already"):
        await actions.retry(house.stage.url, batch[1].id)
    # A copy of it is a duplicate: somebody has decided.
    await house.send(batch[1])
    assert (await dying(house, "billing").drain_once()).duplicates == 1


async def test_two_consumers_with_the_same_letter(house: House) -> None:
    sent = note("k", 1)
    await house.send(sent)
    for name in ("billing", "shipping"):
        await dying(house, name, 1).drain_once()
    with pytest.raises(Refused, match="consumer:billing and of consumer:shipping"):
        await actions.retry(house.stage.url, sent.id)
    await actions.retry(house.stage.url, sent.id, source="consumer:shipping")
    for name in ("billing", "shipping"):
        await dying(house, name).drain_once()
    assert house.effects("billing") == []
    assert house.effects("shipping") == [("k", 1)]
    listed = await actions.dead_list(house.stage.url)
    assert [each["source"] for each in listed] == ["consumer:billing"]
    shown = await actions.dead_show(house.stage.url, sent.id, source="consumer:shipping")
    assert (shown["state"], shown["payload"]) == ("resolved", {"key": "k", "n": 1})


async def test_many_at_once_as_a_job(house: House) -> None:
    await house.send(*notes(keys=3, each=3))
    await dying(house, "billing", 0, 1).drain_once()
    await dying(house, "shipping", 0).drain_once()
    url = house.stage.url
    wish = Wish(source="consumer:billing", rate=1000)
    groups = await jobs_room.count(url, "redrive", wish)
    assert sum(group["count"] for group in groups) == 3
    job = await jobs_room.begin(url, "redrive", wish, why=None)
    job = await jobs_room.work(url, job.id)
    assert (job.state, job.queued) == ("done", 3)
    assert (await dying(house, "billing").drain_once()).handled == 9
    assert house.by_key() == {f"k{key}": [0, 1, 2] for key in range(3)}
    assert house.effects("shipping") == []
    told = (await jobs_room.show(url, job.id)).told()
    assert told["delivered"] == 3
    left = await jobs_room.count(url, "redrive", Wish())
    assert [(group["source"], group["count"]) for group in left] == [("consumer:shipping", 3)]


@pytest.mark.parametrize("key", [None, "k"])
async def test_what_it_still_has_is_not_forgotten(house: House, key: str | None) -> None:
    """A copy of a dead letter that came long ago is a duplicate, so that it is applied once. The
    statement is the relay's own."""
    sent, old = note(key, 1), note(key, 0)
    await house.send(old, sent)
    assert (await dying(house, "billing", 1).drain_once()).buried == 1
    (pruned,) = await prune(house.stage.url, {"inbox": 0}, given=True)
    assert (pruned.count, pruned.left) == (1, 0)
    assert house.inbox() == [sent.id], "the other was handled"
    await house.send(sent)
    done = await dying(house, "billing", 1).drain_once()
    assert (done.handled, done.duplicates) == (0, 1)
    await actions.retry(house.stage.url, sent.id)
    assert (await dying(house, "billing").drain_once()).handled == 1
    assert [n for _, n in house.effects()] == [0, 1]
    # Then it is remembered from now on, and forgotten in its time.
    (pruned,) = await prune(house.stage.url, {"inbox": 0}, given=True)
    assert (pruned.count, house.inbox()) == (1, [])


async def test_a_rule_of_a_consumer_redrives_its_own_letters_alone(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    await house.send(*notes(keys=2, each=3))
    assert (await dying(house, "billing", 1).drain_once()).buried == 2
    assert (await dying(house, "other", 1).drain_once()).buried == 2
    monkeypatch.setattr(redriver, "ROUND_SECONDS", 0.05)
    rule = {"redrive_codes": "RuntimeError", "redrive_after_seconds": 0}
    async with dying(house, "billing", **rule, redrive_per_minute=60_000):
        await eventually_async(lambda: len(house.effects("billing")) == 6)
    assert house.by_key("billing") == {"k0": [0, 1, 2], "k1": [0, 1, 2]}
    left = await actions.dead_list(house.stage.url)
    assert {letter["source"] for letter in left} == {"consumer:other"}
    entries = await actions.audit_list(house.stage.url, what="dead.redrive")
    assert [entry["why"] for entry in entries] == ["RuntimeError, redrive 1 of 3"] * 2
