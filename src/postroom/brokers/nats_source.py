"""One stream as a source: its durable consumer, who of many receivers has it, and what comes.

    waiting ──the server pins us: claim + 1──► settling ──all that others had is here──► owned
       ▲                                          │                                        │
       └──────────── the pin is another's ────────┴────────────────────────────────────────┘

Promise: under one claim, messages of the stream are handed out in its order, and the first is no
later than the first unacknowledged one, however slowly the server answers.

The server hands messages to one pinned receiver at a time. What the one before it left
unacknowledged comes again only after a while, behind later messages. So a receiver that was just
pinned hands nothing out: it refuses everything unacknowledged in the other's stead, which any
receiver may, asks the server how many messages are unacknowledged, and pulls until it has received
that many of them again. The end of a pull proves nothing: a slow server ends it too. If
acknowledgements of others make the count unreachable, the receiver counts again. Servers before
2.11 cannot pin: there the durable allows one unacknowledged message at a time, which is slow and
keeps the order.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from postroom.brokers.nats_ask import API, AskingLink, Refusal, publication
from postroom.brokers.nats_durable import ASK_SECONDS, GROUP, MISSING, NANO, Durable
from postroom.brokers.nats_tray import Receipt, Recovery, Tray, pieces
from postroom.brokers.nats_wire import PIN, Arrived
from postroom.brokers.receiving import Delivery, delivery_of

__all__ = ["Source"]

PULL_SECONDS = 1.0
PAUSE_SECONDS = 0.2
PATIENCE_SECONDS = 2.0
PULL_BYTES = 8 * 1024 * 1024
PIECE = 5_000
# A wider gap is not refused: its messages come again when their time has run out.
MOST_REFUSALS = 200_000
# Messages that the server counts but does not redeliver in this part of `ack_wait_seconds` are not
# in the stream any more. Never sooner than a server that stands still is given up.
ABSENT_AFTER = 1.2
ABSENT_SECONDS = 2 * ASK_SECONDS


@dataclass(slots=True)
class _Pull:
    """A request for messages that stands at the server, and what ended it."""

    link: AskingLink
    token: bytes
    left: int
    late_at: float
    ended: str | None = None


class Source:
    """The messages of one stream for one consumer, over one connection after the other."""

    def __init__(self, stream: str, durable: Durable) -> None:
        self.stream = stream
        self.claim = 0
        self.pins = True
        self.gone = False  # the durable, or the stream itself
        self._durable = durable
        self._state: Literal["waiting", "settling", "owned"] = "waiting"
        self._tray = Tray()
        self._pin: str | None = None
        self._pull: _Pull | None = None
        self._pulled_at = 0.0
        self._pause_until = 0.0
        self._stuck_at: float | None = None
        self._recovery: Recovery | None = None
        self._absent_at = 0.0
        self._touched: dict[int, float] = {}
        self._template: Receipt | None = None

    # The durable, and a new connection.

    async def open(self, link: AskingLink, *, update: bool) -> None:
        """Make the durable as it is to be, or only if it is missing, and begin a new claim.

        A pull of an earlier connection may stand at the server with our pin, and messages that it
        gets would be lost to us until their time runs out. So a connection never uses the pin of
        another.
        """
        self.pins = await self._durable.make(link, self.stream, update=update)
        if self._pin:
            with contextlib.suppress(Refusal):  # the pin then times out
                await self._unpin(link, link.now + ASK_SECONDS)
            self._pin = None
        self.gone = False
        self._pull, self._pause_until = None, 0.0
        self._begin_claim()

    def _begin_claim(self) -> None:
        self.claim += 1
        self._forget()
        self._state = "owned" if not self.pins else "settling" if self._pin else "waiting"

    async def _unpin(self, link: AskingLink, until: float) -> None:
        """Release the pin if it is ours, so that the next receiver need not wait."""
        info = await self._durable.info(link, self.stream, until)
        if self.pins and self._is_pinned(info):
            name = f"{self.stream}.{self._durable.name}"
            await link.ask(f"CONSUMER.UNPIN.{name}", {"group": GROUP}, until)

    def _lose(self) -> None:
        """The pin is another's. What is in hand may be finished: the inbox makes it once."""
        self._pin, self._state = None, "waiting"
        self._forget()

    def _forget(self) -> None:
        self._tray = Tray()
        self._touched.clear()
        self._stuck_at = self._recovery = None

    # What comes.

    def on_message(self, answer: Arrived, receipt: Receipt, now: float) -> None:
        """A message of the stream."""
        headers = answer.headers
        pin = headers.pop(PIN, None)
        if self._pull is not None:
            self._pull.left -= 1
            if not self._pull.left:
                self._close(self._pull)
        if self.pins and pin != self._pin:
            self._pin = pin
            self._begin_claim()
        self._template = receipt
        if self._recovery is not None:
            self._recovery.arrive(receipt)
        self._touched[receipt.sequence] = now
        id = headers.get("ce-id") or headers.get("event_id") or receipt.unnamed
        seen = receipt.deliveries - 1
        self._tray.arrive(
            receipt.sequence,
            delivery_of(
                id,
                headers,
                answer.data,
                answer.subject,
                None,
                self.stream,
                self.claim,
                seen,
                receipt,
            ),
        )

    def _on_status(self, pull: _Pull, answer: Any, now: float) -> None:
        """The end of a pull, and why."""
        headers = answer.headers or {}
        status, text = headers.get("Status", ""), headers.get("Description", "")
        if status == "100":
            return
        pull.ended = status
        self._close(pull)
        if status == "423":
            self._lose()
        elif status == "503" or "Deleted" in text:
            self.gone = True
        elif status not in ("404", "408") and "MaxBytes" not in text:
            self._pause_until = now + PAUSE_SECONDS

    def _close(self, pull: _Pull) -> None:
        pull.link.ignore(pull.token)
        if self._pull is pull:
            self._pull = None

    # What is done about it.

    @property
    def ready(self) -> bool:
        """Whether something may be handed out."""
        return self._state == "owned" and self._tray.ready

    def hand_out(self, most: int) -> list[Delivery]:
        """The next messages, in order; none while it is not certain that they are the next."""
        return self._tray.hand_out(most) if self._state == "owned" else []

    async def step(self, link: AskingLink, most: int) -> None:
        """Ask for what is to come, and first for what others have left."""
        if self._pull is not None and link.now > self._pull.late_at:
            self._close(self._pull)  # its end was lost, as when the leader of a consumer dies
        if self._pull is not None or link.now < self._pause_until:
            return
        self._look_for_the_missing(link.now)
        if self._state == "settling":
            try:
                await self._settle(link)
            except Refusal as refusal:
                if refusal.number not in MISSING:
                    raise
                self.gone = True
        elif self._state == "waiting":
            await self._ask_for(link, 1)
        elif not self.pins:
            if not len(self._tray):
                await self._ask_for(link, 1)
        elif (room := most - self._tray.waiting) > 0:
            await self._ask_for(link, room)
        else:
            await self.keep(link)

    def _look_for_the_missing(self, now: float) -> None:
        """What was given back and does not come may be gone from the stream."""
        if self._state != "owned" or not self._tray.returning:
            self._stuck_at = None
        elif self._stuck_at is None:
            self._stuck_at = now + PATIENCE_SECONDS
        elif now > self._stuck_at:
            self._stuck_at = None
            if self.pins:
                self._state = "settling"
            else:
                self._tray.expect_no_more(self._tray.returning)

    async def _ask_for(
        self, link: AskingLink, most: int, *, parts: int = 1, only_pin: bool = False
    ) -> _Pull:
        """Send a pull. It keeps our pin; `only_pin` asks for so few bytes that nothing comes."""
        # Its end must leave time for the next one, lest the pin be lost between the two.
        seconds = min(PULL_SECONDS, self._durable.pin_seconds / 3) / parts
        wish: dict[str, Any] = {"batch": most, "expires": int(seconds * NANO)}
        if only_pin:
            wish = {"batch": 1, "no_wait": True, "max_bytes": 1}
        elif most > 1:
            wish["max_bytes"] = max(PULL_BYTES, 2 * link.client.max_payload)
        if self.pins:
            wish["group"] = GROUP
            if self._pin:
                wish["id"] = self._pin

        token, reply = link.hear(lambda answer: self._on_status(pull, answer, link.now))
        late = link.now + seconds + PATIENCE_SECONDS
        self._pull = pull = _Pull(link, token, wish["batch"], late)
        self._pulled_at = link.now
        subject = f"{API}CONSUMER.MSG.NEXT.{self.stream}.{self._durable.name}"
        await link.write(publication(subject, json.dumps(wish).encode(), reply))
        return pull

    # Taking over.

    async def _settle(self, link: AskingLink) -> None:
        """Take one step towards having everything that others hold unacknowledged: begin a
        recovery, pull the rest of it, or become the owner."""
        info = await self._durable.info(link, self.stream, link.now + ASK_SECONDS)
        if not self._is_pinned(info):
            self._lose()
        elif self._recovery is not None:
            await self._recover(link, self._recovery, info)
        elif self._has_all(info):
            self._state = "owned"
        else:
            claim = self.claim
            recovery = await self._begin_recovery(link, info)
            if self.claim == claim and self._state == "settling":
                self._recovery = recovery
                self._absent_at = link.now + self._absent_seconds()
                await self._recover(link, recovery, None)

    def _absent_seconds(self) -> float:
        return max(self._durable.ack_wait_seconds * ABSENT_AFTER, ABSENT_SECONDS)

    def _is_pinned(self, info: dict[str, Any]) -> bool:
        groups = info.get("priority_groups") or [{}]
        return bool(self._pin) and groups[0].get("pinned_client_id") == self._pin

    def _has_all(self, info: dict[str, Any]) -> bool:
        """Return whether no other receiver holds a message: every delivery above the ack floor came
        to us, and came for the first time, so that no other receiver can acknowledge it."""
        delivered = int(info["delivered"]["consumer_seq"]) - int(info["ack_floor"]["consumer_seq"])
        counted = {len(self._tray), int(info["num_ack_pending"]), delivered}
        return len(counted) == 1 and self._tray.fresh and not self._tray.returning

    async def _begin_recovery(self, link: AskingLink, info: dict[str, Any]) -> Recovery:
        """Refuse everything unacknowledged, ours too, and count what the server redelivers."""
        returning = self._tray.returning
        floor, last = (int(info[end]["stream_seq"]) for end in ("ack_floor", "delivered"))
        if self._template is not None and last - floor <= MOST_REFUSALS:
            place = int(info["delivered"]["consumer_seq"])
            await self._refuse(link, self._template, floor, last, place)
        again = await self._durable.info(link, self.stream, link.now + ASK_SECONDS)
        delivered = again["delivered"]
        last, place = int(delivered["stream_seq"]), int(delivered["consumer_seq"])
        return Recovery(last, place, int(again["num_ack_pending"]), returning)

    async def _refuse(
        self, link: AskingLink, template: Receipt, floor: int, last: int, place: int
    ) -> None:
        """Send a refusal for each message above `floor`, and wait until the server has read it."""
        for piece in pieces(floor, last, PIECE):
            subjects = [template.of_another(sequence, place) for sequence in piece]
            refusals = [publication(subject, b"-NAK") for subject in subjects[:-1]]
            await link.write(b"".join(refusals))
            # The server reads them in their order, so the answer to the last speaks for all.
            await link.call(subjects[-1], b"-NAK", link.now + ASK_SECONDS)

    async def _recover(
        self, link: AskingLink, recovery: Recovery, info: dict[str, Any] | None
    ) -> None:
        """Pull what is missing. `info` is what the server knew after the last pull, if any."""
        if info is not None and (recovery.progressed() or info.get("paused")):
            self._absent_at = link.now + self._absent_seconds()
        elif info is not None and recovery.missing:
            unacknowledged = int(info["num_ack_pending"]) - self._tray.beyond(recovery.last)
            if unacknowledged < recovery.expected:
                self._recovery = None  # others acknowledged some, or the stream removed them
                return
        if recovery.missing and link.now < self._absent_at:
            await self._ask_for(link, recovery.missing, parts=4)
        else:
            self._tray.expect_no_more(recovery.returning)
            self._recovery = None
            self._state = "owned"

    # Yes and no.

    def acknowledged(self, deliveries: Iterable[Delivery]) -> bytes:
        """The bytes that say yes. A yes from an older claim counts too: it was handled."""
        said = []
        for each in deliveries:
            self._tray.done(each.receipt.sequence)
            self._touched.pop(each.receipt.sequence, None)
            said.append(publication(each.receipt.subject, b"+ACK"))
        return b"".join(said)

    def given_back(self, deliveries: Iterable[Delivery]) -> bytes:
        """The bytes that say no, in the order of the stream; to what is another's now, nothing."""
        ours = [each for each in deliveries if each.claim == self.claim]
        ours.sort(key=lambda each: each.receipt.sequence)
        said = []
        for each in ours:
            self._touched.pop(each.receipt.sequence, None)
            if self._tray.give_back(each.receipt.sequence):
                said.append(publication(each.receipt.subject, b"-NAK"))
        return b"".join(said)

    def extended(self, deliveries: Iterable[Delivery], now: float) -> bytes:
        """The bytes that ask for more time, also for what has arrived and was not handed out."""
        if self._state == "waiting":
            return b""
        in_hand = {each.receipt.sequence for each in deliveries if each.claim == self.claim}
        old = now - self._durable.ack_wait_seconds / 4
        # A recovery waits for the redelivery of everything else, which must not be put off.
        came = self._tray.sequences if self._recovery is None else self._recovery.came
        said = []
        for each in self._tray:
            number = each.receipt.sequence
            handled = number in came and (number in in_hand or self._tray.has_arrived(number))
            if handled and self._touched.get(number, 0.0) <= old:
                self._touched[number] = now
                said.append(publication(each.receipt.subject, b"+WPI"))
        return b"".join(said)

    async def keep(self, link: AskingLink) -> None:
        """Keep the pin while there is no room for messages: only a pull does."""
        if self._pin and self._pull is None and link.now > self._pulled_at + PAUSE_SECONDS:
            await self._ask_for(link, 1, only_pin=True)

    async def leave(self, link: AskingLink, until: float) -> None:
        """Give back all, and let go of the pin if it is ours, so that another need not wait.

        The answers come after what was written before them has been read.
        """
        refusals = [publication(each.receipt.subject, b"-NAK") for each in self._tray]
        await link.write(b"".join(refusals))
        await self._unpin(link, until)
        self._lose()
