"""Which brokers and topics are down, and when each is tried again.

Promise: a destination that is back is used within `CAP_SECONDS` and a second, and one that is down
receives one message at a time as a probe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from postroom import signals
from postroom.outbox.rules import Breaker, Down
from postroom.signals import redact, redact_url

__all__ = ["Destinations", "topic_name"]

# A probe begins within this time after it is due. Without messages no probe begins, and the state
# of the destination is unknown.
PROBE_GRACE_SECONDS = 5.0


class Destinations:
    """The breakers of a relay's brokers, by URL, and of topics in trouble, by `topic_name`."""

    def __init__(
        self, urls: Iterable[str], clock: Callable[[], float], randomness: Callable[[], float]
    ) -> None:
        self._urls = list(urls)
        self._clock = clock
        self._random = randomness
        self.breakers: dict[str, Breaker] = {}
        self.unreachable: dict[str, str] = {}

    def all_down(self) -> bool:
        """Whether no broker can be tried now: then there is no sense in reading."""
        now = self._clock()
        return all(
            (breaker := self.breakers.get(url)) is not None and breaker.is_open(now)
            for url in self._urls
        )

    def retry_in(self) -> float:
        """Seconds until some broker may be tried again, when all are down."""
        now = self._clock()
        breakers = [self.breakers.get(url) for url in self._urls]
        times = [b.retry_at - now for b in breakers if b is not None and b.retry_at is not None]
        return max(0.01, min(times, default=0.01))

    def later_seconds(self, url: str | None, topic: str) -> float:
        """How long a message of a destination that is down waits before it is looked at again.

        It is due right after the destination may be tried; messages come spread over a second.
        """
        now = self._clock()
        found = [self.breakers.get(name) for name in (url or "", topic_name(topic))]
        times = [breaker.seconds_left(now) for breaker in found if breaker is not None]
        return max([0.5, *times]) + self._random()

    def down(self) -> dict[str, Breaker]:
        """The destinations that are down, by their names for people."""
        return {redact_url(name): b for name, b in self.breakers.items() if b.retry_at is not None}

    def brokers_down(self) -> dict[str, str]:
        """The brokers that cannot take messages now, each with the reason."""
        now = self._clock()
        down = {redact_url(url): text for url, text in list(self.unreachable.items())}
        for url in self._urls:
            breaker = self.breakers.get(url)
            if breaker is not None and breaker.is_open(now):
                down.setdefault(redact_url(url), redact(f"{breaker.code}: {breaker.text}"))
        return down

    def topics_down(self) -> dict[str, str]:
        """The topics that cannot take messages now, each with the reason. No ping asks for a topic,
        so it is down until a message gets through, or no probe has begun for long."""
        since = self._clock() - PROBE_GRACE_SECONDS
        return {
            name: redact(f"{breaker.code}: {breaker.text}")
            for name, breaker in list(self.breakers.items())
            if name not in self._urls and breaker.is_open(since)
        }

    def is_down(self, name: str, down: Down) -> None:
        """A message was refused because of its destination: a new outage, or the same one still."""
        breaker = self.breakers.setdefault(name, Breaker())
        known = breaker.retry_at is not None
        seconds = breaker.failed(self._clock(), down.code, down.text, self._random)
        if known:
            signals.emit(
                "destination.retried",
                destination=redact_url(name),
                error_code=down.code,
                error=down.text,
                retry_in_seconds=round(seconds, 3),
            )
            return
        signals.emit(
            "destination.down",
            destination=redact_url(name),
            error_code=down.code,
            error=down.text,
            retry_in_seconds=round(seconds, 3),
        )

    def is_up(self, name: str, count: int) -> None:
        """Record that the destination has accepted `count` messages."""
        breaker = self.breakers.get(name)
        if breaker is None:
            return
        if breaker.succeeded(count):
            signals.emit("destination.up", destination=redact_url(name))
        if breaker.allowance is None:
            del self.breakers[name]

    def learnt_nothing(self, name: str) -> None:
        """A probe met another trouble on its way."""
        if (breaker := self.breakers.get(name)) is not None:
            breaker.learnt_nothing(self._clock())

    def pinged(self, unreachable: dict[str, str]) -> None:
        """Store the result of pings; a broker that answered gets a probe of one message now."""
        self.unreachable = unreachable
        for url in self._urls:
            if url not in unreachable and (breaker := self.breakers.get(url)) is not None:
                breaker.answered(self._clock())


def topic_name(topic: str) -> str:
    """The name of a topic among destinations."""
    return f"topic {topic}"
