"""`sns://`: Amazon SNS through aiobotocore, FIFO and standard topics; it only sends.

Promise: `Delivered` means that SNS named the message as taken; what it does with it is up to the
topic's subscriptions. Queues that subscribe are read with `sqs://`, raw delivery or not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from postroom.brokers.aws_link import AwsLink, Refusal
from postroom.brokers.aws_sending import AwsSender
from postroom.brokers.aws_wire import Entry
from postroom.brokers.base import BrokerOptions, Outcome, Transient
from postroom.errors import ConfigurationError, InvalidMessage, Unreachable

__all__ = ["SnsBroker", "open_broker"]

_PARTITIONS = (("cn-", "aws-cn"), ("us-gov-", "aws-us-gov"))


class SnsBroker(AwsSender):
    """Publishes to topics of SNS, one for each of ours or one for all, as the URL's name says.

    The account is the option `account`, or that of the credentials.
    """

    method = "publish_batch"
    batch_bytes = 262_144  # unless a topic allows more; one message may have that alone

    def __init__(self, url: str, options: BrokerOptions | None = None) -> None:
        super().__init__(url, options)
        self._prefix: str | None = None

    async def ping(self) -> None:
        """Ask for topics: that we may not see them is an answer too."""
        if self._closed:
            raise Unreachable(f"the broker {self} was closed")
        deadline = self.now() + self._seconds
        try:
            answer = await self.link.call("list_topics", name="all topics", deadline=deadline)
        except Refusal:
            return
        if not isinstance(answer, dict) and getattr(answer, "down", None) != "topic":
            raise Unreachable(getattr(answer, "text", str(answer)))

    async def examine(self, topics: Sequence[str]) -> list[str]:
        """What of the topics would lose messages: none there, or nobody subscribed."""
        named: dict[str, str] = {}
        found: list[str] = []
        for topic in topics:
            try:
                named.setdefault(self.address.name_of(topic), topic)
            except InvalidMessage as error:
                found.append(f"topic {topic}: {error}")
        looks = await asyncio.gather(*(self._look(name, topic) for name, topic in named.items()))
        return found + [sentence for sentences in looks for sentence in sentences]

    async def _look(self, name: str, topic: str) -> list[str]:
        deadline = self.now() + self._seconds
        place = await self._known(name, deadline)
        if not isinstance(place, str):
            raise Unreachable(getattr(place, "text", str(place)))
        answer = await self.link.call(
            "get_topic_attributes", name=name, deadline=deadline, TopicArn=place
        )
        if isinstance(answer, Transient) and answer.code == "no_topic":
            return [f"topic {topic}: {answer.text}"]
        if not isinstance(answer, dict):
            raise Unreachable(getattr(answer, "text", str(answer)))
        # Counted in the attributes too, but late.
        answer = await self.ask("list_subscriptions_by_topic", name=name, TopicArn=place)
        subscribed = answer.get("Subscriptions") or ()
        if any(each.get("SubscriptionArn") != "PendingConfirmation" for each in subscribed):
            return []
        return [
            f"the SNS topic {name} has no subscription: what is sent to it is taken and goes "
            f"nowhere; subscribe a queue, e.g. `aws sns subscribe --topic-arn {place} --protocol "
            "sqs --attributes RawMessageDelivery=true --notification-endpoint ARN`"
        ]

    # What `AwsSender` asks.

    async def place(self, name: str, deadline: float) -> str | Outcome:
        if self._prefix is None:
            account = self.address.account or await self._own_account(deadline)
            if not isinstance(account, str):
                return account
            region = await self.link.region()
            partition = next((p for start, p in _PARTITIONS if region.startswith(start)), "aws")
            self._prefix = f"arn:{partition}:sns:{region}:{account}"
        return f"{self._prefix}:{name}"

    async def _own_account(self, deadline: float) -> str | Outcome:
        """The account of our credentials, which STS tells to everybody who has some."""
        link = AwsLink(self.address, "sts", timeout_seconds=self._seconds)
        try:
            answer = await link.call("get_caller_identity", name="our account", deadline=deadline)
        finally:
            await link.close()
        return str(answer["Account"]) if isinstance(answer, dict) else answer

    def request(self, place: str, entries: list[tuple[str, Entry]]) -> dict[str, Any]:
        fifo = self.address.fifo
        return {
            "TopicArn": place,
            "PublishBatchRequestEntries": [
                {
                    "Id": id,
                    "Message": entry.body,
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


def open_broker(url: str, options: BrokerOptions) -> SnsBroker:
    """The broker for `sns://eu-central-1/{topic}`."""
    broker = SnsBroker(url, options)
    if broker.address.service != "sns":
        raise ConfigurationError("SNS has the scheme sns://")
    return broker
