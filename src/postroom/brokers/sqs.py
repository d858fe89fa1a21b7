"""`sqs://`: Amazon SQS through aiobotocore, FIFO and standard queues, to send and to receive.

Promise: `Delivered` means that SQS named the message as stored. In a FIFO queue the key is the
message group, so its order stays, and the id is what SQS deduplicates on for five minutes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from postroom.brokers.aws_link import Refusal
from postroom.brokers.aws_sending import AwsSender
from postroom.brokers.aws_wire import Entry
from postroom.brokers.base import BrokerOptions, Outcome, Transient
from postroom.brokers.sqs_receiving import SqsSubscription
from postroom.errors import ConfigurationError, InvalidMessage, Unreachable

__all__ = ["SqsBroker", "open_broker"]

_NOBODY = "postroom-ping"


class SqsBroker(AwsSender):
    """Sends to queues, one for each topic or one for all, as the URL's name says.

    Credentials come from the URL, from `options.extra`, or from where AWS's tools look for them.
    """

    method = "send_message_batch"

    async def receive(self, topics: Sequence[str], *, consumer: str) -> SqsSubscription:
        """Receive from the queues of these topics. A queue has one consumer, whose processes share
        its messages; let SNS fill one for each consumer, named with {consumer}."""
        queues: dict[str, str] = {}
        for topic in topics:
            name = self.address.name_of(topic, consumer)
            if name not in queues.values():
                queues[topic] = name
        found = [(topic, name, await self._url(name)) for topic, name in queues.items()]
        return SqsSubscription(self.link, self.address, found)

    async def ping(self) -> None:
        """Ask for a queue: that there is none is an answer too, and so is that we may not ask."""
        name = self.address.template if "{" not in self.address.template else _NOBODY
        if self._closed:
            raise Unreachable(f"the broker {self} was closed")
        deadline = self.now() + self._seconds
        try:
            answer = await self.place(name, deadline)
        except Refusal:
            return
        if not isinstance(answer, str) and getattr(answer, "down", None) != "topic":
            raise Unreachable(getattr(answer, "text", str(answer)))

    async def examine(self, topics: Sequence[str]) -> list[str]:
        """What of the queues would lose messages: none there, or nowhere to put bad ones."""
        named: dict[str, str] = {}
        found: list[str] = []
        for topic in topics:
            try:
                named.setdefault(self.address.name_of(topic, "consumer"), topic)
            except InvalidMessage as error:
                found.append(f"topic {topic}: {error}")
        if "{consumer}" in self.address.template:
            return found  # each consumer has its own, and nobody says here which there are
        looks = await asyncio.gather(*(self._look(name, topic) for name, topic in named.items()))
        return found + [sentence for sentences in looks for sentence in sentences]

    async def _look(self, name: str, topic: str) -> list[str]:
        place = await self._known(name, self.now() + self._seconds)
        if isinstance(place, Transient) and place.code == "no_queue":
            return [f"topic {topic}: {place.text}"]
        if not isinstance(place, str):
            raise Unreachable(getattr(place, "text", str(place)))
        answer = await self.ask(
            "get_queue_attributes", name=name, QueueUrl=place, AttributeNames=["All"]
        )
        attributes = answer.get("Attributes", {})
        if "RedrivePolicy" in attributes:
            return []
        days = int(attributes.get("MessageRetentionPeriod", 345_600)) / 86_400
        return [
            f"the queue {name} has no redrive policy: what no consumer can handle comes again for "
            f"{days:g} days and is then lost; give it a dead-letter queue, "
            f"e.g. `aws sqs set-queue-attributes --attributes RedrivePolicy=…`"
        ]

    # What `AwsSender` asks.

    async def place(self, name: str, deadline: float) -> str | Outcome:
        owner = {} if self.address.account is None else {
            "QueueOwnerAWSAccountId": self.address.account
        }  # fmt: skip
        answer = await self.link.call(
            "get_queue_url", name=name, deadline=deadline, QueueName=name, **owner
        )
        return str(answer["QueueUrl"]) if isinstance(answer, dict) else answer

    def request(self, place: str, entries: list[tuple[str, Entry]]) -> dict[str, Any]:
        fifo = self.address.fifo
        return {
            "QueueUrl": place,
            "Entries": [
                {
                    "Id": id,
                    "MessageBody": entry.body,
                    "MessageAttributes": entry.attributes,
                    **(
                        {"MessageGroupId": entry.group, "MessageDeduplicationId": entry.dedup}
                        if fifo
                        else {}
                    ),
                }
                for id, entry in entries
            ],
        }

    async def _url(self, name: str) -> str:
        place = await self._known(name, self.now() + self._seconds)
        if not isinstance(place, str):
            raise Unreachable(getattr(place, "text", str(place)))
        return place


def open_broker(url: str, options: BrokerOptions) -> SqsBroker:
    """The broker for `sqs://eu-central-1/{topic}.fifo`."""
    broker = SqsBroker(url, options)
    if broker.address.service != "sqs":
        raise ConfigurationError("SQS has the scheme sqs://")
    return broker
