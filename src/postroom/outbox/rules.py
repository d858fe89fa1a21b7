"""The relay's decisions. Pure: time and randomness are arguments, nothing is read or written.

outcome of a send ──► verdict
Delivered             Settled
Transient, Unknown    Hold(delay), or Bury when the attempts are spent
… with down=          Down: the destination's fault, no attempt is spent
Permanent             Bury
Transient, BEHIND     Unsent: what it waits for has a verdict of its own
Transient, CROWDED    Unsent, and tried again at once: there was no room for it

What may have arrived is in doubt. A doubt ends only with Delivered, or with the definite answer of
somebody who was asked: `may_be_sent` and `after_a_look` say what an answer is worth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from postroom.brokers.base import (
    BEHIND,
    CROWDED,
    NOT_ARRIVED,
    Delivered,
    Outcome,
    Permanent,
    Scope,
    Transient,
    Unknown,
)
from postroom.dead_letters.rules import (
    CODE_CHARACTERS,
    ERROR_CHARACTERS,
    add_history,
    in_doubt,
    storable,
)
from postroom.messages import LANES, Message
from postroom.retry import RetryPolicy
from postroom.signals import redact

__all__ = [
    "NO_ROOM",
    "SETTLED",
    "UNSENT",
    "Breaker",
    "Bury",
    "Down",
    "Hold",
    "Horizon",
    "Leftover",
    "Segment",
    "Settled",
    "Unsent",
    "Verdict",
    "add_history",
    "after_a_look",
    "fence_number",
    "in_doubt",
    "learnt",
    "may_be_sent",
    "segments",
    "storable",
    "suspected",
    "verdict",
    "waves",
]

DEATHS_ALONE = 3
LATE_DEATHS = 20
QUICK_SECONDS = 0.1
ASK_AGAIN_SECONDS = 5.0
CHUNKS = 32
PARTS_OF_A_SIZE = 4
# A destination that is back is used within this time: a probe costs one message.
CAP_SECONDS = 5.0


# ── What becomes of a message ──────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Settled:
    """Delivered: it leaves the outbox. `answer` is what the receiver said."""

    answer: str | None = None


@dataclass(frozen=True, slots=True)
class Hold:
    """Try again after `delay_seconds`; whatever of its key comes later waits behind it.

    `spent`: it counts as an attempt; not if it was not sent because nobody could be asked.
    """

    delay_seconds: float
    code: str
    text: str
    doubt: bool = False
    spent: bool = True


@dataclass(frozen=True, slots=True)
class Bury:
    """A dead letter. `spent`: it was sent and refused, so it counts as an attempt."""

    code: str
    text: str
    spent: bool = True
    doubt: bool = False


@dataclass(frozen=True, slots=True)
class Down:
    """The destination cannot take messages now."""

    scope: Scope
    code: str
    text: str
    doubt: bool = False


@dataclass(frozen=True, slots=True)
class Unsent:
    """It stays where it is: the worker stopped before it was its turn, or `crowded`, there was no
    room for it among those under way."""

    crowded: bool = False


Verdict: TypeAlias = Settled | Hold | Bury | Down | Unsent
SETTLED = Settled()
UNSENT = Unsent()
NO_ROOM = Unsent(crowded=True)


def verdict(
    outcome: Outcome,
    message: Message,
    policy: RetryPolicy,
    random: Callable[[], float],
    doubt: bool = False,
    sent: bool = True,
) -> Verdict:
    """What an outcome means for its message. `doubt`: it may have arrived before, and nobody has
    said otherwise. `sent`: it is of a send; else it was only asked for, in vain."""
    if isinstance(outcome, Delivered):
        return SETTLED if outcome.answer is None else Settled(outcome.answer)
    if outcome == BEHIND:
        return UNSENT
    if outcome == CROWDED:
        return NO_ROOM
    # Redacted before it is cut: half a URL would not be known for one.
    text = storable(redact(outcome.text[: 4 * ERROR_CHARACTERS]))
    code = storable(outcome.code, CODE_CHARACTERS)
    if isinstance(outcome, Permanent):
        return Bury(code, text, doubt=doubt)
    doubt = doubt or isinstance(outcome, Unknown)
    if outcome.down is not None and sent:
        return Down(outcome.down, code, text, doubt)
    if outcome.down is not None:
        # An outage spends no attempt, and what is in doubt must not be sent before it is over.
        wait = policy.delay_after(max(message.attempts, 1), random=random)
        return Hold(wait or ASK_AGAIN_SECONDS, code, text, doubt, spent=False)
    wish = outcome.retry_after_seconds if isinstance(outcome, Transient) else None
    delay = policy.delay_after(message.attempts + 1, retry_after_seconds=wish, random=random)
    if delay is None:
        return Bury(code, f"{'outcome unknown: ' if doubt else ''}{text}", doubt=doubt)
    return Hold(delay, code, text, doubt)


# ── Doubt ──────────────────────────────────────────────────────────────────────────────────────


def learnt(found: Outcome) -> Outcome:
    """What the answer of a look-up is worth: yes, no, "not arrived", or nothing.

    Only a `Transient` that says NOT_ARRIVED means so: any other is about the asking, not about the
    message, and leaves it as unknown as it was.
    """
    if not isinstance(found, Transient) or (found.code == NOT_ARRIVED and found.down is None):
        return found
    return Unknown(found.code, found.text, found.down)


def may_be_sent(answer: Outcome) -> bool:
    """Whether a message in doubt may be sent, as far as was learnt right before. It stays in doubt:
    what did not arrive yet may be on its way."""
    return isinstance(answer, Transient)


def after_a_look(sent: Outcome, answer: Outcome) -> tuple[Outcome, bool]:
    """The outcome of a send after a look for what is in doubt, and whether it still is.

    sent as                answer: yes, no   "not arrived"           nothing
    Unknown                the answer        Unknown, in doubt       Unknown, in doubt
    Transient, Permanent   the answer        as sent, not in doubt   Unknown, in doubt

    After silence "not arrived" ends nothing, since it may still be on its way. After an answer
    to the last send it is the receiver's word on all sends before it.
    """
    if isinstance(answer, Delivered | Permanent):
        return answer, False
    if isinstance(sent, Transient | Permanent) and isinstance(answer, Transient):
        return sent, False
    if isinstance(sent, Delivered):
        return sent, False
    told = answer if isinstance(sent, Unknown) else sent
    text = told.text if told is answer else f"{sent.text}; asked again: {answer.text}"
    # Never `down`, for which no attempt is written though it was sent.
    return Unknown(told.code, text), True


# ── Order ──────────────────────────────────────────────────────────────────────────────────────


def waves(batch: Sequence[Message]) -> list[list[Message]]:
    """The first message of every key, then the second of every key, and so on."""
    turns: dict[tuple[str, str], int] = {}
    result: list[list[Message]] = []
    for message in batch:
        order = message.order
        turn = turns[order] = turns.get(order, -1) + 1
        if turn == len(result):
            result.append([message])
        else:
            result[turn].append(message)
    return result


class Horizon:
    """The safe watermark of each lane: where a read may start without losing a late committer.

    A position is safe when every transaction that could still bring a lower one is over, and a read
    that began after that has returned. `begin` and `seen` stand before and after every read, `mark`
    and `look` before and after the question which transactions are open.
    """

    def __init__(self) -> None:
        self.safe: dict[int, int] = {}
        self._seen: dict[int, int] = {}
        self._noted: dict[int, int] = {}
        self._open: frozenset[str] = frozenset()
        self._passed: dict[int, int] = {}
        self._in_flight: dict[int, int] = {}

    def after(self, lane: int) -> int:
        """Where the next read of the lane starts."""
        return self.safe.get(lane, 0)

    @property
    def behind(self) -> bool:
        """Whether a look could move anything forward."""
        return any(self.safe.get(lane, 0) < seen for lane, seen in self._seen.items())

    def begin(self) -> dict[int, int]:
        """Hand to `seen` what this returns: the positions this read may make safe."""
        return dict(self._passed)

    def seen(self, lane: int, last: int | None, full: bool, begun: Mapping[int, int]) -> None:
        """A read of the lane returned; `last` is its last position, `full` that there is more."""
        passed = begun.get(lane, 0)
        if full:
            passed = min(passed, last or 0)
        if passed > self.safe.get(lane, 0):
            self.safe[lane] = passed
        if last is not None and last > self._seen.get(lane, 0):
            self._seen[lane] = last

    def mark(self) -> dict[int, int]:
        """What was seen before the question was asked; hand it to `look` with the answer."""
        return dict(self._seen)

    def look(self, mark: Mapping[int, int], open_transactions: Iterable[str]) -> None:
        """These transactions hold the publisher's lock: they may still bring a lower position."""
        now_open = frozenset(open_transactions)
        if self._open.isdisjoint(now_open):
            self._passed.update(self._noted)
            self._noted = dict(mark)
            self._open = now_open

    def take(self, lane: int, first: int) -> None:
        """Record that the lane has a batch in flight whose first position is `first`."""
        self._in_flight[lane] = first

    def give(self, lane: int) -> None:
        """Record that the lane's batch is settled, or rewound."""
        self._in_flight.pop(lane, None)

    def settled(self) -> dict[int, int]:
        """Return for each lane the position up to which the outbox is empty.

        The watermark passes messages as soon as they are read, so a batch in flight limits it.
        """
        return {
            lane: min(safe, self._in_flight.get(lane, safe + 1) - 1)
            for lane, safe in self.safe.items()
        }

    def rewind(self, lane: int, position: int) -> None:
        """The message at `position` stays in the outbox: the next read must find it again."""
        self.safe[lane] = min(self.safe.get(lane, 0), position - 1)

    def forget(self, lane: int) -> None:
        """The lane is not ours any more."""
        for table in (self.safe, self._seen, self._noted, self._passed, self._in_flight):
            table.pop(lane, None)


# ── Lanes and their owners ─────────────────────────────────────────────────────────────────────


def fence_number(lane: int, epoch: int) -> int:
    """Lane and epoch as one number, as the queries compare it."""
    return epoch * LANES + lane


# ── Worker died: who is to blame? ──────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Leftover:
    """What a dead relay was sending: so many messages between two positions of a lane, all of them
    from the outbox or all of them held."""

    lo: int
    hi: int
    messages: int
    alone: bool
    held: bool = False


@dataclass(slots=True)
class Segment:
    """A run of a batch that is sent together. `alone`: nothing else of this relay is under way.

    `deaths`: how many relays died at the beginning of sending it alone. `late`: how many died while
    they sent it by itself, but later, or while other lanes sent too.
    """

    messages: list[Message] = field(default_factory=list)
    chunk: int = 0
    alone: bool = False
    deaths: int = 0
    late: int = 0

    @property
    def blamed(self) -> bool:
        """Whether its message is taken for what killed the relays.

        A message that kills does so at the beginning of its send, or without exception. A kill at a
        random moment rarely meets the beginning of a send, and a send that is not met acquits.
        """
        return self.alone and (self.deaths >= DEATHS_ALONE or self.late >= LATE_DEATHS)


def segments(batch: Sequence[Message], leftovers: Sequence[Leftover]) -> list[Segment]:
    """Cut a batch, in its order, so that what was in flight at a death goes in ever smaller parts.

    A part of n messages that was in flight when a process died is sent in four parts of n / 32,
    four of 2 n / 32 and so on: the more go through, the less likely is a message at fault. What was
    in flight by itself is sent with nothing else under way; so only a message that was really alone
    is blamed, and a random kill costs a little speed.
    """
    if not leftovers:
        return [Segment(list(batch))] if batch else []
    result: list[Segment] = []
    passed, room = 0, 0
    for message in batch:
        seen = _suspicion(message, leftovers)
        last = result[-1] if result else None
        fits = last is not None and not (seen.alone or last.alone) and last.chunk == seen.chunk
        if not fits or (seen.chunk and len(result[-1].messages) >= room):
            result.append(seen)
            room = seen.chunk * (1 + passed // PARTS_OF_A_SIZE)
            passed += seen.chunk > 0
        result[-1].messages.append(message)
    return result


def suspected(message: Message, leftovers: Sequence[Leftover], from_held: bool) -> bool:
    """Whether a relay died while it was sending this message, so that it may have arrived.

    `from_held`: where it was read; in the outbox `held` says only that its key is.
    """
    if not leftovers:
        return False
    return _suspicion(message._replace(held=int(from_held)), leftovers).chunk > 0


def _suspicion(message: Message, leftovers: Sequence[Leftover]) -> Segment:
    """An empty segment of the kind that this message may be sent in; `chunk` 0: any."""
    seen = Segment()
    for left in leftovers:
        if left.lo <= message.position <= left.hi and left.held == bool(message.held):
            part = max(1, left.messages // CHUNKS)
            seen.chunk = min(seen.chunk or part, part)
            seen.deaths += left.alone
            seen.late += left.messages == 1 and not left.alone
    seen.alone = seen.deaths + seen.late > 0
    return seen


# ── Destination down ───────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class Breaker:
    """Whether a destination may be tried, and with how many messages at once.

    closed ──failed──► open ──time──► probing (one message) ──succeeded──► closed, ramping up
                        ▲────────failed────┘
    """

    first_seconds: float = 0.2
    cap_seconds: float = CAP_SECONDS
    probe_seconds: float = 15.0
    code: str = ""
    text: str = ""
    failures: int = 0
    retry_at: float | None = None
    allowance: int | None = None
    probing: bool = False

    def room(self, now: float) -> int | None:
        """How many messages may be sent now; None: any number."""
        if self.retry_at is None:
            return self.allowance
        return 0 if now < self.retry_at else 1

    def admits(self, now: float) -> int | None:
        """As `room`, for messages that are sent now. One probe at a time; should its outcome never
        be told, another may go later."""
        room = self.room(now)
        if room and self.retry_at is not None:
            self.retry_at, self.probing = now + self.probe_seconds, True
        return room

    def is_open(self, now: float) -> bool:
        """Whether it is known to be down, and not yet time to try."""
        return self.retry_at is not None and now < self.retry_at

    def seconds_left(self, now: float) -> float:
        """How long there is nothing to be learnt. A probe under way may tell at any moment, and
        its time limit says nothing about when."""
        if self.retry_at is None or self.probing:
            return 0.0
        return max(0.0, self.retry_at - now)

    def failed(self, now: float, code: str, text: str, random: Callable[[], float]) -> float:
        """It is down; returns the seconds until the next try."""
        self.code, self.text = code, text
        if self.is_open(now) and not self.probing:
            # Was under way when the first failure came: all of them are one outage.
            return (self.retry_at or now) - now
        delay = min(self.first_seconds * 2.0**self.failures, self.cap_seconds)
        delay *= 0.5 + random() / 2
        self.failures = min(self.failures + 1, 30)
        self.retry_at, self.allowance, self.probing = now + delay, 1, False
        return delay

    def learnt_nothing(self, now: float) -> None:
        """The probe met another trouble on its way: the next need not wait for its time limit."""
        if self.probing:
            self.retry_at, self.probing = now, False

    def answered(self, now: float) -> None:
        """Make a probe due now, since the destination answered a ping, unless one is in flight."""
        if self.is_open(now) and not self.probing:
            self.retry_at = now

    def succeeded(self, count: int) -> bool:
        """Messages arrived; returns whether it was down before."""
        was_down = self.retry_at is not None
        self.retry_at, self.failures, self.probing = None, 0, False
        if self.allowance is not None:
            self.allowance = self.allowance * 2 if count >= self.allowance else self.allowance
            if self.allowance > 1000:
                self.allowance = None
        return was_down
