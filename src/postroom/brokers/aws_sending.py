"""Sending to SQS and SNS alike: batches of ten, several requests at once, an outcome for each.

Promise: `Delivered` means that the answer names this very message as stored. What an answer does
not mention is of unknown fate.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

from postroom.brokers.aws_address import AwsAddress
from postroom.brokers.aws_link import AwsLink, Refusal
from postroom.brokers.aws_wire import Entry, entry_of, failure_of
from postroom.brokers.base import (
    DELIVERED,
    BrokerOptions,
    Capabilities,
    Outcome,
    Permanent,
    Transient,
    Unknown,
)
from postroom.errors import InvalidMessage, Unreachable
from postroom.messages import Message

__all__ = ["AwsSender"]

BATCH = 10
MAX_BYTES = 1_048_576  # of one message, and of all in a request to SQS


class AwsSender:
    """What both brokers are. A subclass says where a topic is and how a batch is sent there."""

    method = ""
    batch_bytes = MAX_BYTES

    def __init__(self, url: str, options: BrokerOptions | None = None) -> None:
        self._options = options or BrokerOptions()
        self.address = AwsAddress.of(url, self._options.extra)
        self._seconds = self._options.send_timeout_seconds
        self.link = AwsLink(self.address, self.address.service, timeout_seconds=self._seconds)
        self.capabilities = Capabilities(
            max_batch=BATCH * self.address.concurrency, max_bytes=MAX_BYTES
        )
        self._places: dict[str, str] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots = asyncio.Semaphore(self.address.concurrency)
        self._idle = asyncio.Event()
        self._sends = 0
        self._closed = False

    def __repr__(self) -> str:
        return str(self.address)

    async def send(self, batch: Sequence[Message], *, epoch: int = 0) -> list[Outcome]:
        """Send all; the whole of it takes at most the send timeout."""
        if self._closed:
            closed = Transient("closed", f"the broker {self} was closed", down="broker")
            return [closed] * len(batch)
        if "{consumer}" in self.address.template:
            text = f"{self} names a queue for each consumer: it is there to receive from"
            return [Transient("bad_url", text, down="broker")] * len(batch)
        self._come_home()
        deadline = self.now() + self._seconds
        outcomes: dict[int, Outcome] = {}
        parts = self._parts(batch, epoch, outcomes)

        async def work() -> None:
            for name, part in parts:
                outcomes.update(await self._in_turn(name, part, deadline))

        self._sends += 1
        self._idle.clear()
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self.address.concurrency, len(batch))):
                    group.create_task(work())
        finally:
            self._sends -= 1
            if not self._sends:
                self._idle.set()
        return [outcomes[index] for index in range(len(batch))]

    async def close(self) -> None:
        """Let sends that have begun come to their end, then close the connections."""
        self._closed = True
        try:
            async with asyncio.timeout(self._seconds):
                if self._sends and self._loop is asyncio.get_running_loop():
                    await self._idle.wait()
        except TimeoutError:
            pass
        await self.link.close()

    async def ask(self, method: str, *, name: str = "", **arguments: Any) -> dict[str, Any]:
        """The answer to a question, or `Unreachable`; `Refusal` if the question is at fault."""
        deadline = self.now() + self._seconds
        answer = await self.link.call(method, name=name, deadline=deadline, **arguments)
        if not isinstance(answer, dict):
            raise Unreachable(getattr(answer, "text", str(answer)))
        return answer

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    # What a subclass says.

    async def place(self, name: str, deadline: float) -> str | Outcome:
        """The address of a queue or topic by its name, or why there is none."""
        raise NotImplementedError

    def request(self, place: str, entries: list[tuple[str, Entry]]) -> dict[str, Any]:
        """The arguments of `method`."""
        raise NotImplementedError

    # One request.

    def _parts(
        self, batch: Sequence[Message], epoch: int, outcomes: dict[int, Outcome]
    ) -> Iterator[tuple[str, dict[int, Entry]]]:
        """Requests, made as they are sent, so that only those under way are in memory."""
        names: dict[str, list[int]] = {}
        for index, message in enumerate(batch):
            try:
                names.setdefault(self.address.name_of(message.topic), []).append(index)
            except InvalidMessage as error:
                outcomes[index] = Permanent("bad_topic", str(error))
        for name, indexes in names.items():
            part: dict[int, Entry] = {}
            size = 0
            for index in indexes:
                entry = entry_of(
                    batch[index], source=self._options.source, epoch=epoch, max_bytes=MAX_BYTES
                )
                if isinstance(entry, Permanent):
                    outcomes[index] = entry
                    continue
                if part and (len(part) == BATCH or size + entry.size > self.batch_bytes):
                    yield name, part
                    part, size = {}, 0
                part[index] = entry
                size += entry.size
            if part:
                yield name, part

    async def _in_turn(
        self, name: str, part: dict[int, Entry], deadline: float
    ) -> dict[int, Outcome]:
        start_by = deadline - self._seconds / 2
        late = Transient("not_sent", f"{self} left no time for it", down="broker")
        slots = self._slots
        try:
            async with asyncio.timeout_at(start_by):
                await slots.acquire()
        except TimeoutError:
            return dict.fromkeys(part, late)
        try:
            if self.now() >= start_by:  # a free slot is had without a wait, however late it is
                return dict.fromkeys(part, late)
            place = await self._known(name, deadline)
            if not isinstance(place, str):
                return dict.fromkeys(part, place)
            return await self._request(name, place, part, deadline)
        finally:
            slots.release()

    async def _known(self, name: str, deadline: float) -> str | Outcome:
        place = self._places.get(name)
        if place is not None:
            return place
        try:
            found = await self.place(name, deadline)
        except Refusal as refusal:
            return Transient(refusal.code, str(refusal), down="topic")
        if isinstance(found, str):
            self._places[name] = found
        elif isinstance(found, Unknown):  # what has no answer is the question, and no message
            return Transient(found.code, found.text, down=found.down)
        return found

    async def _request(
        self, name: str, place: str, part: dict[int, Entry], deadline: float
    ) -> dict[int, Outcome]:
        entries = [(str(index), entry) for index, entry in part.items()]
        try:
            answer = await self.link.call(
                self.method, name=name, deadline=deadline, **self.request(place, entries)
            )
        except Refusal as refusal:
            if len(part) == 1:
                return dict.fromkeys(part, Permanent(refusal.code, str(refusal)))
            # One of them is at fault: the others must not pay for it.
            alone: dict[int, Outcome] = {}
            for index, entry in part.items():
                alone |= await self._request(name, place, {index: entry}, deadline)
            return alone
        if not isinstance(answer, dict):
            if isinstance(answer, Transient) and answer.down == "topic":
                self._places.pop(name, None)  # it may be made anew under another address
            return dict.fromkeys(part, answer)
        return self._judge(name, part, answer)

    def _judge(
        self, name: str, part: dict[int, Entry], answer: dict[str, Any]
    ) -> dict[int, Outcome]:
        silent = Unknown("no_word", f"the answer of {self} does not mention it")
        outcomes: dict[int, Outcome] = dict.fromkeys(part, silent)
        said = {str(index): index for index in part}
        for done in answer.get("Successful") or ():
            outcomes[said[done["Id"]]] = DELIVERED
        for failed in answer.get("Failed") or ():
            service = self.address.service
            outcomes[said[failed["Id"]]] = failure_of(failed, name=name, service=service)
        return outcomes

    def _come_home(self) -> None:
        """Begin with free slots on a new event loop: those of an ended one never come back."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._sends = loop, 0
            self._slots = asyncio.Semaphore(self.address.concurrency)
            self._idle = asyncio.Event()
