"""The redriver: sends dead letters again by a rule, under a rate limit; off unless a rule is set.

A rule names error codes, how long a letter must have been dead, how many letters a minute, and how
often one letter may be redriven. Each round is one transaction: it claims the next slot of the
source's rate limit, locks and queues letters as an operator's retry does, and writes one audit
entry for each. The limit is a row in the database, so it holds for all workers of a source together
and across their restarts.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from postroom import audit, signals
from postroom.config import RedriveRule
from postroom.databases.database import Database, DatabaseLost
from postroom.dead_letters.store import ROOM, Letter, lock, send_again
from postroom.errors import PostroomError
from postroom.flow import Flow, Statement, Value

__all__ = ["ROUND_SECONDS", "Redriver", "round_rows"]

ROUND_SECONDS = 15.0
MOST_ROWS = 200


def round_rows(rule: RedriveRule) -> int:
    """Return how many letters one round may queue: as many as the rate allows per round."""
    return max(1, min(MOST_ROWS, int(rule.per_minute * ROUND_SECONDS / 60)))


class _Due(NamedTuple):
    """A letter that a rule matches."""

    letter: Letter
    code: str
    redrives: int

    def reason(self, rule: RedriveRule) -> str:
        return f"{self.code}, redrive {self.redrives + 1} of {rule.times}"


class Redriver:
    """Redrives the letters of one source for a worker, beside its work."""

    def __init__(self, database: Database, source: str, rule: RedriveRule, worker: str) -> None:
        self.source = source
        self.rule = rule
        self._database = database
        self._who = f"redrive rule of {worker}"

    async def keep(self) -> None:
        """Run rounds until cancelled. A round that fails is logged, and the next one repeats it."""
        while True:
            await asyncio.sleep(ROUND_SECONDS)
            try:
                await self.round()
            except (DatabaseLost, PostroomError) as error:
                signals.emit("redrive.failed", source=self.source, error=str(error))

    async def round(self) -> int:
        """Queue the letters that are due, as many as the rate allows now; returns how many."""
        # On a connection of its own, so that no failure of it reaches the worker.
        link = await self._database.connect()
        try:
            count = await link.transact(self._round())
        finally:
            await link.close()
        if count:
            signals.emit("letter.redriven", source=self.source, count=count)
        return count

    def _round(self) -> Flow[int]:
        rule, rows = self.rule, round_rows(self.rule)
        if not (yield from self._due(1)):
            return 0
        gap_us = 60_000_000 / rule.per_minute
        yield self._query("pace_open")
        ((free,),) = yield self._query("pace_lock", longest_us=int(gap_us * rows))
        if not free:
            return 0
        found = [due.letter for due in (yield from self._due(rows))]
        yield from lock(found)
        # Read again under the locks: an operator may have decided about some since the first read.
        ready = [due for due in (yield from self._due(rows)) if due.letter in found]
        if ready:
            yield from send_again([due.letter for due in ready])
            entries = [(due.letter.id, due.reason(rule)) for due in ready]
            yield audit.record_each("dead.redrive", entries, who=self._who)
            yield self._query("pace_set", gap_us=int(gap_us * len(ready)))
        return len(ready)

    def _due(self, rows: int) -> Flow[list[_Due]]:
        found = yield self._query(
            "due_by_rule",
            after_us=int(self.rule.after_seconds * 1e6),
            times=self.rule.times,
            codes="\n" + "\n".join(self.rule.codes) + "\n",
            rows=rows,
        )
        return [_Due(Letter(*row[:8]), *row[8:]) for row in found]

    def _query(self, name: str, **values: Value) -> Statement:
        return Statement(ROOM, name, {"source": self.source, **values})
