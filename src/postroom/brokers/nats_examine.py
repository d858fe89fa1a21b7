"""What about a JetStream stream could lose messages, in sentences for `postroom doctor`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from postroom.brokers.nats_ask import AskingLink, Refusal
from postroom.brokers.nats_durable import ASK_SECONDS
from postroom.brokers.nats_receive import stream_of
from postroom.brokers.nats_tray import PREFIX
from postroom.brokers.nats_wire import no_stream

__all__ = ["dangers", "examine", "keeps"]

# A relay that died is followed by another after its lease, which sends again what had no answer.
DUPLICATE_SECONDS = 60
_NANO = 1_000_000_000


async def examine(link: AskingLink, topics: Sequence[str]) -> list[str]:
    """A sentence for each danger to messages of these topics."""
    found: list[str] = []
    streams: dict[str, list[str]] = {}
    for topic in topics:
        stream = await stream_of(link, topic)
        if stream is None:
            found.append(no_stream(topic).text)
        else:
            streams.setdefault(stream, []).append(topic)
    for stream in streams:
        info = await link.ask(f"STREAM.INFO.{stream}", None, link.now + ASK_SECONDS)
        found += dangers(info, await _durables(link, stream))
    return found


async def keeps(link: AskingLink, topics: Sequence[str]) -> dict[str, float | None]:
    """The seconds after which their streams delete messages of these topics; None: never."""
    ages: dict[str, float | None] = {}
    found: dict[str, float | None] = {}
    for topic in topics:
        stream = await stream_of(link, topic)
        if stream is None:
            continue
        if stream not in ages:
            info = await link.ask(f"STREAM.INFO.{stream}", None, link.now + ASK_SECONDS)
            ages[stream] = int(info["config"].get("max_age") or 0) / _NANO or None
        found[topic] = ages[stream]
    return found


async def _durables(link: AskingLink, stream: str) -> list[Mapping[str, Any]] | None:
    """Consumers of ours; None if we may not look."""
    try:
        answer = await link.ask(f"CONSUMER.LIST.{stream}", None, link.now + ASK_SECONDS)
    except Refusal:
        return None
    consumers = answer.get("consumers") or []
    return [each for each in consumers if str(each.get("name", "")).startswith(PREFIX)]


def dangers(
    info: Mapping[str, Any], durables: Sequence[Mapping[str, Any]] | None = None
) -> list[str]:
    """What a stream's settings can do to messages that nobody has read."""
    return [*_of_stream(info["config"]), *_of_durables(str(info["config"]["name"]), durables or ())]


def _of_stream(config: Mapping[str, Any]) -> Iterator[str]:
    name = f"stream {config['name']}"
    drops = config.get("discard", "old") == "old"
    if age := int(config.get("max_age") or 0) // _NANO:
        yield (
            f"{name} deletes messages after {_span(age)}, read or not; set max_age above the "
            "longest time a consumer may be down"
        )
    for limit, what in (("max_msgs", "messages"), ("max_bytes", "bytes")):
        if drops and int(config.get(limit) or -1) > 0:
            yield (
                f"{name} drops its oldest messages, read or not, above {config[limit]:,} {what}; "
                "set discard to new, so that the relay keeps what finds no room"
            )
    if int(config.get("max_msgs_per_subject") or -1) > 0:
        new = not drops and config.get("discard_new_per_subject")
        if not new:
            yield (
                f"{name} keeps the last {config['max_msgs_per_subject']:,} messages of a subject "
                "only; set max_msgs_per_subject to -1"
            )
    yield from _of_retention(name, str(config.get("retention", "limits")))
    window = int(config.get("duplicate_window") or 0) // _NANO
    if window < DUPLICATE_SECONDS:
        yield (
            f"{name} knows duplicates for {window} s, less than a relay needs to follow one that "
            f"died; set duplicate_window to {DUPLICATE_SECONDS} s or more, or have an inbox"
        )
    if config.get("storage") == "memory":
        yield f"{name} is kept in memory and ends with its server; set storage to file"
    if config.get("no_ack"):
        yield f"{name} answers nobody who publishes (no_ack), so no message counts as delivered"
    if int(config.get("num_replicas") or 1) == 1:
        yield f"{name} has one copy; with a cluster set replicas to 3, so that a lost disk is none"


def _of_retention(name: str, retention: str) -> Iterator[str]:
    if retention == "interest":
        yield (
            f"{name} has interest retention and drops what comes while no consumer exists; "
            "start each consumer once before the relay, or set retention to limits"
        )
    elif retention == "workqueue":
        yield (
            f"{name} has workqueue retention, so a topic can have one consumer only; "
            "set retention to limits if a second one is to get everything too"
        )


def _of_durables(stream: str, durables: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for each in durables:
        config = each.get("config", {})
        if config.get("priority_policy") != "pinned_client":
            yield (
                f"consumer {each['name']} of stream {stream} gets one message at a time, because "
                "it was made by a server before NATS 2.11; delete it when all it was sent is "
                "acknowledged, and start it again"
            )


def _span(seconds: int) -> str:
    for unit, length in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds} s"
