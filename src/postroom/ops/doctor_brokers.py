"""What `doctor` looks for in brokers: whether they can be reached, what would lose messages, and
what they may bring again after consumers have forgotten it.

What cannot be looked at is said to be so; a broker that cannot even be opened is a finding, and
keeps nobody from the others.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from postroom.brokers.base import Broker, BrokerOptions, CanExamine, CanTellHowLong, scheme_of
from postroom.brokers.options import open_brokers
from postroom.brokers.receiving import CanReceive
from postroom.ops.doctor import Check, Patient, fine, warning, wrong
from postroom.ops.house import ROOM
from postroom.ops.screen import age
from postroom.signals import redact, redact_url

__all__ = ["brokers"]

_WILD = set("*?[")
_NAMED = 3  # topics that a sentence names
# What limits for how long a broker may bring a message again, by the scheme of its URL.
_LIMITS = {
    "kafka": "Kafka's retention.ms of",
    "nats": "max_age of NATS's stream of",
    "redis": "the age of entries in Redis's stream of",
    "rediss": "the age of entries in Redis's stream of",
    "amqp": "the message TTL of RabbitMQ's queue for",
    "amqps": "the message TTL of RabbitMQ's queue for",
    "sqs": "MessageRetentionPeriod of the queue for",
}


async def brokers(patient: Patient) -> list[Check]:
    """Each broker of the routes, and the topics that go there."""
    urls = [url for url in patient.routes.urls if not url.startswith("memory:")]
    if not urls:
        return [fine("brokers", "not looked at: no broker URL was given")]
    topics = await _topics(patient)
    _, _, inbox = (await patient.link.query(ROOM, "oldest_kept"))[0]
    remembered = None if inbox is None else patient.settings.keep_inbox_seconds
    found = await asyncio.gather(
        *(
            _check(patient, url, topics.get(url, []), _received(patient, url), remembered)
            for url in urls
        )
    )
    return [check for checks in found for check in checks]


def _received(patient: Patient, url: str) -> list[str]:
    """The topics that consumers of this database receive from a broker, as they recorded them."""
    name = redact_url(url)
    consumers = [one for one in patient.state["consumers"] if one["broker"] == name]
    return sorted({topic for one in consumers for topic in one["topics"]})


async def _check(
    patient: Patient,
    url: str,
    topics: Sequence[str],
    received: Sequence[str],
    remembered: float | None,
) -> list[Check]:
    seconds = patient.limits.ping_seconds
    try:
        scheme_of(url)
        options = BrokerOptions(send_timeout_seconds=seconds)
        broker = open_brokers([url], options, patient.brokers)[url]
    except Exception as error:
        text = f"{redact_url(url)} cannot be opened: {_said(error)}"
        return [wrong("brokers", text, "correct its URL or its options")]
    return await _ask(url, broker, topics, received or topics, seconds, remembered)


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


async def _ask(
    url: str,
    broker: Broker,
    topics: Sequence[str],
    received: Sequence[str],
    seconds: float,
    remembered: float | None,
) -> list[Check]:
    name = redact_url(url)
    try:
        async with asyncio.timeout(seconds):
            await broker.ping()
    except Exception as error:
        remedy = "check its address and that it is running"
        return [wrong("brokers", f"{name} cannot be reached: {_said(error)}", remedy)]
    else:
        found = [fine("brokers", f"{name} can be reached")]
        found += await _look(name, broker, topics, seconds)
        if remembered is not None and isinstance(broker, CanReceive):
            found += await _compare(url, broker, received, seconds, remembered)
        return found
    finally:
        # Nothing was sent, so nothing is lost.
        with contextlib.suppress(Exception):
            async with asyncio.timeout(seconds):
                await broker.close()


async def _look(name: str, broker: Broker, topics: Sequence[str], seconds: float) -> list[Check]:
    """What the broker itself says about its topology, where it can tell."""
    if not isinstance(broker, CanExamine):
        return []
    if not topics:
        return [fine("topology", f"{name}: topology not looked at: no topics known")]
    try:
        async with asyncio.timeout(2 * seconds):
            sentences = await broker.examine(topics)
    except Exception as error:
        remedy = "give its user the right to look, or look by hand"
        return [warning("topology", f"{name} cannot be looked at: {_said(error)}", remedy)]
    if not sentences:
        return [fine("topology", f"{name} keeps what {_count(topics)} need")]
    return [Check("topology", "warning", redact(text).rstrip(".")) for text in sentences]


async def _compare(
    url: str, broker: Broker, topics: Sequence[str], seconds: float, remembered: float
) -> list[Check]:
    """Whether consumers remember what they handled for as long as the broker may bring it again."""
    name, kept = redact_url(url), dict[str, float | None]()
    limit_of = _LIMITS.get(scheme_of(url), "the time the broker keeps messages of")
    must = f"must be below keep_inbox_seconds ({age(remembered)})"
    why = "it has no such limit, or cannot tell"
    if not topics:
        why = "no topics known"
    elif isinstance(broker, CanTellHowLong):
        why = "it knows nothing of the topic, or may not say"
        try:
            async with asyncio.timeout(2 * seconds):
                kept = await broker.keeps(topics)
        except Exception as error:
            why = _said(error)
    found: list[Check] = []
    unknown = [topic for topic in topics if topic not in kept]
    if unknown or not topics:
        what = f" of {_names(unknown)}" if unknown else ""
        found.append(
            warning(
                "inbox",
                f"not known is how long {name} may bring messages{what} again: {why}",
                f"{limit_of} {_names(unknown) or 'what consumers receive'} {must}",
            )
        )
    longer: dict[float | None, list[str]] = {}
    for topic, limit in kept.items():
        if limit is None or limit > remembered:
            longer.setdefault(limit, []).append(topic)
    found += [
        warning(
            "inbox",
            f"consumers remember for {age(remembered)}, and {name} keeps messages of "
            f"{_names(those)} {'for ever' if limit is None else f'for {age(limit)}'}: one that is "
            "read again so late is handled again",
            f"{limit_of} {_names(those)} {must}: lower it, or raise keep_inbox_seconds",
        )
        for limit, those in longer.items()
    ]
    remembers = f"consumers remember longer than {name} keeps {_count(topics)}"
    return found or [fine("inbox", remembers)]


def _said(error: Exception) -> str:
    return redact(str(error) or type(error).__name__).rstrip(".")


def _names(topics: Sequence[str]) -> str:
    more = f" and {len(topics) - _NAMED} others" if len(topics) > _NAMED else ""
    return ", ".join(topics[:_NAMED]) + more


def _count(topics: Sequence[str]) -> str:
    return f"topic {topics[0]}" if len(topics) == 1 else f"{len(topics)} topics"
