"""What `status`, its screen and `doctor` show of consumers, also where nothing is published."""

import io
import json
from typing import Any

from house_tools import House
from rich.console import Console

from helpers import eventually_async
from helpers_messages import make_message
from postroom import Consumer, RetryPolicy, signals
from postroom.brokers import memory
from postroom.config import RelaySettings, Routes
from postroom.databases.database import Database
from postroom.messages import Message
from postroom.ops import actions, screen
from postroom.ops.doctor import Check, examine
from postroom.outbox.watch import Publishers, measure


def note(number: int, key: str) -> Message:
    return make_message(b'{"n": %d}' % number, type="note", key=key)


def consumer(house: House, *, attempts: int = 2) -> Consumer:
    """A consumer that buries 13 and keeps retrying 7."""
    broker = f"memory://{house.name}"
    found = Consumer(
        "billing", house.url, broker, topics=["orders"], poll_seconds=0.05,
        retry=RetryPolicy((600.0,), attempts=attempts), worker_name="billing-1", gives="session",
    )  # fmt: skip

    @found.on("note")
    async def bill(event: Any, tx: Any) -> None:
        if event["n"] == 7:
            raise RuntimeError("no")
        if event["n"] == 13:
            raise ValueError("never")

    return found


def shown(renderable: Any, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def on_screen(state: dict[str, Any], **how: Any) -> str:
    about = {"title": "t", "rates": {}, "backlog": [0], "height": 24} | how
    return shown(screen.screen(state, **about))


async def standing(house: House, ready: Any) -> dict[str, Any]:
    async def look() -> dict[str, Any] | None:
        state = await actions.status(house.url)
        return state if state["consumers"] and ready(state["consumers"][0]) else None

    state = await eventually_async(look, retry=())
    assert state is not None
    return state


async def diagnosis(house: House) -> dict[str, list[Check]]:
    found: dict[str, list[Check]] = {}
    for check in await examine(house.url, RelaySettings(), Routes(())):
        found.setdefault(check.name, []).append(check)
    return found


async def test_a_consumer_at_work_is_seen(house: House) -> None:
    """Two keys held, one of them behind a dead letter, in a database that publishes nothing."""
    broker = memory.broker(house.name)
    await broker.send([note(n, "a") for n in range(3)])
    await broker.send([note(7, "b"), note(8, "b"), note(1, "c")])
    async with consumer(house):
        state = await standing(house, lambda one: one["handled"] == 4 and one["held_keys"] == 1)
        (one,) = state["consumers"]
        assert (one["consumer"], one["alive"], one["topics"]) == ("billing", 1, ["orders"])
        assert one["broker"] == f"memory://{house.name}"
        assert one["sources"] == [{"source": "orders", "worker": "billing-1"}]
        assert (one["received"], one["waiting"], one["dead"]) == (6, 2, 0)
        assert one["received_per_second"] > 0
        assert one["handled_per_second"] > 0
        assert one["seen_seconds_ago"] < 30
        assert one["oldest_waiting_seconds"] >= 0
        assert one["lag"] == 0
        page = shown(screen.page(state))
        live = on_screen(state)
        checks = await diagnosis(house)
    for text in (page, live):
        assert "billing" in text
        assert "orders" in text
        assert "lanes" not in text, text
        assert "nobody works" not in text
    assert not state["published"]
    assert [check.text for check in checks["workers"]] == ["1 consumer processes are alive"]
    assert [check.level for check in checks["consumers"]] == ["ok"]
    assert "lanes" not in checks


async def test_dead_letters_of_a_consumer_are_counted_for_it(house: House) -> None:
    broker = memory.broker(house.name)
    await broker.send([note(13, "a"), note(1, "a")])
    async with consumer(house, attempts=1):
        state = await standing(house, lambda one: one["dead"] == 1 and one["waiting"] == 1)
    (one_state,) = state["consumers"]
    assert (one_state["held_keys"], one_state["blocked_keys"]) == (1, 1)
    assert "billing: 1 of its held keys wait behind a dead letter" in shown(screen.page(state))
    checks = await diagnosis(house)
    (letters,) = checks["dead letters"]
    assert "1 of consumer billing" in letters.text


async def test_a_consumer_that_has_stopped_is_named(house: House) -> None:
    """Its process took its row along; the consumer itself is remembered."""
    broker = memory.broker(house.name)
    await broker.send([note(7, "b")])
    async with consumer(house):
        await standing(house, lambda one: one["held_keys"] == 1)
    state = await actions.status(house.url)
    (one,) = state["consumers"]
    assert (one["alive"], one["sources"]) == (0, [])
    assert one["seen_seconds_ago"] < 60
    assert "not alive" in shown(screen.page(state))
    (check,) = (await diagnosis(house))["consumers"]
    assert (check.level, check.text.split(",")[0]) == ("wrong", "consumer billing is not alive")
    assert "1 messages wait in it" in check.text
    assert "postroom consume" in check.remedy


async def test_a_consumer_whose_broker_is_away_says_so(house: House) -> None:
    async with consumer(house) as one:
        await standing(house, lambda one: one["alive"] == 1)
        assert one._tray is not None
        one._tray.broker_trouble = "connection refused"
        state = await standing(house, lambda one: one["trouble"])
        checks = await diagnosis(house)
    assert state["consumers"][0]["trouble"] == "broker: connection refused"
    assert "broker: connection refused" in shown(screen.page(state))
    assert "broker: connection refused" in on_screen(state)
    assert checks["consumers"][0].level == "warning"


async def test_lanes_are_shown_once_something_was_published(house: House) -> None:
    fresh = await actions.status(house.url)
    assert (fresh["published"], fresh["consumers"]) == (False, [])
    assert "workers" not in {name for name, checks in (await diagnosis(house)).items()
                             if checks[0].level != "ok"}  # fmt: skip
    house.publish("x")
    state = await actions.status(house.url)
    assert state["published"]
    assert "nobody works lanes 0-15" in on_screen(state)
    (check,) = (await diagnosis(house))["workers"]
    assert check.text == "messages wait and no relay is alive"


async def test_processes_that_ended_without_stopping_are_measured(house: House) -> None:
    """A killed process leaves its row, and is counted until ten minutes have passed."""
    for name, consumer_name, seconds in (
        ("a", "billing", 30), ("b", "shipping", 30), ("c", "billing", 3600), ("d", "billing", 1),
    ):  # fmt: skip
        house.sql(
            "INSERT INTO {p}worker (incarnation, kind, name, report, seen_at)"
            " VALUES (%s, 'consumer', %s, %s, %s)",
            *(name, name, json.dumps({"consumer": consumer_name}), house.ago(seconds)),
        )
    heard: list[dict[str, Any]] = []
    stop = signals.listen(lambda _, fields: heard.append(fields), only=("inbox.measured",))
    async with consumer(house):
        await eventually_async(lambda: heard)
    stop()
    assert (heard[0]["workers_silent"], heard[0]["lag"]) == (1, 0)
    link = await Database(house.url).connect()
    try:
        assert (await measure(link, Publishers())).workers_silent == 2
    finally:
        await link.close()
