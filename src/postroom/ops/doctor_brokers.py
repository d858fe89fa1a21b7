"""What `doctor` looks for in brokers: whether they can be reached, and what would lose messages."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from postroom.brokers.base import Broker, BrokerOptions, CanExamine, scheme_of
from postroom.brokers.options import open_brokers
from postroom.ops.doctor import Check, Patient, fine, warning, wrong
from postroom.ops.house import ROOM
from postroom.signals import redact, redact_url

__all__ = ["brokers"]

_WILD = set("*?[")


async def brokers(patient: Patient) -> list[Check]:
    """Each broker of the routes, and the topics that go there."""
    urls = [url for url in patient.routes.urls if scheme_of(url) != "memory"]
    if not urls:
        return [fine("brokers", "not looked at: no broker URL was given")]
    seconds = patient.limits.ping_seconds
    options = BrokerOptions(send_timeout_seconds=seconds)
    opened = open_brokers(urls, options, patient.brokers)
    topics = await _topics(patient)
    found = await asyncio.gather(
        *(_ask(url, opened[url], topics.get(url, []), seconds) for url in urls)
    )
    return [check for checks in found for check in checks]


async def _topics(patient: Patient) -> dict[str, list[str]]:
    """The topics that go to each broker: those of messages that wait or went, and those that a
    route names in full."""
    rows = await patient.link.query(ROOM, "topics_in_use")
    named = [pattern for pattern, _ in patient.routes.patterns if not _WILD & set(pattern)]
    topics: dict[str, list[str]] = {}
    for topic in sorted({str(topic) for (topic,) in rows} | set(named)):
        if url := patient.routes.url_for(topic):
            topics.setdefault(url, []).append(topic)
    return topics


async def _ask(url: str, broker: Broker, topics: Sequence[str], seconds: float) -> list[Check]:
    name = redact_url(url)
    try:
        async with asyncio.timeout(seconds):
            await broker.ping()
    except Exception as error:
        text = redact(str(error) or type(error).__name__).rstrip(".")
        remedy = "check its address and that it is running"
        return [wrong("brokers", f"{name} cannot be reached: {text}", remedy)]
    else:
        reached = fine("brokers", f"{name} can be reached")
        return [reached, *await _look(name, broker, topics, seconds)]
    finally:
        # Nothing was sent, so nothing is lost.
        with contextlib.suppress(Exception):
            async with asyncio.timeout(seconds):
                await broker.close()


async def _look(name: str, broker: Broker, topics: Sequence[str], seconds: float) -> list[Check]:
    """What the broker itself says about its topology, where it can tell."""
    if not isinstance(broker, CanExamine) or not topics:
        return []
    try:
        async with asyncio.timeout(2 * seconds):
            sentences = await broker.examine(topics)
    except Exception as error:
        text = redact(str(error) or type(error).__name__).rstrip(".")
        remedy = "give its user the right to look, or look by hand"
        return [warning("topology", f"{name} cannot be looked at: {text}", remedy)]
    if not sentences:
        return [fine("topology", f"{name} keeps what {_count(topics)} need")]
    return [Check("topology", "warning", redact(text).rstrip(".")) for text in sentences]


def _count(topics: Sequence[str]) -> str:
    return f"topic {topics[0]}" if len(topics) == 1 else f"{len(topics)} topics"
