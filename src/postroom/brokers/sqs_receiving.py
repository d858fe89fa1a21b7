"""Receiving from SQS: long polls, deletes in batches, and the order of a FIFO's groups.

Promise: what is taken is acknowledged or comes again. In a FIFO queue nothing of a group is
deleted that was taken behind a message given back: it comes again after that one.

A poll under way is never cancelled, because SQS would hide what it hands out until the visibility
timeout; it stays for the next `take`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from postroom.brokers.aws_address import AwsAddress
from postroom.brokers.aws_link import AwsLink, Refusal
from postroom.brokers.aws_wire import taken_of
from postroom.brokers.receiving import Delivery, delivery
from postroom.errors import Unreachable

__all__ = ["Receipt", "SqsSubscription"]

BATCH = 10
POLL_SECONDS = 1
_ANSWER_SECONDS = 10.0
_CLOSE_SECONDS = 3.0
_GONE = {"ReceiptHandleIsInvalid", "InvalidParameterValue", "MessageNotInflight"}
_GONE |= {"AWS.SimpleQueueService.MessageNotInflight"}


class Receipt(NamedTuple):
    """How SQS knows this delivery. `turn` counts polls, of which each brings the messages of a
    group in their order; `place` counts messages."""

    queue: str
    handle: str
    group: str | None
    place: int
    turn: int
    until: float


class SqsSubscription:
    """Takes from one queue or several. SQS keeps the messages of a FIFO's group apart by itself;
    a standard queue has no order."""

    exclusive = False

    def __init__(
        self, link: AwsLink, address: AwsAddress, queues: Sequence[tuple[str, str, str]]
    ) -> None:
        """`queues`: topic, name and URL of each."""
        self._link, self._address = link, address
        self._queues = {url: (topic, name) for topic, name, url in queues}
        self._visibility = address.visibility_seconds
        self.extend_seconds: float | None = self._visibility / 3
        self._polls: dict[str, asyncio.Task[list[Delivery]]] = {}
        self._ready: deque[Delivery] = deque()
        # By queue and group: the earliest given back, of which turn, and until when it matters.
        self._returned: dict[tuple[str, str], tuple[int, int, float]] = {}
        # By the handle: what was handed out and is neither done nor given back, and until when.
        self._hand: dict[str, tuple[Delivery, float]] = {}
        self._turn = 0
        self._places = itertools.count()
        self._closed = False

    async def take(self, most: int) -> list[Delivery]:
        """The next messages; what SQS would hand to others by now is left to them."""
        self._check()
        if not self._ready:
            for queue in self._queues:
                if queue not in self._polls:
                    poll = asyncio.create_task(self._poll(queue, min(most, BATCH)))
                    self._polls[queue] = poll
            # A poll may take longer than it was told to; it goes on, and the next call finds it.
            await asyncio.wait(
                self._polls.values(),
                timeout=2 * POLL_SECONDS,
                return_when=asyncio.FIRST_COMPLETED,
            )
            self._gather()
            self._check()
        now = self._now()
        taken: list[Delivery] = []
        while self._ready and len(taken) < most:
            each = self._ready.popleft()
            if each.receipt.until > now:
                taken.append(each)
                self._hand[each.receipt.handle] = (each, each.receipt.until)
        return taken

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        """Delete them, but for those behind one that was given back."""
        self._forget_old()
        self._let_go(deliveries)
        behind = [each for each in deliveries if self._is_behind(each.receipt)]
        done = [each for each in deliveries if each not in behind] if behind else deliveries
        await self._each_queue(done, "delete_message_batch", {})
        if behind:
            await self._each_queue(
                behind, "change_message_visibility_batch", {"VisibilityTimeout": 0}
            )

    async def give_back(self, deliveries: Sequence[Delivery]) -> None:
        """Make them visible again, with what of their groups waits here."""
        self._let_go(deliveries)
        for each in deliveries:
            self._note_return(each.receipt)
        waiting = [each for each in self._ready if self._is_behind(each.receipt)]
        self._ready = deque(each for each in self._ready if each not in waiting)
        await self._each_queue(
            [*deliveries, *waiting], "change_message_visibility_batch", {"VisibilityTimeout": 0}
        )

    async def extend(self, deliveries: Sequence[Delivery]) -> None:
        """Hide them from others for another visibility timeout."""
        until = self._now() + self._visibility
        await self._each_queue(
            deliveries,
            "change_message_visibility_batch",
            {"VisibilityTimeout": self._visibility},
        )
        for each in deliveries:
            if each.receipt.handle in self._hand:
                self._hand[each.receipt.handle] = (each, until)

    async def close(self) -> None:
        """Give back what is in hand, and what was taken and not handed out."""
        if self._closed:
            return
        self._closed = True
        if self._polls:
            await asyncio.wait(self._polls.values(), timeout=2 * POLL_SECONDS)
        for poll in self._polls.values():
            poll.cancel()
        try:
            self._gather()
            self._forget_old()
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self.give_back([*(each for each, _ in self._hand.values()), *self._ready])
        except Exception:  # noqa: S110  it comes again by itself when its visibility timeout ends
            pass
        self._ready.clear()

    def _check(self) -> None:
        if self._closed:
            raise Unreachable("the subscription was closed")

    def _let_go(self, deliveries: Iterable[Delivery]) -> None:
        for each in deliveries:
            self._hand.pop(each.receipt.handle, None)

    # Polling.

    async def _poll(self, queue: str, most: int) -> list[Delivery]:
        topic, name = self._queues[queue]
        self._turn += 1
        turn, until = self._turn, self._now() + self._visibility
        answer = await self._call(
            "receive_message",
            name,
            QueueUrl=queue,
            MaxNumberOfMessages=most,
            WaitTimeSeconds=POLL_SECONDS,
            VisibilityTimeout=self._visibility,
            MessageAttributeNames=["All"],
            AttributeNames=["All"],
        )
        messages = answer.get("Messages") or ()
        return [self._delivery(each, topic, name, queue, turn, until) for each in messages]

    def _delivery(
        self, message: dict[str, Any], topic: str, name: str, queue: str, turn: int, until: float
    ) -> Delivery:
        attributes = message.get("Attributes", {})
        taken = taken_of(message.get("Body", ""), message.get("MessageAttributes", {}))
        group = attributes.get("MessageGroupId") if self._address.fifo else None
        place = next(self._places)
        return delivery(
            taken.headers,
            taken.payload,
            topic=taken.topic or topic,
            source=name,
            claim=0,
            receipt=Receipt(queue, message["ReceiptHandle"], group, place, turn, until),
            unnamed=message["MessageId"],
            # A message of ours without a key is a group by itself, named as the message is.
            key=group if group != taken.headers.get("event_id") else None,
            seen=max(int(attributes.get("ApproximateReceiveCount") or 1) - 1, 0),
        )

    def _gather(self) -> None:
        """Put what polls brought where `take` finds it; raise what one of them met, after that."""
        trouble: BaseException | None = None
        for queue, poll in list(self._polls.items()):
            if poll.done():
                del self._polls[queue]
                if poll.cancelled():
                    continue
                trouble = poll.exception() or trouble
                if poll.exception() is None:
                    self._ready.extend(poll.result())
        if trouble is not None and not self._ready:
            raise trouble

    # Groups.

    def _note_return(self, receipt: Receipt) -> None:
        if receipt.group is None:
            return
        group = (receipt.queue, receipt.group)
        earliest, turn, until = self._returned.get(group, (receipt.place, 0, 0.0))
        self._returned[group] = (
            min(earliest, receipt.place),
            max(turn, receipt.turn),
            # By then all that was taken with it has come back to the queue by itself.
            max(until, self._now() + self._visibility),
        )

    def _is_behind(self, receipt: Receipt) -> bool:
        if receipt.group is None:
            return False
        found = self._returned.get((receipt.queue, receipt.group))
        return found is not None and receipt.place > found[0] and receipt.turn <= found[1]

    def _forget_old(self) -> None:
        now = self._now()
        for group, (_, _, until) in list(self._returned.items()):
            if until < now:
                del self._returned[group]
        for handle, (_, until) in list(self._hand.items()):
            if until < now:
                del self._hand[handle]

    # Asking.

    async def _each_queue(
        self, deliveries: Iterable[Delivery], method: str, more: dict[str, Any]
    ) -> None:
        queues: dict[str, list[Receipt]] = {}
        for each in deliveries:
            queues.setdefault(each.receipt.queue, []).append(each.receipt)
        await asyncio.gather(
            *(
                self._batch(queue, receipts[start : start + BATCH], method, more)
                for queue, receipts in queues.items()
                for start in range(0, len(receipts), BATCH)
            )
        )

    async def _batch(
        self, queue: str, receipts: Sequence[Receipt], method: str, more: dict[str, Any]
    ) -> None:
        entries = [
            {"Id": str(number), "ReceiptHandle": receipt.handle, **more}
            for number, receipt in enumerate(receipts)
        ]
        name = self._queues[queue][1]
        answer = await self._call(method, name, QueueUrl=queue, Entries=entries)
        failed = [each for each in answer.get("Failed") or () if each.get("Code") not in _GONE]
        if failed:
            # What is no longer ours needs nothing from us; anything else must be tried again.
            raise Unreachable(f"SQS did not do it for {len(failed)} messages: {failed[0]['Code']}")

    async def _call(self, method: str, name: str, **arguments: Any) -> dict[str, Any]:
        deadline = self._now() + _ANSWER_SECONDS
        try:
            answer = await self._link.call(method, name=name, deadline=deadline, **arguments)
        except Refusal as refusal:
            raise Unreachable(str(refusal)) from None
        if not isinstance(answer, dict):
            raise Unreachable(getattr(answer, "text", str(answer)))
        return answer

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
