"""One lane, one small sequential program: read, say what will be sent, send, settle, again.

Promise: nothing of a key is sent while something earlier of it is not settled. A batch goes out in
waves; a failure is committed, together with what must wait behind it, before the next wave; and the
next read begins only after the settle of this one is committed, so it can never see a message that
is already under way.

Crash between send and settle: sent again with the same id, and the inbox drops it. That sentence is
the product.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import time
from collections.abc import Sequence

from postroom import failpoints, signals
from postroom.messages import Message
from postroom.outbox import noting, telling
from postroom.outbox.desk import Desk, Tally
from postroom.outbox.doubts import NOT_WRITTEN
from postroom.outbox.rules import (
    SETTLED,
    Bury,
    Down,
    Hold,
    Leftover,
    Segment,
    Settled,
    Unsent,
    Verdict,
    add_history,
    in_doubt,
    segments,
    suspected,
    waves,
)
from postroom.outbox.store import Ask, Burial, Change, Entry, Failure, Fence
from postroom.outbox.suspects import send_alone

__all__ = ["Desk", "Lane", "LaneLost", "Tally"]

HELD_LOOK_SECONDS = 0.05
RUN_SECONDS = 0.25
TROUBLES = 250
FLUSH_SECONDS = 0.25


class LaneLost(Exception):
    """Another relay owns this lane now: everything in memory for it is void."""


class Lane:
    """Works one lane for as long as its relay owns it."""

    def __init__(self, desk: Desk, fence: Fence, lease_ends: float) -> None:
        self.desk = desk
        self.fence = fence
        self.lease_ends = lease_ends
        self.stopping = False
        self.over = False  # it has come to its end and is being given back
        self.paused = False
        self.sending = False
        self._leftovers: list[Leftover] = []
        self.any_held = False
        self._held_at = 0.0
        self._rescan_at = time.monotonic() + desk.rescan_seconds

    async def run(self, *, once: bool = False) -> None:
        """Work until told to stop; with `once`, until nothing is left to do now."""
        self._leftovers, self.any_held = await self.desk.load(self.fence.lane)
        while not self.stopping:
            worked, hints = False, self.desk.pulse.hints
            if not self.paused and not await self._all_down():
                async with self.desk.settling.turn():
                    worked = await self._held_turn(once)
                    worked = await self._hot_turn() or worked
            if worked:
                self.desk.pulse.busy()
            elif once:
                return
            elif not self.stopping:
                await self.desk.pulse.wait(hints)

    def stop(self) -> None:
        """Stop at the next border between two waves."""
        self.stopping = True
        self.desk.pulse.hint()

    async def _all_down(self) -> bool:
        if not self.desk.sender.destinations.all_down():
            return False
        await asyncio.sleep(min(self.desk.sender.destinations.retry_in(), 0.5))
        return True

    # ── where messages come from ───────────────────────────────────────────────────────────────

    async def _hot_turn(self) -> bool:
        lane, horizon = self.fence.lane, self.desk.horizon
        rescan = self.desk.safe_reads and time.monotonic() >= self._rescan_at
        safe = horizon.after(lane)
        batch, more = await self.desk.read(Ask(lane, 0 if rescan else safe, self.any_held))
        if rescan:
            self._rescan_at = time.monotonic() + self.desk.rescan_seconds
            for message in batch:
                if message.position <= safe:
                    signals.emit("lane.late", lane=lane, position=message.position, id=message.id)
        if not batch:
            return more
        try:
            return await _Batch(self, batch, from_held=False).work()
        finally:
            horizon.give(lane)
            self.desk.budget.give(lane)

    async def _held_turn(self, once: bool) -> bool:
        if not self.any_held or (not once and time.monotonic() < self._held_at):
            return False
        self._held_at = time.monotonic() + HELD_LOOK_SECONDS
        due = await self.desk.held_due(self.fence.lane)
        if not due:
            self.any_held = await self.desk.held_any(self.fence.lane)
            return False
        heads = _Batch(self, due, from_held=True)
        worked = await heads.work()
        # What waited behind a head that went through goes right after it, many at a time, but not
        # for so long that the other keys of the lane would notice.
        until = time.monotonic() + RUN_SECONDS
        for head in [m for m in heads.delivered if m.key is not None]:
            if time.monotonic() >= until:
                break
            run = await self.desk.held_run(head)
            while run and not self.stopping and time.monotonic() < until:
                behind = _Batch(self, run, from_held=True)
                await behind.work()
                if len(behind.delivered) < len(run):
                    break
                run = await self.desk.held_run(head)
        return worked

    # ── what a batch needs ─────────────────────────────────────────────────────────────────────

    async def may_send(self) -> bool:
        """Whether a send may start: not when stopping, and never on the last of the lease."""
        while self.lease_ends - time.monotonic() < self.desk.margin_seconds:
            if self.lease_ends < time.monotonic():
                raise LaneLost(f"the lease of lane {self.fence.lane} ran out")
            await asyncio.sleep(0.01)
        return not self.stopping

    @property
    def leftovers(self) -> list[Leftover]:
        return self._leftovers

    async def settle(self, change: Change) -> None:
        """Write a change down, or find that the lane is not ours any more."""
        failpoints.hit("relay.settle.before")
        if not await self.desk.settle(change):
            raise LaneLost(f"lane {self.fence.lane} has another owner")
        failpoints.hit("relay.settle.after")
        if change.failures or change.waiting or change.later or change.burials:
            self.any_held = True

    async def journal(self, messages: Sequence[Message], alone: bool) -> int:
        """Say what is about to be sent."""
        batch = self.desk.next_batch()
        positions = [message.position for message in messages]
        lo, hi, held = min(positions), max(positions), bool(messages[0].held)
        entry = Entry(self.fence, batch, lo, hi, len(positions), alone, held)
        if not await self.desk.journal(entry):
            raise LaneLost(f"lane {self.fence.lane} has another owner")
        return batch

    async def forget(self) -> None:
        """Some suspects were settled: see who is left."""
        self._leftovers = await self.desk.forget(self.fence.lane)


class _Batch:
    """The way of one batch: segments, waves, verdicts, settles."""

    def __init__(self, lane: Lane, messages: Sequence[Message], *, from_held: bool) -> None:
        self.lane = lane
        self.desk = lane.desk
        self.messages = messages
        self.from_held = from_held
        self.delivered: list[Message] = []
        self._change = self._new_change()
        self._stopped: set[tuple[str, str]] = set()
        self._left: list[Message] = []
        self._crowded = False  # whether any is left only because there was no room for it
        self._dirty = False
        self._by_order: dict[tuple[str, str], list[Message]] = {}
        self._suspects = False
        self._suspect = False  # whether a relay died while it was sending this very segment
        self._answers: dict[int, str] = {}
        self._refused: list[tuple[Message, Verdict]] = []
        self._flushed_at = time.monotonic()

    def _new_change(self) -> Change:
        return Change(self.lane.fence, from_held=self.from_held)

    async def work(self) -> bool:
        """Take the batch as far as it goes; returns whether anything moved, or may do so now."""
        try:
            return await self._settle_known() | await self._work()
        except BaseException:
            answers = self._answers
            kept = [(m, Settled(answers.get(m.position))) for m in self._change.delivered]
            self.desk.settling.keep([*kept, *self._refused], self.lane.fence.epoch)
            raise

    async def _settle_known(self) -> bool:
        """Settle what was sent before the database was lost, without sending it again."""
        known = self.desk.settling.known(self.messages, self.lane.fence.epoch)
        if not known:
            return False
        # Deliveries first and separately: perhaps only the refusals cannot be settled.
        for delivered in (True, False):
            for message in self.messages:
                answer = known.get(message.position)
                if answer is not None and isinstance(answer, Settled) == delivered:
                    self._answered(message, answer)
            await self._flush()
        self.desk.settling.forget(self.messages)
        self.messages = [
            m for m in self.messages if m.position not in known and m.order not in self._stopped
        ]
        return True

    async def _work(self) -> bool:
        ready = self._sort_out()
        for segment in segments(ready, self.lane.leftovers):
            self._suspects = self._suspects or segment.chunk > 0
            if self.lane.stopping:
                self._left += [m for m in segment.messages if m.order not in self._stopped]
            elif segment.blamed:
                await self._bury_killer(segment)
            else:
                await self._send_segment(segment)
        await self._flush()
        if self._left and not self.from_held:
            first = min(message.position for message in self._left)
            self.desk.horizon.rewind(self.lane.fence.lane, first)
        if self._suspects:
            await self.lane.forget()
        return self._crowded or len(self._left) < len(self.messages)

    def _sort_out(self) -> list[Message]:
        """What can be sent: keys that are held keep theirs back, and what expired is over."""
        among_held = self.from_held
        ready = [m for m in self.messages if not m.expired and (among_held or not m.held)]
        if len(ready) == len(self.messages):
            return ready
        for message in self.messages:
            if message.held and not self.from_held:
                self._keep_waiting([message])
                self._stopped.add(message.order)
            elif message.expired:
                self._expire(message)
        return ready

    async def _send_segment(self, segment: Segment) -> None:
        messages = segment.messages
        if self._stopped:
            messages = [m for m in messages if m.order not in self._stopped]
        if not messages:
            return
        if not segment.alone:
            await self._send_part(segment, messages)
            return
        message = messages[0]
        signals.emit(
            "message.suspect",
            id=message.id,
            lane=message.lane,
            position=message.position,
            deaths=segment.deaths,
        )
        async with self.desk.gate.alone():
            await self._send_part(segment, messages)

    async def _send_part(self, segment: Segment, messages: list[Message]) -> None:
        if not await self.lane.may_send():
            self._left += messages
            return
        batches = [await self.lane.journal(messages, segment.alone)]
        self._suspect = segment.chunk > 0
        if segment.alone:
            batches += await send_alone(self.lane, messages[0], self._send_wave(messages))
            if messages[0] not in self._left:
                self._change.acquitted.append(messages[0].position)
        else:
            await self._send_waves(messages)
        self._change.batches += batches
        await self._flush()

    async def _send_waves(self, messages: list[Message]) -> None:
        whole = self.desk.sender.is_ordered(messages)
        limit = self.desk.sender.max_batch(messages) or len(messages)
        for wave in [messages] if whole else waves(messages):
            for start in range(0, len(wave), limit):
                # A suspect that is to be alone waits for one wave of the others, not for all.
                async with self.desk.gate.together():
                    await self._send_wave(wave[start : start + limit])

    async def _send_wave(self, wave: list[Message]) -> None:
        if self._stopped:
            wave = [message for message in wave if message.order not in self._stopped]
        if not wave:
            return
        self.lane.sending = True
        try:
            verdicts = await self.desk.sender.send(
                wave,
                epoch=self.lane.fence.epoch,
                may_send=self.lane.may_send,
                suspect=self._suspect,
            )
        finally:
            self.lane.sending = False
        trouble = False
        if verdicts.count(SETTLED) == len(wave):
            self._change.delivered += wave
        else:
            for message, answer in zip(wave, verdicts, strict=True):
                self._answered(message, answer)
                trouble = trouble or not isinstance(answer, Settled)
        # Committed before the next wave, so that nothing of a key passes what failed. A slow
        # receiver's yes is written down now and then, so that little is sent twice after a crash.
        slow = time.monotonic() - self._flushed_at > FLUSH_SECONDS
        if slow or (trouble and self._dirty):
            await self._flush()

    def _answered(self, message: Message, answer: Verdict) -> None:
        if isinstance(answer, Settled):
            self._change.delivered.append(message)
            if answer.answer is not None:
                self._answers[message.position] = answer.answer
        elif message.order not in self._stopped:
            self._set_aside(message, answer)

    # ── what did not go through ────────────────────────────────────────────────────────────────

    def _set_aside(self, message: Message, answer: Verdict) -> None:
        followers = self._followers(message)
        self._stopped.add(message.order)
        if isinstance(answer, Hold | Bury):
            self._refused.append((message, answer))
        if isinstance(answer, Hold):
            self._fail(message, answer)
            self._keep_waiting(followers)
        elif isinstance(answer, Bury):
            holds = self.desk.holds_key and message.key is not None
            self._bury(message, answer, holds_key=holds)
            if holds:
                self._keep_waiting(followers)
            else:
                self._stopped.discard(message.order)
        elif isinstance(answer, Down) and (
            answer.scope == "topic"
            or not self.desk.sender.destinations.all_down()
            or (answer.doubt and self._unwritten(message))  # a doubt is written down at once
        ):
            self._carry_doubts([message], answer.code, answer.text, answer.doubt)
            self._carry_doubts(followers)
            self._change.later += [message, *followers]
            wait = self.desk.sender.later_seconds(message)
            self._change.later_seconds = max(self._change.later_seconds, wait)
            self._dirty = True
        else:
            assert isinstance(answer, Down | Unsent)
            self._crowded = self._crowded or (isinstance(answer, Unsent) and answer.crowded)
            self._left += [message, *followers]

    def _followers(self, message: Message) -> list[Message]:
        if not self._by_order:
            for other in self.messages:
                self._by_order.setdefault(other.order, []).append(other)
        return [m for m in self._by_order[message.order] if m.position > message.position]

    def _keep_waiting(self, followers: list[Message]) -> None:
        if not self.from_held:
            self._carry_doubts(followers)
            self._change.waiting += followers

    def _in_doubt(self, message: Message) -> bool:
        """Whether a message may have arrived, by whatever is known of it."""
        sender = self.desk.sender
        if not sender.keeps_doubt(message):
            return in_doubt(message.history)
        if sender.doubts(message):
            return True
        return suspected(message, self.lane.leftovers, self.from_held)

    def _unwritten(self, message: Message) -> bool:
        """Whether a doubt of this message matters, and does not stand in its history."""
        return self.desk.sender.keeps_doubt(message) and not in_doubt(message.history)

    def _carry_doubts(
        self,
        messages: Sequence[Message],
        code: str = NOT_WRITTEN.code,
        text: str = NOT_WRITTEN.text,
        doubt: bool = False,
    ) -> None:
        """What may have arrived and now waits elsewhere takes its doubt along: what the journal
        says of it, and this relay remembers, is about where it was."""
        for message in messages:
            if self._unwritten(message) and (doubt or self._in_doubt(message)):
                history = self._history(message, message.attempts, code, text, True)
                self._change.doubts.append((message, history))
                self._trouble(message, message.attempts, code, text, True, ends=False)

    def _fail(self, message: Message, answer: Hold) -> None:
        attempts = message.attempts + (1 if answer.spent else 0)
        history = self._history(message, attempts, answer.code, answer.text, answer.doubt)
        self._change.failures.append(
            Failure(message, attempts, history, answer.code, answer.text, answer.delay_seconds)
        )
        self._trouble(message, attempts, answer.code, answer.text, answer.doubt, ends=False)
        self.desk.tally.held += 1
        telling.held(self.desk, message, attempts, answer)

    def _bury(self, message: Message, answer: Bury, *, holds_key: bool) -> None:
        attempts = message.attempts + (1 if answer.spent else 0)
        history = self._history(message, attempts, answer.code, answer.text, answer.doubt)
        self._change.burials.append(
            Burial(message, attempts, history, answer.code, answer.text, holds_key)
        )
        self._trouble(message, attempts, answer.code, answer.text, answer.doubt, ends=True)
        self.desk.tally.dead += 1
        telling.buried(self.desk, message, attempts, answer.code, holds_key)

    def _expire(self, message: Message) -> None:
        text, doubt = "it was not delivered before its expires_at", self._in_doubt(message)
        history = self._history(message, message.attempts, "expired", text, doubt)
        self._change.burials.append(
            Burial(message, message.attempts, history, "expired", text, False, ended=True)
        )
        self._trouble(message, message.attempts, "expired", text, doubt, ends=True)
        telling.expired(message)

    async def _bury_killer(self, segment: Segment) -> None:
        message, deaths = segment.messages[0], segment.deaths + segment.late
        if message.order in self._stopped:
            return
        text = f"the process died {deaths} times while sending this message alone"
        self._set_aside(message, Bury("suspected_killer", text, spent=False, doubt=True))
        self._change.acquitted.append(message.position)
        await self._flush()

    def _trouble(
        self, message: Message, attempts: int, code: str, text: str, doubt: bool, *, ends: bool
    ) -> None:
        self._dirty = True
        self._change.notes |= noting.troubled(
            message,
            attempts=attempts,
            adapter=self.desk.sender.adapter(message.topic),
            code=code,
            text=text,
            doubt=doubt,
            ends=ends,
        )

    def _history(self, message: Message, attempt: int, code: str, text: str, doubt: bool) -> str:
        return add_history(
            message.history,
            attempt=attempt,
            at=dt.datetime.now(dt.UTC),
            code=code,
            text=text,
            worker=self.desk.owner,
            doubt=doubt,
        )

    async def _flush(self) -> None:
        change = self._change
        if not (change.delivered or change.waiting or change.batches or self._dirty):
            return
        change.notes |= noting.delivered(change.delivered, self._answers, self.desk.sender.adapter)
        for piece in change.pieces(TROUBLES):
            await self.lane.settle(piece)
        self._change, self._dirty = self._new_change(), False
        self._answers, self._refused = {}, []
        self._flushed_at = time.monotonic()
        noting.tell(change.notes.values())
        self.desk.sender.settled(change.delivered)
        self.desk.sender.settled([failure.message for failure in change.failures])
        self.desk.sender.settled([burial.message for burial in change.burials])
        self.desk.sender.settled([message for message, _ in change.doubts])
        self.delivered += change.delivered
        self.desk.tally.delivered += len(change.delivered)
        telling.delivered(self.desk, self.lane.fence.lane, change.delivered)
