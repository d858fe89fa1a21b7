"""Judges a run by what was written down outside of it.

I1 no loss: what was committed was delivered, or still stands in a table.
I2 no ghosts: what was delivered was committed.
I3 order: nothing of a key is delivered for the first time before all that came earlier.
I4 duplicates: only of what a process had under way that died, froze or lost its connection, and
   never more than it may have under way at once. Where every fault was noted: only of what still
   stood in a table then, and once for each fault.
"""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tables import Tables


class Fact(NamedTuple):
    """A message as its writer knows it; `n` counts within its key, None where order is moot."""

    id: str
    key: str | None
    n: int | None


class Delivery(NamedTuple):
    id: str
    key: str | None
    n: int
    epoch: int
    pid: int


@dataclass
class History:
    """A run from outside. `unknown`: facts whose COMMIT was begun and never answered.

    `disturbed` are the processes to which something happened, `blows` how often if more than once.
    """

    committed: dict[str, Fact] = field(default_factory=dict)
    unknown: dict[str, Fact] = field(default_factory=dict)
    deliveries: list[Delivery] = field(default_factory=list)
    pending: set[str] = field(default_factory=set)
    held: set[str] = field(default_factory=set)
    dead: set[str] = field(default_factory=set)
    disturbed: set[int] = field(default_factory=set)
    blows: Counter[int] = field(default_factory=Counter)
    in_flight: int = 0
    faults: list[set[str]] | None = None  # what stood in a table at each; None: nobody took notes

    def commit(self, facts: Iterable[Fact]) -> None:
        for fact in facts:
            self.committed[fact.id] = fact
            self.unknown.pop(fact.id, None)

    def read_writer(self, path: Path) -> None:
        """Take over what a writer wrote down."""
        for what, *rest in _lines(path):
            if what == "begun":
                self.unknown |= {fact[0]: Fact(*fact) for fact in rest[0]}
            elif what == "committed":
                self.commit(Fact(*fact) for fact in rest[0])

    def read_deliveries(self, path: Path) -> None:
        """Take over what the broker wrote down."""
        self.deliveries += [Delivery(*line) for line in _lines(path)]

    def read_faults(self, path: Path) -> None:
        """Take over what was noted at each fault."""
        self.faults = [set(line) for line in _lines(path)]

    def read_tables(self, tables: Tables) -> None:
        """See where messages stand now; a fact of unknown fate counts as what became of it."""
        self.pending = tables.ids("outbox") | tables.ids("delayed")
        self.held = tables.ids("held")
        self.dead = set(tables.dead())
        happened = tables.business() & self.unknown.keys()
        self.commit([self.unknown[id] for id in happened])


@dataclass
class Report:
    """What a run amounts to."""

    violations: list[str]
    duplicates: Counter[int]  # by the process whose delivery came again
    repeated: Counter[str]  # by id, how often each came again

    def __str__(self) -> str:
        return "\n".join(self.violations)


def check(history: History) -> Report:
    """Every violation of a promise, in words."""
    duplicates, too_many = _duplicates(history)
    repeated = Counter(delivery.id for delivery in history.deliveries)
    repeated -= Counter(repeated.keys())
    too_many += _without_fault(history, repeated)
    violations = _losses(history) + _ghosts(history) + _inversions(history) + too_many
    return Report(violations, duplicates, repeated)


def _losses(history: History) -> list[str]:
    delivered = {delivery.id for delivery in history.deliveries}
    somewhere = delivered | history.pending | history.held | history.dead
    return [f"I1 lost: {fact}" for id, fact in history.committed.items() if id not in somewhere]


def _ghosts(history: History) -> list[str]:
    known = history.committed.keys() | history.unknown.keys()
    seen = {delivery.id for delivery in history.deliveries}
    seen |= history.pending | history.held | history.dead
    return [f"I2 ghost: {id}" for id in sorted(seen - known)]


def _inversions(history: History) -> list[str]:
    waiting: dict[str, list[Fact]] = {}
    for fact in sorted(history.committed.values(), key=lambda fact: fact.n or 0, reverse=True):
        if fact.key is not None and fact.n is not None:
            waiting.setdefault(fact.key, []).append(fact)
    found = []
    first: set[str] = set()
    for delivery in history.deliveries:
        delivered = history.committed.get(delivery.id)
        if delivered is None or delivery.id in first:
            continue
        first.add(delivery.id)
        if delivered.key is None or delivered.n is None:
            continue
        due = waiting[delivered.key]
        if due[-1] == delivered:
            due.pop()
        else:
            found.append(f"I3 order: {delivered} was delivered before {due[-1]}")
            due.remove(delivered)
    return found


def _duplicates(history: History) -> tuple[Counter[int], list[str]]:
    """A duplicate is charged to the process that delivered it before, for it did not settle."""
    duplicates: Counter[int] = Counter()
    before: dict[str, list[int]] = {}
    found = []
    for delivery in history.deliveries:
        pids = before.setdefault(delivery.id, [])
        if pids:
            guilty = [pid for pid in (*pids, delivery.pid) if pid in history.disturbed]
            if not guilty:
                found.append(f"I4 duplicate: {delivery} though nothing happened to {pids}")
            duplicates[(guilty or pids)[0]] += 1
        pids.append(delivery.pid)
    for pid, count in duplicates.items():
        most = history.in_flight * max(1, history.blows[pid])
        if count > most:
            found.append(f"I4 duplicates: {count} of process {pid}, {most} may be in flight")
    return duplicates, found


def _without_fault(history: History, repeated: Counter[str]) -> list[str]:
    """A message that is settled is over: only what was not, at a fault, may come again after it."""
    if history.faults is None:
        return []
    stood = Counter(id for ids in history.faults for id in ids)
    return [
        f"I4 duplicates: {id} came again {times} times, and stood in a table at {stood[id]} faults"
        for id, times in repeated.items()
        if times > stood[id]
    ]


def _lines(path: Path) -> list[list[Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]
