"""The durable consumer of a stream: what it is like, and how it comes to be.

Promise: it is changed only when a receiver is opened, never behind the back of others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from postroom.brokers.nats_ask import AskingLink, Refusal

__all__ = ["Durable"]

ASK_SECONDS = 5.0
GROUP = "postroom"
NANO = 1_000_000_000
_NO_CONSUMER, _NO_STREAM = 10014, 10059
MISSING = (_NO_CONSUMER, _NO_STREAM)
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Durable:
    """What a durable consumer is to be like."""

    name: str
    topics: tuple[str, ...]
    ack_wait_seconds: float
    pin_seconds: float
    max_unacked: int

    def of(self, topics: Iterable[str]) -> Durable:
        """The same for some of the topics."""
        return replace(self, topics=tuple(topics))

    def config(self, *, pins: bool) -> dict[str, Any]:
        """As the API wants it. One topic is written as servers before 2.10 know it."""
        config: dict[str, Any] = {
            "durable_name": self.name,
            "deliver_policy": "all",
            "ack_policy": "explicit",
            "replay_policy": "instant",
            "ack_wait": int(self.ack_wait_seconds * NANO),
            "max_deliver": -1,
            "max_ack_pending": self.max_unacked if pins else 1,
        }
        if len(self.topics) == 1:
            config["filter_subject"] = self.topics[0]
        else:
            config["filter_subjects"] = list(self.topics)
        if pins:
            config["priority_policy"] = "pinned_client"
            config["priority_groups"] = [GROUP]
            config["priority_timeout"] = int(self.pin_seconds * NANO)
        return config

    async def make(self, link: AskingLink, stream: str, *, update: bool) -> bool:
        """Make it on a stream if it is missing, or is to be changed; whether it pins."""
        until = link.now + ASK_SECONDS
        found = await self._existing(link, stream, until)
        if found is None or update:
            # One that an older server made stays as it is: others may be at it without pins.
            pins = _can_pin(link) and (found is None or _pins(found))
            found = await self._create(link, stream, until, pins=pins)
            if pins and not _pins(found):
                # The server that has the stream is older than the one we are connected to.
                found = await self._create(link, stream, until, pins=False)
        return _pins(found)

    async def info(self, link: AskingLink, stream: str, until: float) -> dict[str, Any]:
        """What the server knows about it."""
        return await link.ask(f"CONSUMER.INFO.{stream}.{self.name}", None, until)

    async def _existing(self, link: AskingLink, stream: str, until: float) -> dict[str, Any] | None:
        try:
            return await self.info(link, stream, until)
        except Refusal as refusal:
            if refusal.number != _NO_CONSUMER:
                raise
            return None

    async def _create(
        self, link: AskingLink, stream: str, until: float, *, pins: bool
    ) -> dict[str, Any]:
        body = {"stream_name": stream, "config": self.config(pins=pins)}
        return await link.ask(f"CONSUMER.CREATE.{stream}.{self.name}", body, until)


def _pins(consumer: dict[str, Any]) -> bool:
    return bool(consumer["config"].get("priority_policy") == "pinned_client")


def _can_pin(link: AskingLink) -> bool:
    version = str(link.client._server_info.get("version", ""))
    return [int(number) for number in _NUMBER.findall(version)[:2]] >= [2, 11]
