"""`amqp://` and `amqps://`: RabbitMQ through aiormq, aio-pika's own foundation, with confirms.

Promise: `Delivered` means that every queue the message was routed to has stored it. A message that
no queue is there for comes back and is not delivered, and while RabbitMQ blocks publishers nothing
is sent. No answer is `Unknown`.

The topic is the routing key: on the exchange named in the URL, or else on RabbitMQ's own, where it
is the name of a queue. Messages of a key go out one after the other: a no to one of them would not
keep back those behind it.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

from postroom.brokers.address import Address
from postroom.brokers.amqp_link import AmqpLink, Limits, Wire, declare_exchange
from postroom.brokers.amqp_receiving import AmqpSubscription
from postroom.brokers.amqp_topology import examine
from postroom.brokers.base import BrokerOptions, Capabilities, Transient
from postroom.brokers.invoke import describe
from postroom.brokers.options import whole_number
from postroom.brokers.pipelined import Pipelined
from postroom.errors import ConfigurationError, MissingDriver, Unreachable
from postroom.messages import check_topic

__all__ = ["AmqpBroker", "open_broker"]

PORTS = {"amqp": 5672, "amqps": 5671}
OPTIONS = (
    *("exchange", "queue_type", "dead_letter_exchange", "prefetch", "heartbeat", "management"),
)
QUEUE_TYPES = ("quorum", "classic")
_EXAMPLE = "amqp://user:password@host:5672/vhost?exchange=events"
_PERMISSION = ("ACCESS_REFUSED", "AuthenticationError", "not allowed", "NOT_ALLOWED")


class AmqpBroker(Pipelined[AmqpLink]):
    """Sends to an exchange and receives from a queue for each consumer.

    Options, in the URL or in `options.extra`: `exchange`; `queue_type` of a consumer's queue,
    quorum or classic; `dead_letter_exchange` of it; `prefetch` (200), how many messages a receiver
    has in hand; `heartbeat` (15 seconds); `management`, where RabbitMQ's management plugin is, for
    `examine`; `tls_ca`, `tls_cert`, `tls_key`, files; `max_outstanding` (4096).
    """

    kind = "RabbitMQ"
    topics_apart = True

    def __init__(self, url: str, options: BrokerOptions | None = None) -> None:
        try:
            import aiormq  # noqa: F401
        except ImportError as error:
            raise MissingDriver("amqp:// needs aio-pika: pip install 'postroom[amqp]'") from error
        options = options or BrokerOptions()
        self._address = Address.of(url, options, ports=PORTS, known=OPTIONS, example=_EXAMPLE)
        wishes = self._address.options
        super().__init__(dataclasses.replace(options, extra=wishes))
        self._exchange = wishes.get("exchange", "")
        self._heartbeat = whole_number(wishes, "heartbeat", 15)
        self._prefetch = whole_number(wishes, "prefetch", 200)
        self._queue_type = wishes.get("queue_type", "quorum")
        if self._queue_type not in QUEUE_TYPES:
            raise ConfigurationError(f"queue_type is quorum or classic, not {self._queue_type!r}")
        self._limits = Limits()

    def __repr__(self) -> str:
        return str(self._address)

    async def receive(self, topics: Sequence[str], *, consumer: str) -> AmqpSubscription:
        """Receive for `consumer`: a queue of its own, bound to the topics on the exchange."""
        if not self._exchange:
            raise ConfigurationError(
                "receiving from RabbitMQ needs an exchange, so that each consumer has a queue of "
                "its own: add ?exchange=NAME to the URL, for the relay too"
            )
        if not topics:
            raise ConfigurationError("there is no topic to receive from")
        subscription = AmqpSubscription(
            self._reach,
            exchange=self._exchange,
            topics=[check_topic(topic) for topic in topics],
            queue=f"{self._exchange}.{consumer}",
            queue_type=self._queue_type,
            dead_letter_exchange=self._address.options.get("dead_letter_exchange"),
            prefetch=self._prefetch,
            timeout_seconds=self._options.send_timeout_seconds,
        )
        await subscription.begin()
        return subscription

    async def examine(self, topics: Sequence[str]) -> list[str]:
        """What about exchange and queues would lose messages, a sentence each."""
        wire = await self._reach(self._options.send_timeout_seconds)
        try:
            return await examine(wire, self._address, self._exchange, topics)
        finally:
            await wire.close()

    async def _connect(self, seconds: float) -> AmqpLink | Transient:
        wire: Wire | None = None
        try:
            wire = await self._open_wire(seconds)
            async with asyncio.timeout(seconds):
                if self._exchange:
                    await declare_exchange(wire, self._exchange)
                channel: Any = await wire.connection.channel()
        except Exception as error:
            if wire is not None:
                wire.abort()
            text = self._address.without_secrets(describe(error))
            barred = any(word in text for word in _PERMISSION)
            code = "not_permitted" if barred else "unreachable"
            return Transient(code, f"cannot connect to RabbitMQ at {self}: {text}", down="broker")
        self.capabilities = Capabilities(max_bytes=self._limits.max_message)
        return AmqpLink(wire, channel, self._exchange, self._limits, max_rows=self._max_rows)

    async def _reach(self, seconds: float) -> Wire:
        """Open a connection, or raise `Unreachable` with the server's reason."""
        try:
            return await self._open_wire(seconds)
        except Exception as error:
            text = self._address.without_secrets(describe(error))
            raise Unreachable(f"cannot connect to RabbitMQ at {self}: {text}") from error

    async def _open_wire(self, seconds: float) -> Wire:
        return await Wire.open(self._address, seconds, heartbeat=self._heartbeat)


def open_broker(url: str, options: BrokerOptions) -> AmqpBroker:
    """The broker for `amqp://host:5672/vhost` or `amqps://host:5671/vhost`."""
    return AmqpBroker(url, options)
