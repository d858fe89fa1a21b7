"""`postroom doctor` and brokers: what they may bring again after consumers have forgotten it."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import nats
import pytest
from house_tools import House

from postroom.brokers import CanTellHowLong
from postroom.brokers.kafka import KafkaBroker
from postroom.brokers.nats import NatsBroker
from postroom.config import RelaySettings, Routes
from postroom.messages import new_id
from postroom.ops.doctor import Limits, examine
from postroom.signals import redact_url
from servers import KafkaServer, NatsServer, RabbitMQServer

DAY_SECONDS = 86_400
SETTINGS = RelaySettings(keep_inbox_seconds=30 * DAY_SECONDS, keep_delivered_seconds=DAY_SECONDS)


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    """With a consumer that has handled something."""
    made = House(f"sqlite:///{tmp_path}/app.db")
    await asyncio.to_thread(made.install)
    made.sql(
        "INSERT INTO {p}inbox (consumer, message_id, handled_at) VALUES ('billing', '1', %s)",
        time.time_ns() // 1000,
    )
    yield made
    made.close()


async def told(house: House, routes: Routes, name: str = "inbox") -> list[tuple[str, str]]:
    checks = await examine(house.url, SETTINGS, routes, Limits(ping_seconds=20))
    return [(each.level, each.text) for each in checks if each.name == name]


def about(broker: str, found: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    name = redact_url(broker)
    return [(level, text.replace(name, "BROKER")) for level, text in found if name in text]


async def test_nats_tells_how_long_it_keeps_messages(house: House, nats_server: NatsServer) -> None:
    url = nats_server.url
    ages = {f"short{new_id()}": DAY_SECONDS, f"long{new_id()}": 90 * DAY_SECONDS}
    ages[f"ever{new_id()}"] = 0
    missing = f"missing{new_id()}"
    routes = Routes(tuple((topic, url) for topic in (*ages, missing)), None)
    short, long, ever = ages
    async with await nats.connect(url) as client:
        for topic, seconds in ages.items():
            await client.jetstream().add_stream(name=topic, subjects=[topic], max_age=seconds)
        broker = NatsBroker(url)
        assert isinstance(broker, CanTellHowLong)
        assert await broker.keeps([*ages, missing]) == {
            short: DAY_SECONDS,
            long: 90 * DAY_SECONDS,
            ever: None,
        }
        await broker.close()
        found = about(url, await told(house, routes))
        enough = about(url, await told(house, Routes(((short, url),), None)))
        for topic in ages:
            await client.jetstream().delete_stream(topic)
    assert {level for level, _ in found} == {"warning"}
    for text in (
        f"how long BROKER may bring messages of {missing} again: it knows nothing of the topic",
        f"consumers remember for 30 d, and BROKER keeps messages of {long} for 90 d: one that",
        f"consumers remember for 30 d, and BROKER keeps messages of {ever} for ever: one that",
    ):
        assert any(text in each for _, each in found), text
    assert len(found) == 3
    assert enough == [("ok", f"consumers remember longer than BROKER keeps topic {short}")]


async def test_kafka_tells_how_long_it_keeps_messages(
    house: House, kafka_server: KafkaServer
) -> None:
    url = kafka_server.url
    day = str(DAY_SECONDS * 1000)
    wishes: dict[str, dict[str, str]] = {
        f"short{new_id()}": {"retention.ms": day},
        f"long{new_id()}": {"retention.ms": day + "0", "cleanup.policy": "compact,delete"},
        f"ever{new_id()}": {"retention.ms": "-1"},
        f"compacted{new_id()}": {"retention.ms": day, "cleanup.policy": "compact"},
    }
    for topic, wish in wishes.items():
        kafka_server.create_topic(topic, **wish)
    short, long, ever, compacted = wishes
    broker = KafkaBroker(url)
    assert isinstance(broker, CanTellHowLong)
    assert await broker.keeps([*wishes, "missing"]) == {
        short: DAY_SECONDS,
        long: 10 * DAY_SECONDS,
        ever: None,
        compacted: None,
    }
    await broker.close()
    routes = Routes(tuple((topic, url) for topic in (short, ever)), None)
    ((level, text),) = about(url, await told(house, routes))
    assert level == "warning"
    assert f"BROKER keeps messages of {ever} for ever" in text


async def test_what_cannot_be_told_is_not_said_to_be_well(
    house: House, nats_server: NatsServer, rabbitmq_server: RabbitMQServer
) -> None:
    async def inbox(routes: Routes) -> Any:
        return about(routes.urls[0], await told(house, routes))

    ((level, text),) = await inbox(Routes((("orders", rabbitmq_server.url),), None))
    assert (level, "cannot tell" in text) == ("warning", True)
    ((level, text),) = await inbox(Routes((), nats_server.url))
    assert (level, text.endswith("no topics known")) == ("warning", True)
    house.sql("DELETE FROM {p}inbox")  # and where nobody has to remember, nobody is warned
    assert await inbox(Routes((), nats_server.url)) == []


async def test_without_topics_the_topology_is_not_said_to_be_well(
    house: House, nats_server: NatsServer
) -> None:
    found = about(nats_server.url, await told(house, Routes((), nats_server.url), "topology"))
    assert found == [("ok", "BROKER: topology not looked at: no topics known")]


async def test_topics_of_consumers_are_compared_and_the_remedy_is_an_instruction(
    house: House, nats_server: NatsServer
) -> None:
    """A database that only receives has no topics of its own: those its consumers recorded."""
    url, topic, missing = nats_server.url, f"orders{new_id()}", f"missing{new_id()}"
    house.sql(
        "INSERT INTO {p}consumer (name, broker, topics) VALUES ('billing', %s, %s)",
        *(redact_url(url), json.dumps([topic, missing])),
    )
    async with await nats.connect(url) as client:
        await client.jetstream().add_stream(name=topic, subjects=[topic], max_age=90 * DAY_SECONDS)
        checks = await examine(house.url, SETTINGS, Routes((), url), Limits(ping_seconds=20))
        await client.jetstream().delete_stream(topic)
    remedies = {check.remedy for check in checks if check.name == "inbox" and check.level != "ok"}
    assert remedies == {
        f"max_age of NATS's stream of {missing} must be below keep_inbox_seconds (30 d)",
        f"max_age of NATS's stream of {topic} must be below keep_inbox_seconds (30 d): lower it, "
        "or raise keep_inbox_seconds",
    }
    assert not any("no topics known" in check.text for check in checks if check.name == "inbox")
