"""The consumer's database work, as flows, inside a handler's transaction or one of our own.

A message is the consumer's once its row stands in `inbox`: handled in the same transaction, or kept
in `inbox_held` until it is. So a copy of it is a duplicate from then on, whatever became of the
first. Only the head of a key has a next attempt; what joins a key that waits does so behind its
last one, under a lock that the handler of that one holds too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from postroom.dead_letters.rules import storable
from postroom.flow import Flow, Rows, Statement, Value
from postroom.inbox.rules import NAME_CHARACTERS, Letter, Retry, Verdict, parked

__all__ = ["Failure", "Opened", "Seat", "Store"]

ROOM = __package__ or "postroom.inbox"
LEASE_SECONDS = 30.0


class Seat(NamedTuple):
    """The source a consumer believes to receive from, and at which epoch."""

    source: str
    epoch: int


@dataclass(slots=True)
class Opened:
    """What became of a batch before its handlers run."""

    fresh: list[Letter] = field(default_factory=list)
    duplicates: list[Letter] = field(default_factory=list)
    changed: list[Letter] = field(default_factory=list)
    behind: list[Letter] = field(default_factory=list)
    lost: set[Seat] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Failure:
    """A message whose handler failed, and what is to be done about it."""

    letter: Letter
    verdict: Verdict
    attempts: int
    history: str
    cause: BaseException | None = None


class Store:
    """The inbox as one process of a consumer sees it."""

    def __init__(self, consumer: str, owner: str, *, stuck_seconds: float, holds_key: bool) -> None:
        self.consumer = consumer
        self.owner = owner
        self.holds_key = holds_key
        self._stuck_ms = max(int(stuck_seconds * 1000), 100)

    @property
    def source(self) -> str:
        """Where its dead letters come from."""
        return f"consumer:{self.consumer}"

    # ── what comes from the broker ─────────────────────────────────────────────────────────────

    def is_at_work(self) -> Flow[bool]:
        """Whether this process is on record here, by its last heartbeat."""
        return bool((yield Statement(ROOM, "at_work", {"incarnation": self.owner})))

    def take_seat(self, source: str) -> Flow[int]:
        """Receive from a source from now on, instead of whoever did; returns the epoch."""
        ((epoch,),) = yield self._query("seat_take", source=source, owner=self.owner)
        return int(epoch)

    def open(self, letters: Sequence[Letter], seats: Iterable[Seat]) -> Flow[Opened]:
        """The beginning of a handler's transaction: which of these are ours to handle now."""
        opened = Opened()
        letters = yield from self._enter(letters, seats, opened)
        if not letters:
            return opened
        fresh = yield from self._claim(letters, opened)
        waiting = yield from self._waiting(fresh)
        for letter in fresh:
            if letter.order in waiting:
                opened.behind.append(letter)
            else:
                opened.fresh.append(letter)
        for letter in opened.behind:
            yield self._park(letter, delay_us=None)
        return opened

    def _enter(
        self, letters: Sequence[Letter], seats: Iterable[Seat], opened: Opened
    ) -> Flow[Sequence[Letter]]:
        wanted = list(seats)
        rows = yield self._query(
            "enter",
            owner=self.owner,
            seats=json.dumps([seat._asdict() for seat in wanted]),
            stuck_ms=str(self._stuck_ms),
        )
        opened.lost = set(wanted) - {Seat(source, epoch) for source, epoch in rows if source}
        if not opened.lost:
            return letters
        return [
            one
            for one in letters
            if one.delivery and Seat(one.delivery.source, one.epoch) not in opened.lost
        ]

    def _claim(self, letters: Sequence[Letter], opened: Opened) -> Flow[list[Letter]]:
        first: dict[str, Letter] = {}
        for letter in letters:
            first.setdefault(letter.record, letter)
        rows = yield self._query("claim", entries=_entries(first.values()))
        claimed = {record for (record,) in rows}
        known = {record: one.digest for record, one in first.items() if record in claimed}
        if len(claimed) < len(letters):
            old = [one for record, one in first.items() if record not in claimed]
            known.update((yield self._query("known", entries=_entries(old))) if old else [])
        fresh = []
        for letter in letters:
            if letter.record in claimed and first[letter.record] is letter:
                fresh.append(letter)
            elif letter.is_copy_of(known.get(letter.record)):
                opened.duplicates.append(letter)
            else:
                opened.changed.append(letter)
        return fresh

    def _waiting(self, letters: Sequence[Letter]) -> Flow[set[tuple[str, str] | None]]:
        """The keys of these that have something waiting, after whoever is at its last one ended."""
        keys = {letter.order for letter in letters if letter.order is not None}
        if not keys:
            return set()
        entries = json.dumps([{"topic": topic, "key": key} for topic, key in sorted(keys)])
        rows = yield self._query("held_keys", keys=entries)
        found: set[tuple[str, str] | None] = set()
        for topic, key in sorted(rows):
            if (yield self._query("held_tail", topic=topic, key=key)):
                found.add((topic, key))
        return found

    # ── what failed ────────────────────────────────────────────────────────────────────────────

    def keep(self, failure: Failure, seats: Iterable[Seat]) -> Flow[Opened]:
        """Keep a message whose handler failed: to be tried again, or as a dead letter.

        In a transaction of its own, after the handler's was rolled back; then it may be
        acknowledged. Somebody else may have handled it meanwhile: it is then a duplicate.
        """
        opened = Opened()
        letters = yield from self._enter([failure.letter], seats, opened)
        if letters:
            opened.fresh = yield from self._claim(letters, opened)
        if opened.fresh:
            verdict = failure.verdict
            delay = verdict.delay_seconds if isinstance(verdict, Retry) else 0.0
            # Then its turn has not come: what nobody handles waits as well as anything.
            waiting = yield from self._waiting(opened.fresh)
            if failure.letter.order in waiting:
                opened.behind, opened.fresh = opened.fresh, []
                yield self._park(failure.letter, delay_us=None)
            else:
                yield self._park(failure.letter, delay_us=int(delay * 1e6), failure=failure)
                yield from self._bury_if_dead(failure)
        return opened

    def suspect(self, letter: Letter, seats: Iterable[Seat]) -> Flow[Opened]:
        """Keep a message that has come so often that it may end processes: its attempts are then
        counted before they begin."""
        opened = yield from self.open([letter], seats)
        for each in opened.fresh:
            yield self._park(each, delay_us=0)
        return opened

    def keep_changed(self, failure: Failure) -> Flow[bool]:
        """Bury a message that came under a known id with other content, once; it holds no key."""
        rows = yield self._query("claim", entries=_entries([failure.letter]))
        if rows:
            yield self._park(failure.letter, delay_us=None, failure=failure)
            yield from self._bury_if_dead(failure, holds_key=False)
        return bool(rows)

    def _bury_if_dead(self, failure: Failure, *, holds_key: bool | None = None) -> Flow[None]:
        if isinstance(failure.verdict, Retry):
            return
        letter = failure.letter
        if letter.position is None:
            ((position,),) = yield self._query("where_parked", message_id=letter.record)
            letter = letter._replace(position=position)
        holds = self.holds_key if holds_key is None else holds_key
        holds = holds and letter.key is not None
        values = _failed(failure)
        yield self._query(
            "bury",
            **values,
            source=self.source,
            id=letter.letter_id,
            lane=letter.lane,
            position=letter.position,
            aggregate_type=_short(letter.headers.get("aggregate_type")),
            aggregate_id=_short(letter.headers.get("aggregate_id")),
            holds_key=int(holds),
        )
        yield self._query("block", **values, position=letter.position, aside=int(not holds))
        if not holds:
            yield from self._arm(letter)

    # ── what waits to be tried again ───────────────────────────────────────────────────────────

    def lease_due(self, rows: int) -> Flow[list[Letter]]:
        """Heads whose time has come; for a while they are left to us."""
        found = yield self._query("due", rows=rows)
        letters = [parked(row) for row in found]
        if letters:
            positions = [letter.position or 0 for letter in letters]
            yield self._query("lease", positions=positions, pause_us=_pause_us())
        return letters

    def unlease(self, letter: Letter) -> Flow[None]:
        """It was not come to: let others have it."""
        yield self._query("unlease", position=letter.position, attempts=letter.attempts)

    def start(self, letter: Letter) -> Flow[Letter | None]:
        """Count an attempt that is about to begin; None: it is somebody else's by now.

        In a transaction of its own, so that it counts though the process ends in it.
        """
        if not (yield from self.lock(letter)):
            return None
        yield self._query("start", position=letter.position, pause_us=_pause_us())
        return letter._replace(attempts=letter.attempts + 1)

    def lock(self, letter: Letter) -> Flow[bool]:
        """The beginning of a retry's transaction: whether the message is still to be handled."""
        yield from self._patience()
        place = {"position": letter.position, "attempts": letter.attempts}
        return bool((yield self._query("lock_parked", **place)))

    def behind(self, letter: Letter, rows: int) -> Flow[list[Letter]]:
        """What waits behind a head that was handled, locked."""
        yield from self._patience()
        found = yield self._query("behind", topic=letter.topic, key=letter.key, rows=rows)
        return [parked(row) for row in found]

    def done(self, letters: Sequence[Letter]) -> Flow[None]:
        """The end of a retry's transaction: they were handled, and the next of the key is due."""
        yield self._query("drop_parked", positions=[one.position or 0 for one in letters])
        for letter in letters:
            yield self._query("handled", message_id=letter.record)
            if letter.redrives:
                yield self._query(
                    "resolve", source=self.source, id=letter.letter_id, position=letter.position
                )
        yield from self._arm(letters[-1])

    def fail(self, failure: Failure) -> Flow[bool]:
        """A retry failed; in a transaction of its own. False: it is somebody else's by now."""
        if not (yield from self.lock(failure.letter)):
            return False
        verdict = failure.verdict
        if isinstance(verdict, Retry):
            yield self._query(
                "fail_parked",
                **_failed(failure),
                position=failure.letter.position,
                delay_us=int(verdict.delay_seconds * 1e6),
            )
        yield from self._bury_if_dead(failure)
        return True

    # ── small things ───────────────────────────────────────────────────────────────────────────

    def _patience(self) -> Flow[Rows]:
        return (
            yield self._query("enter", owner=self.owner, seats="[]", stuck_ms=str(self._stuck_ms))
        )

    def _arm(self, letter: Letter) -> Flow[None]:
        """The first of its key gets its turn."""
        if letter.key is not None:
            rows = yield self._query("head", topic=letter.topic, key=letter.key)
            if rows:
                yield self._query("arm", position=rows[0][0])

    def _park(
        self, letter: Letter, *, delay_us: int | None, failure: Failure | None = None
    ) -> Statement:
        nothing = {"attempts": 0, "history": None, "error_code": None, "error": None}
        return self._query(
            "park",
            **(_failed(failure) if failure is not None else nothing),
            message_id=letter.record,
            topic=letter.topic,
            key=letter.key,
            type=letter.type,
            content_type=letter.content_type,
            headers=letter.headers_json(),
            payload=letter.payload,
            size=letter.size,
            delay_us=delay_us,
        )

    def _query(self, name: str, **values: Value) -> Statement:
        return Statement(ROOM, name, {"consumer": self.consumer, **values})


def _pause_us() -> int:
    return int(LEASE_SECONDS * 1e6)


def _entries(letters: Iterable[Letter]) -> str:
    return json.dumps([{"id": one.record, "digest": one.digest} for one in letters])


def _failed(failure: Failure) -> dict[str, Value]:
    return {
        "attempts": failure.attempts,
        "history": failure.history,
        "error_code": failure.verdict.code,
        "error": failure.verdict.text,
    }


def _short(text: str | None) -> str | None:
    return None if text is None else storable(text, NAME_CHARACTERS)
