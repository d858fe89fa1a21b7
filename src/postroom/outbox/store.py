"""The relay's database work, as flows and queries. Everything it writes is fenced.

A settle that finds a lane not ours any more writes nothing for that lane and says so. A settle
without failures is one autocommit statement on PostgreSQL; everything else is one transaction that
first locks the lanes' rows against take-over.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from postroom.databases.database import WorkerLink
from postroom.flow import Flow, Row, Rows, Statement, Value
from postroom.ledger import store as ledger
from postroom.ledger.rules import Note
from postroom.messages import Message
from postroom.outbox.rules import Leftover, fence_number

__all__ = ["Ask", "Burial", "Change", "Entry", "Failure", "Fence", "Store"]

ROOM = __package__ or "postroom.outbox"


@dataclass(frozen=True, slots=True)
class Fence:
    """The lane a worker believes to own, and at which epoch."""

    lane: int
    epoch: int

    @property
    def number(self) -> int:
        return fence_number(self.lane, self.epoch)


@dataclass(frozen=True, slots=True)
class Ask:
    """A lane that wants to read: past which position, and whether any of its keys are held."""

    lane: int
    after: int
    probe: bool


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the journal: what a lane is about to send."""

    fence: Fence
    batch: int
    lo: int
    hi: int
    messages: int
    alone: bool
    held: bool = False


@dataclass(frozen=True, slots=True)
class Failure:
    """A message that will be tried again."""

    message: Message
    attempts: int
    history: str
    code: str
    text: str
    delay_seconds: float


@dataclass(frozen=True, slots=True)
class Burial:
    """A message that becomes a dead letter. `ended`: nobody needs to decide about it."""

    message: Message
    attempts: int
    history: str
    code: str
    text: str
    holds_key: bool
    ended: bool = False


@dataclass(slots=True)
class Change:
    """All that one lane wants written down at once. Messages come from the outbox or from held."""

    fence: Fence
    batches: list[int] = field(default_factory=list)
    delivered: list[Message] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    burials: list[Burial] = field(default_factory=list)
    waiting: list[Message] = field(default_factory=list)
    later: list[Message] = field(default_factory=list)
    later_seconds: float = 0.0
    doubts: list[tuple[Message, str]] = field(default_factory=list)  # with their histories
    acquitted: list[int] = field(default_factory=list)
    outlived: list[int] = field(default_factory=list)  # sent alone for longer than a killer takes
    from_held: bool = False
    notes: dict[str, Note] = field(default_factory=dict)  # for the ledger, by the message's id

    @property
    def plain(self) -> bool:
        """Whether everything was delivered straight from the outbox, at the first try."""
        troubled = self.failures or self.burials or self.waiting or self.later
        if troubled or self.acquitted or self.outlived or self.from_held or self.notes:
            return False
        return not [m for m in self.delivered if m.redrives]

    def pieces(self, most: int) -> Iterator[Change]:
        """This change in parts that each fit one transaction, what failed before what waits for it.

        A part that is written while the next is not leaves nothing out of order: what is not yet
        written is still in the outbox, under way.
        """
        if len(self.failures) + len(self.burials) <= most:
            yield self
            return
        troubles: list[Failure | Burial] = [*self.failures, *self.burials]
        for start in range(0, len(troubles), most):
            part = Change(self.fence, from_held=self.from_held)
            some = troubles[start : start + most]
            part.failures = [trouble for trouble in some if isinstance(trouble, Failure)]
            part.burials = [trouble for trouble in some if isinstance(trouble, Burial)]
            part.notes = self._notes_of([trouble.message for trouble in some])
            yield part
        rest = [*self.delivered, *(message for message, _ in self.doubts)]
        yield replace(self, failures=[], burials=[], notes=self._notes_of(rest))

    def _notes_of(self, messages: list[Message]) -> dict[str, Note]:
        return {m.id: self.notes[m.id] for m in messages if m.id in self.notes}


class Store:
    """The outbox as the relay `owner` sees it."""

    def __init__(self, dialect: str, owner: str, *, archive: bool) -> None:
        self.dialect = dialect
        self.owner = owner
        self.archive = archive

    # ── reading ────────────────────────────────────────────────────────────────────────────────

    async def read(
        self, link: WorkerLink, asks: Sequence[Ask], *, rows: int, total_rows: int, bytes: int
    ) -> dict[int, list[Message]]:
        """The next messages of each lane, in order, bounded by rows and bytes in all."""
        found: dict[int, list[Message]] = {ask.lane: [] for ask in asks}
        if self.dialect == "postgresql":
            answer = await link.query(
                ROOM,
                "read_lanes",
                lane_list=[ask.lane for ask in asks],
                after_list=[ask.after for ask in asks],
                probe_list=[int(ask.probe) for ask in asks],
                rows=rows,
                total_rows=total_rows,
                bytes=bytes,
            )
            for message in map(Message._make, answer):
                found[message.lane].append(message)
            return found
        for ask in asks:
            if total_rows <= 0 or bytes <= 0:
                break
            messages = await self._read_lane(link, ask, min(rows, total_rows), bytes)
            found[ask.lane] = messages
            total_rows -= len(messages)
            bytes -= sum(message.size for message in messages)
        return found

    async def _read_lane(self, link: WorkerLink, ask: Ask, rows: int, bytes: int) -> list[Message]:
        sizes = await link.query(ROOM, "lane_sizes", lane=ask.lane, after=ask.after, rows=rows)
        upto = count = total = 0
        for position, size in sizes:
            if count and total + size > bytes:
                break
            upto, count, total = position, count + 1, total + size
        if not count:
            return []
        answer = await link.query(
            ROOM,
            "read_lane",
            lane=ask.lane,
            after=ask.after,
            upto=upto,
            rows=count,
            probe=int(ask.probe),
        )
        return [Message._make(row) for row in answer]

    async def held_due(
        self, link: WorkerLink, lane: int, *, rows: int, bytes: int
    ) -> list[Message]:
        """The heads of held keys whose time has come."""
        answer = await link.query(ROOM, "held_due", lane=lane, rows=rows, bytes=bytes)
        return [Message._make(row) for row in answer]

    async def held_run(
        self, link: WorkerLink, head: Message, *, rows: int, bytes: int
    ) -> list[Message]:
        """What waits behind a head that was delivered."""
        answer = await link.query(
            ROOM,
            "held_run",
            lane=head.lane,
            topic=head.topic,
            key=head.key,
            rows=rows,
            bytes=bytes,
        )
        return [Message._make(row) for row in answer]

    # ── the journal ────────────────────────────────────────────────────────────────────────────

    async def write_journal(self, link: WorkerLink, entries: Sequence[Entry]) -> set[int]:
        """Say what is about to be sent; returns the lanes that are still ours."""
        answer = await link.query(
            ROOM,
            "journal_write",
            owner=self.owner,
            fence_list=[entry.fence.number for entry in entries],
            lane_list=[entry.fence.lane for entry in entries],
            entries=json.dumps(
                [
                    {
                        "lane": entry.fence.lane,
                        "batch": entry.batch,
                        "lo": entry.lo,
                        "hi": entry.hi,
                        "messages": entry.messages,
                        "alone": int(entry.alone),
                        "held": int(entry.held),
                    }
                    for entry in entries
                ]
            ),
        )
        return {lane for (lane,) in answer}

    async def clear_journal(self, link: WorkerLink, *, keep: bool) -> None:
        """Drop all that this relay has said, since it lives; `keep`: it remembers what it sent and
        could not settle, and whoever comes after its death must know that too."""
        if not keep:
            await link.query(ROOM, "journal_clear_all", owner=self.owner)

    async def load_lane(
        self, link: WorkerLink, lane: int, *, keep: bool = False
    ) -> tuple[list[Leftover], bool]:
        """What a new owner must know first: what dead relays were sending, and any held keys.

        `keep` as above. What is ours makes nobody suspect: this process lived on.
        """

        def load() -> Flow[tuple[Rows, Rows]]:
            if not keep:
                yield self._query("journal_clear_own", lane=lane, owner=self.owner)
            yield from self._forget(lane)
            left = yield self._query("journal_read", lane=lane)
            held = yield self._query("held_any", lane=lane)
            return left, held

        left, held = await link.transact(load())
        return _leftovers(row for row in left if row[0] != self.owner), bool(held)

    async def forget_journal(self, link: WorkerLink, lane: int) -> list[Leftover]:
        """Drop what dead relays left of which nothing remains; returns the rest."""

        def forget() -> Flow[Rows]:
            yield from self._forget(lane)
            return (yield self._query("journal_read", lane=lane))

        rows = await link.transact(forget())
        return _leftovers(row for row in rows if row[0] != self.owner)

    def _forget(self, lane: int) -> Flow[None]:
        # Found first and deleted by name: on MariaDB a DELETE that looks into the outbox itself
        # would wait for open publishers.
        gone = yield self._query("journal_gone", lane=lane, owner=self.owner)
        for incarnation, batch in gone:
            yield self._query("journal_drop", lane=lane, incarnation=incarnation, batch=batch)

    # ── settling ───────────────────────────────────────────────────────────────────────────────

    async def settle(self, link: WorkerLink, changes: Sequence[Change]) -> tuple[set[int], int]:
        """Write down how it ended; returns the lanes still ours, and how many rows were missing."""
        if self.dialect == "postgresql" and all(change.plain for change in changes):
            return await self._settle_at_once(link, changes)
        return await link.transact(self._settle(changes))

    async def _settle_at_once(
        self, link: WorkerLink, changes: Sequence[Change]
    ) -> tuple[set[int], int]:
        messages = [message for change in changes for message in change.delivered]
        answer = await link.query(
            ROOM,
            "settle_archived" if self.archive else "settle_deleted",
            owner=self.owner,
            fence_list=[change.fence.number for change in changes],
            batch_list=[batch for change in changes for batch in change.batches],
            **_places(messages),
        )
        mine = {lane for lane, _ in answer}
        expected = sum(len(each.delivered) for each in changes if each.fence.lane in mine)
        return mine, expected - answer[0][1] if answer else 0

    def _settle(self, changes: Sequence[Change]) -> Flow[tuple[set[int], int]]:
        rows = yield self._fence([change.fence for change in changes])
        mine = {lane for (lane,) in rows}
        ours = [change for change in changes if change.fence.lane in mine]
        plain = [message for change in ours if change.plain for message in change.delivered]
        missing = 0
        if plain:
            missing += yield from self._remove("outbox", plain)
        for change in ours:
            if not change.plain:
                missing += yield from self._settle_lane(change)
        batches = [batch for change in ours for batch in change.batches]
        if batches:
            yield self._query(
                "journal_clear",
                owner=self.owner,
                lane_list=[change.fence.lane for change in ours],
                batch_list=batches,
            )
        return mine, missing

    def _settle_lane(self, change: Change) -> Flow[int]:
        source, missing = "held" if change.from_held else "outbox", 0
        if change.delivered:
            missing = yield from self._remove(source, change.delivered)
            for message in change.delivered:
                if message.redrives:
                    yield self._query("redriven_resolve", id=message.id, position=message.position)
        if not change.from_held:
            moved = [f.message for f in change.failures] + [b.message for b in change.burials]
            moved += change.waiting + change.later
            if moved:
                yield self._query("hold", **_places(moved))
        if change.failures:
            yield Statement(ROOM, "hold_failed", many=[_failed(one) for one in change.failures])
        if change.burials:
            yield from self._bury(change.burials)
        if change.later:
            delay_us = int(change.later_seconds * 1e6)
            heads = _heads(change.later)
            yield self._query("hold_later", delay_us=delay_us, **_places(heads))
        if change.doubts:
            yield Statement(ROOM, "hold_doubt", many=[_doubted(*each) for each in change.doubts])
        yield from self._arm(change)
        if change.notes:
            yield from ledger.write(change.notes.values())
        lane = change.fence.lane
        for late, positions in enumerate((change.outlived, change.acquitted)):
            for position in positions:
                yield self._query("journal_acquit", lane=lane, position=position, late=late)
        return missing

    def _remove(self, source: str, delivered: Sequence[Message]) -> Flow[int]:
        if self.archive:
            yield self._query(f"{source}_archive", **_places(delivered))
        ((gone,),) = yield self._query(f"{source}_delete", **_places(delivered))
        return len(delivered) - int(gone)

    def _bury(self, burials: Sequence[Burial]) -> Flow[None]:
        """A dead letter each; the message itself stays to hold its key, or goes."""
        yield Statement(ROOM, "bury", many=[_buried(burial) for burial in burials])
        holding = [_buried(burial) for burial in burials if burial.holds_key]
        if holding:
            yield Statement(ROOM, "held_block", many=holding)
        going = [burial.message for burial in burials if not burial.holds_key]
        if going:
            yield self._query("held_delete", **_places(going))

    def _arm(self, change: Change) -> Flow[None]:
        """Whoever is first of a key now gets its turn, unless a dead letter holds the key."""
        touched = change.waiting + [burial.message for burial in change.burials]
        if change.from_held:
            touched += change.delivered
        keys = {(m.lane, m.topic, m.key) for m in touched if m.key is not None}
        if keys:
            yield self._query("heads_arm", keys=_keys(keys), delay_us=0)

    # ── owning lanes ───────────────────────────────────────────────────────────────────────────

    async def take_lanes(
        self, link: WorkerLink, lanes: Sequence[int], lease_seconds: float
    ) -> list[Fence]:
        """Become the owner of those of these lanes that are free."""

        def take() -> Flow[list[Fence]]:
            free = yield self._query("lanes_lock_free", lane_list=list(lanes), owner=self.owner)
            if free:
                yield self._query(
                    "lanes_take",
                    lane_list=[lane for lane, _ in free],
                    owner=self.owner,
                    lease_us=int(lease_seconds * 1e6),
                )
            return [Fence(lane, epoch + 1) for lane, epoch in free]

        return await link.transact(take())

    async def promote(self, link: WorkerLink, fences: Iterable[Fence], rows: int) -> int:
        """Move delayed messages that have become due into the outbox; returns how many."""
        by_lane = {fence.lane: fence for fence in fences}
        found = await link.query(ROOM, "delayed_lanes", lane_list=list(by_lane))
        due_fences = [by_lane[lane] for (lane,) in found]
        if not due_fences:
            return 0

        def move() -> Flow[int]:
            mine = yield self._fence(due_fences)
            moved = 0
            for (lane,) in mine:
                due = yield self._query("delayed_due", lane=lane, rows=rows)
                if due:
                    entries = [{"lane": a, "deliver_at": b, "id": c} for a, b, c in due]
                    yield self._query("promote", entries=json.dumps(entries))
                    moved += len(due)
            return moved

        return await link.transact(move())

    def _fence(self, fences: Sequence[Fence]) -> Statement:
        return self._query(
            "fence",
            owner=self.owner,
            fence_list=[fence.number for fence in fences],
            lane_list=[fence.lane for fence in fences],
        )

    def _query(self, name: str, **values: Value) -> Statement:
        return Statement(ROOM, name, values)


def _places(messages: Sequence[Message]) -> dict[str, Value]:
    positions = [message.position for message in messages]
    return {
        "lane_list": [message.lane for message in messages],
        "position_list": positions,
        "positions": positions,
    }


def _heads(messages: Sequence[Message]) -> list[Message]:
    """The first of each key: only it has a next attempt."""
    first: dict[tuple[str, str], Message] = {}
    for message in messages:
        first.setdefault(message.order, message)
    return list(first.values())


def _keys(keys: Iterable[tuple[int, str, str | None]]) -> str:
    return json.dumps([{"lane": lane, "topic": topic, "key": key} for lane, topic, key in keys])


def _failed(failure: Failure) -> dict[str, Value]:
    return {
        "lane": failure.message.lane,
        "position": failure.message.position,
        "attempts": failure.attempts,
        "history": failure.history,
        "error_code": failure.code,
        "error": failure.text,
        "delay_us": int(failure.delay_seconds * 1e6),
    }


def _doubted(message: Message, history: str) -> dict[str, Value]:
    return {"lane": message.lane, "position": message.position, "history": history}


def _buried(burial: Burial) -> dict[str, Value]:
    return {
        "lane": burial.message.lane,
        "position": burial.message.position,
        "state": "resolved" if burial.ended else "dead",
        "holds_key": int(burial.holds_key),
        "error_code": burial.code,
        "error": burial.text,
        "attempts": burial.attempts,
        "history": burial.history,
    }


def _leftovers(rows: Iterable[Row]) -> list[Leftover]:
    return [Leftover(lo, hi, n, bool(alone), bool(held)) for _, _, lo, hi, n, alone, held in rows]
