"""The outbox's tables in memory, and an answer to every query of its room, as PostgreSQL gives it.

A transaction sees what is committed and what it wrote itself (READ COMMITTED). Each query is one
method; the methods take what the SQL takes and return the same columns.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from postroom.flow import Rows
from postroom.messages import Message
from postroom.outbox.rules import fence_number

from .loop import EPOCH_SECONDS, OUTSIDE, Process

LANES = 3  # instead of sixteen, so that keys meet more often
Values = Mapping[str, Any]
Place = tuple[int, int]  # lane and position


@dataclass(frozen=True, slots=True)
class LaneRow:
    owner: str | None = None
    epoch: int = 0
    lease_until: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """A message in the outbox, held or delayed."""

    message: Message
    deliver_at: float | None = None
    expires_at: float | None = None
    attempts: int = 0
    history: str | None = None
    next_attempt_at: float | None = None
    blocked: bool = False

    @property
    def place(self) -> Place:
        return self.message.lane, self.message.position

    @property
    def order(self) -> tuple[int, str, str | None]:
        return self.message.lane, self.message.topic, self.message.key


@dataclass(frozen=True, slots=True)
class Letter:
    """A dead letter."""

    id: str
    state: str
    holds_key: bool
    code: str
    attempts: int


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of the journal."""

    lo: int
    hi: int
    messages: int
    alone: bool
    held: bool


class Tables:
    """What is committed."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.position = 0
        self.lane: dict[int, LaneRow] = {lane: LaneRow() for lane in range(LANES)}
        self.outbox: dict[Place, Row] = {}
        self.held: dict[Place, Row] = {}
        self.delayed: dict[str, Row] = {}
        self.dead: dict[str, Letter] = {}
        self.batch: dict[tuple[int, str, int], Entry] = {}
        self.worker: dict[str, float] = {}
        self.meta: dict[str, str] = {"schema_version": "2", "oldest_code": "1"}

    def next_position(self) -> int:
        """A sequence knows no transactions."""
        self.position += 1
        return self.position


class View:
    """The tables as one transaction sees and changes them, until it commits."""

    def __init__(self, tables: Tables, asker: Process = OUTSIDE) -> None:
        self.tables = tables
        self.asker = asker
        self.now = tables.now
        self._changed: dict[str, dict[Any, Any]] = {}

    def commit(self) -> None:
        for name, changes in self._changed.items():
            table = getattr(self.tables, name)
            for key, row in changes.items():
                if row is None:
                    table.pop(key, None)
                else:
                    table[key] = row
        self._changed = {}

    def _rows(self, name: str) -> dict[Any, Any]:
        table: dict[Any, Any] = getattr(self.tables, name)
        if name not in self._changed:
            return table
        merged = table | self._changed[name]
        return {key: row for key, row in merged.items() if row is not None}

    def _get(self, name: str, key: Any) -> Any:
        changes = self._changed.get(name)
        if changes is not None and key in changes:
            return changes[key]
        return getattr(self.tables, name).get(key)

    def _put(self, name: str, key: Any, row: Any) -> None:
        self._changed.setdefault(name, {})[key] = row

    def answer(self, name: str, values: Values) -> Rows:
        """Carry out the query of this name."""
        rows: Rows | None = getattr(self, name)(values)
        return rows or []

    # ── who owns what ──────────────────────────────────────────────────────────────────────────

    def fenced(self, values: Values) -> list[int]:
        """The lanes of the fence list that are the owner's, at these epochs."""
        numbers = set(values["fence_list"])
        return [
            lane
            for lane, row in sorted(self._rows("lane").items())
            if row.owner == values["owner"] and fence_number(lane, row.epoch) in numbers
        ]

    def is_free(self, row: LaneRow, values: Values) -> bool:
        return row.owner is None or (row.lease_until or 0) < self.now()

    def lease_end(self, values: Values) -> float:
        return self.now() + float(values["lease_us"]) / 1e6

    def fence(self, values: Values) -> Rows:
        return [(lane,) for lane in self.fenced(values)]

    def lanes_state(self, values: Values) -> Rows:
        return [
            (lane, row.owner, row.epoch, 0, int(self.is_free(row, values)))
            for lane, row in sorted(self._rows("lane").items())
        ]

    def lanes_lock_free(self, values: Values) -> Rows:
        """Of `lane_list` the server has left only what is not locked."""
        found = []
        for lane in sorted(values["lane_list"]):
            row = self._get("lane", lane)
            if row.owner == values["owner"] or self.is_free(row, values):
                found.append((lane, row.epoch))
        return found

    def lanes_take(self, values: Values) -> None:
        for lane in values["lane_list"]:
            epoch = self._get("lane", lane).epoch + 1
            self._put("lane", lane, LaneRow(values["owner"], epoch, self.lease_end(values)))

    def lanes_renew(self, values: Values) -> Rows:
        renewed = []
        for lane, row in sorted(self._rows("lane").items()):
            if row.owner == values["owner"]:
                self._put("lane", lane, replace(row, lease_until=self.lease_end(values)))
                renewed.append((lane, row.epoch, 0))
        return renewed

    def lanes_release(self, values: Values) -> None:
        for lane in self.fenced(values):
            row = self._get("lane", lane)
            self._put("lane", lane, LaneRow(None, row.epoch, None))

    def lanes_notice(self, values: Values) -> Rows:
        held = {lane for lane, _ in self._rows("held")}
        return [(lane, 0, int(lane in held)) for lane in values["lane_list"]]

    # ── reading ────────────────────────────────────────────────────────────────────────────────

    def _message(self, row: Row, held: bool) -> tuple[Any, ...]:
        over = row.expires_at is not None and row.expires_at <= self.now()
        return tuple(
            row.message._replace(
                expired=int(over), held=int(held), attempts=row.attempts, history=row.history
            )
        )

    def key_is_held(self, row: Row) -> bool:
        return row.message.key is not None and any(
            other.order == row.order for other in self._rows("held").values()
        )

    def read_lanes(self, values: Values) -> Rows:
        asks = zip(values["lane_list"], values["after_list"], values["probe_list"], strict=True)
        outbox = self._rows("outbox")
        found: Rows = []
        if not outbox:
            return found
        running = 0
        for lane, after, probe in asks:
            places = sorted(p for p in outbox if p[0] == lane and p[1] > after)
            for place in places[: values["rows"]]:
                row = outbox[place]
                running += row.message.size
                if (
                    running - row.message.size < values["bytes"]
                    and len(found) < values["total_rows"]
                ):
                    found.append(self._message(row, bool(probe) and self.key_is_held(row)))
        return found

    def held_due(self, values: Values) -> Rows:
        due = [
            row
            for (lane, _), row in self._rows("held").items()
            if lane == values["lane"]
            and row.next_attempt_at is not None
            and row.next_attempt_at <= self.now()
        ]
        due.sort(key=lambda row: (row.next_attempt_at or 0, row.message.position))
        due = _within(due[: values["rows"]], values["bytes"])
        return [self._message(row, True) for row in sorted(due, key=lambda row: row.place)]

    def held_run(self, values: Values) -> Rows:
        order = (values["lane"], values["topic"], values["key"])
        behind = sorted(
            (row for row in self._rows("held").values() if row.order == order),
            key=lambda row: row.place,
        )
        run = []
        for row in _within(behind[: values["rows"]], values["bytes"]):
            if row.blocked:
                break
            run.append(self._message(row, True))
        return run

    def held_any(self, values: Values) -> Rows:
        return [(1,)] if any(lane == values["lane"] for lane, _ in self._rows("held")) else []

    # ── the journal ────────────────────────────────────────────────────────────────────────────

    def journal_read(self, values: Values) -> Rows:
        return [
            (owner, batch, e.lo, e.hi, e.messages, int(e.alone), int(e.held))
            for (lane, owner, batch), e in sorted(
                self._rows("batch").items(), key=lambda item: (item[1].lo, item[0])
            )
            if lane == values["lane"]
        ]

    def journal_write(self, values: Values) -> Rows:
        mine = self.fenced(values)
        written = []
        for e in json.loads(values["entries"]):
            if e["lane"] in mine:
                entry = Entry(e["lo"], e["hi"], e["messages"], bool(e["alone"]), bool(e["held"]))
                self._put("batch", (e["lane"], values["owner"], e["batch"]), entry)
                written.append((e["lane"],))
        return written

    def _journal_drop(self, over: Callable[[int, str, int, Entry], bool]) -> None:
        for (lane, owner, batch), entry in list(self._rows("batch").items()):
            if over(lane, owner, batch, entry):
                self._put("batch", (lane, owner, batch), None)

    def journal_clear(self, values: Values) -> None:
        lanes, batches = set(values["lane_list"]), set(values["batch_list"])
        self._journal_drop(
            lambda lane, owner, batch, _: (
                owner == values["owner"] and lane in lanes and batch in batches
            )
        )

    def journal_clear_all(self, values: Values) -> None:
        self._journal_drop(lambda lane, owner, batch, _: owner == values["owner"])

    def journal_clear_own(self, values: Values) -> None:
        self._journal_drop(
            lambda lane, owner, batch, _: lane == values["lane"] and owner == values["owner"]
        )

    def journal_acquit(self, values: Values) -> None:
        place = values["position"]
        self._journal_drop(
            lambda lane, owner, batch, e: (
                lane == values["lane"] and e.alone and e.lo == place and e.hi == place
            )
        )

    def journal_gone(self, values: Values) -> Rows:
        gone = []
        for (lane, owner, batch), e in self._rows("batch").items():
            if lane != values["lane"] or owner == values["owner"]:
                continue
            rows = self._rows("held" if e.held else "outbox")
            if not any(
                place[0] == lane and e.lo <= place[1] <= e.hi and not (e.held and row.blocked)
                for place, row in rows.items()
            ):
                gone.append((owner, batch))
        return gone

    def journal_drop(self, values: Values) -> None:
        self._put("batch", (values["lane"], values["incarnation"], values["batch"]), None)

    # ── settling ───────────────────────────────────────────────────────────────────────────────

    def _delete(self, name: str, places: Iterable[Place]) -> list[Row]:
        gone = []
        for place in places:
            row = self._get(name, place)
            if row is not None:
                self._put(name, place, None)
                gone.append(row)
        return gone

    def settle_deleted(self, values: Values) -> Rows:
        mine = self.fenced(values)
        gone = self._delete("outbox", [place for place in _places(values) if place[0] in mine])
        self.journal_clear({**values, "lane_list": mine})
        return [(lane, len(gone)) for lane in mine]

    settle_archived = settle_deleted

    def outbox_delete(self, values: Values) -> Rows:
        return [(len(self._delete("outbox", _places(values))),)]

    def held_delete(self, values: Values) -> Rows:
        return [(len(self._delete("held", _places(values))),)]

    def hold(self, values: Values) -> None:
        for row in self._delete("outbox", _places(values)):
            self._put("held", row.place, row)

    def _change_held(self, values: Values, **changes: Any) -> None:
        place = values["lane"], values["position"]
        row = self._get("held", place)
        if row is not None:
            self._put("held", place, replace(row, **changes))

    def hold_failed(self, values: Values) -> None:
        at = self.now() + values["delay_us"] / 1e6
        told = {"attempts": values["attempts"], "history": values["history"]}
        self._change_held(values, next_attempt_at=at, **told)

    def hold_later(self, values: Values) -> None:
        at = self.now() + values["delay_us"] / 1e6
        for lane, position in _places(values):
            self._change_held({"lane": lane, "position": position}, next_attempt_at=at)

    def heads_arm(self, values: Values) -> None:
        for key in json.loads(values["keys"]):
            order = (key["lane"], key["topic"], key["key"])
            rows = [row for row in self._rows("held").values() if row.order == order]
            head = min(rows, key=lambda row: row.place, default=None)
            if head is not None and head.next_attempt_at is None and not head.blocked:
                at = self.now() + values["delay_us"] / 1e6
                self._put("held", head.place, replace(head, next_attempt_at=at))

    def bury(self, values: Values) -> None:
        row = self._get("held", (values["lane"], values["position"]))
        if row is not None:
            letter = Letter(
                row.message.id,
                values["state"],
                bool(values["holds_key"]),
                values["error_code"],
                values["attempts"],
            )
            self._put("dead", letter.id, letter)

    def held_block(self, values: Values) -> None:
        told = {"attempts": values["attempts"], "history": values["history"]}
        self._change_held(values, blocked=True, next_attempt_at=None, **told)

    def delayed_due(self, values: Values) -> Rows:
        due = [
            row
            for row in self._rows("delayed").values()
            if row.message.lane == values["lane"] and row.deliver_at <= self.now()
        ]
        due.sort(key=lambda row: (row.deliver_at, row.message.id))
        return [(values["lane"], "", row.message.id) for row in due[: values["rows"]]]

    def promote(self, values: Values) -> None:
        for entry in json.loads(values["entries"]):
            row = self._get("delayed", entry["id"])
            if row is not None:
                self._put("delayed", entry["id"], None)
                placed = row.message._replace(position=self.tables.next_position())
                moved = replace(row, message=placed)
                self._put("outbox", moved.place, moved)

    # ── the rest of the house ──────────────────────────────────────────────────────────────────

    def meta_read(self, values: Values) -> Rows:
        value = self._get("meta", values["item"])
        return [] if value is None else [(value,)]

    def meta_write(self, values: Values) -> None:
        self._put("meta", values["item"], values["value"])

    def worker_beat(self, values: Values) -> None:
        self._put("worker", values["incarnation"], self.now())

    def workers_live(self, values: Values) -> Rows:
        since = self.now() - values["lease_us"] / 1e6
        return [(who,) for who, seen in sorted(self._rows("worker").items()) if seen > since]

    def worker_gone(self, values: Values) -> None:
        self._put("worker", values["incarnation"], None)

    def workers_forget(self, values: Values) -> None:
        for who, seen in list(self._rows("worker").items()):
            if seen < self.now() - 86_400:
                self._put("worker", who, None)

    def clock(self, values: Values) -> Rows:
        return [(int((EPOCH_SECONDS + self.now()) * 1e6),)]

    def measure_lane(self, values: Values) -> Rows:
        lane, after = values["lane"], values["after"]
        here = sum(p[0] == lane and p[1] > after for p in self._rows("outbox"))
        due = sum(
            p[0] == lane and row.next_attempt_at is not None
            for p, row in self._rows("held").items()
        )
        return [(here, due, None, None)]

    def measure_totals(self, values: Values) -> Rows:
        free = sum(self.is_free(row, values) for row in self._rows("lane").values())
        return [(len(self._rows("held")), len(self._rows("delayed")), free)]

    def measure_dead(self, values: Values) -> Rows:
        dead = [letter for letter in self._rows("dead").values() if letter.state == "dead"]
        return [(len(dead), sum(letter.holds_key for letter in dead))]

    def measure_held(self, values: Values) -> Rows:
        return [(None,)]

    def _nothing(self, values: Values) -> None:
        """Nothing here is archived, redriven or old."""

    def _none_gone(self, values: Values) -> Rows:
        return [(0,)]

    outbox_archive = held_archive = redriven_resolve = archive_days = _nothing
    archive_overflow = prune_archive = prune_overflow = prune_dedup = _none_gone
    prune_dead = prune_inbox = prune_jobs = measure_outbox = _none_gone


def _places(values: Values) -> list[Place]:
    return list(zip(values["lane_list"], values["position_list"], strict=True))


def _within(rows: list[Row], size: int) -> list[Row]:
    """The first rows up to this size in all; the first always comes."""
    kept, running = [], 0
    for row in rows:
        if running >= size:
            break
        running += row.message.size
        kept.append(row)
    return kept
