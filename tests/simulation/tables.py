"""The outbox's tables in memory, and a transaction on them.

A transaction sees what is committed and what it wrote itself (READ COMMITTED).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from postroom.flow import Rows
from postroom.messages import Message
from postroom.outbox.admission import SCHEMA_VERSION

from .loop import OUTSIDE, Process

LANES = 3  # instead of sixteen, so that keys meet more often
Values = Mapping[str, Any]
Place = tuple[int, int]  # lane and position


@dataclass(frozen=True, slots=True)
class LaneRow:
    owner: str | None = None
    epoch: int = 0
    lease_until: float | None = None
    lease_us: int | None = None


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
        self.worker: dict[str, tuple[float, str]] = {}
        self.archive: dict[str, float] = {}  # when each was delivered
        self.dedup: dict[str, float] = {}  # when each was published
        self.meta: dict[str, str] = {"schema_version": str(SCHEMA_VERSION), "oldest_code": "1"}

    def next_position(self) -> int:
        """A sequence knows no transactions."""
        self.position += 1
        return self.position


class Transaction:
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

    def written(self) -> set[int]:
        """The lanes whose messages were changed."""
        tables = ("outbox", "held")
        return {lane for name in tables for lane, _ in self._changed.get(name, ())}

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

    def _delete(self, name: str, places: Iterable[Place]) -> list[Row]:
        gone = []
        for place in places:
            row = self._get(name, place)
            if row is not None:
                self._put(name, place, None)
                gone.append(row)
        return gone
