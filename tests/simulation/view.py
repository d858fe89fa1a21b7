"""An answer to every query of the outbox's room, as PostgreSQL gives it.

Each query is one method; the methods take what the SQL takes and return the same columns.
"""

import json
from dataclasses import replace
from typing import Any

from postroom.flow import Rows

from .loop import EPOCH_SECONDS
from .owning import Owning
from .tables import Letter, Place, Row, Values


class View(Owning):
    """The outbox as one transaction sees and changes it."""

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

    # ── settling ───────────────────────────────────────────────────────────────────────────────

    def settle_deleted(self, values: Values) -> Rows:
        mine = self.fenced(values)
        gone = self._delete("outbox", [place for place in _places(values) if place[0] in mine])
        self.journal_clear({**values, "lane_list": mine})
        return [(lane, len(gone)) for lane in mine]

    def settle_archived(self, values: Values) -> Rows:
        mine = self.fenced(values)
        self._archive("outbox", [place for place in _places(values) if place[0] in mine])
        return self.settle_deleted(values)

    def outbox_archive(self, values: Values) -> None:
        self._archive("outbox", _places(values))

    def held_archive(self, values: Values) -> None:
        self._archive("held", _places(values))

    def _archive(self, name: str, places: list[Place]) -> None:
        for place in places:
            row = self._get(name, place)
            if row is not None and self._get("archive", row.message.id) is None:
                self._put("archive", row.message.id, self.now())

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

    def _next_attempt(self, place: Place, values: Values) -> float:
        """An expired head must not hold its key: it is due when it expires."""
        row, at = self._get("held", place), self.now() + values["delay_us"] / 1e6
        expires_at = None if row is None else row.expires_at
        return at if expires_at is None else min(at, expires_at)

    def hold_failed(self, values: Values) -> None:
        at = self._next_attempt((values["lane"], values["position"]), values)
        told = {"attempts": values["attempts"], "history": values["history"]}
        self._change_held(values, next_attempt_at=at, **told)

    def hold_later(self, values: Values) -> None:
        for lane, position in _places(values):
            at = self._next_attempt((lane, position), values)
            self._change_held({"lane": lane, "position": position}, next_attempt_at=at)

    def hold_doubt(self, values: Values) -> None:
        self._change_held(values, history=values["history"])

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

    def delayed_lanes(self, values: Values) -> Rows:
        due = {row.message.lane for row in self._rows("delayed").values() if self.is_due(row)}
        return [(lane,) for lane in sorted(due.intersection(values["lane_list"]))]

    def is_due(self, row: Row) -> bool:
        return row.deliver_at is not None and row.deliver_at <= self.now()

    def delayed_due(self, values: Values) -> Rows:
        due = [
            row
            for row in self._rows("delayed").values()
            if row.message.lane == values["lane"] and self.is_due(row)
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

    # ── watching and pruning ───────────────────────────────────────────────────────────────────

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

    def waiting_topics(self, values: Values) -> Rows:
        rows = [*self._rows("outbox").values(), *self._rows("held").values()]
        topics = [row.message.topic for row in rows if not row.blocked]
        return [(topic, topics.count(topic)) for topic in sorted(set(topics))]

    def measure_totals(self, values: Values) -> Rows:
        free = sum(self.is_free(row, values) for row in self._rows("lane").values())
        return [(len(self._rows("held")), len(self._rows("delayed")), free, 0)]

    def measure_dead(self, values: Values) -> Rows:
        dead = [letter for letter in self._rows("dead").values() if letter.state == "dead"]
        return [(len(dead), sum(letter.holds_key for letter in dead))]

    def measure_held(self, values: Values) -> Rows:
        return [(None,)]

    def prune_archive(self, values: Values) -> Rows:
        """One day, if there is one that is over and old enough."""
        oldest = _day(self.now() - values["keep_seconds"])
        old = {who: _day(at) for who, at in self._rows("archive").items() if _day(at) < oldest}
        gone = [who for who, day in old.items() if day == min(old.values())]
        return self._drop("archive", gone)

    def prune_dedup(self, values: Values) -> Rows:
        old = self.now() - values["keep_seconds"]
        gone = [key for key, at in self._rows("dedup").items() if at < old]
        return self._drop("dedup", gone[: values["rows"]])

    def _drop(self, name: str, keys: list[str]) -> Rows:
        for key in keys:
            self._put(name, key, None)
        return [(len(keys),)]

    def _nothing(self, values: Values) -> None:
        """Nothing here is redriven, and nobody has a key."""

    def _none_gone(self, values: Values) -> Rows:
        return [(0,)]

    redriven_resolve = archive_days = lost = _nothing
    archive_overflow = prune_overflow = prune_dead = prune_inbox = prune_jobs = _none_gone
    prune_keys = _none_gone
    measure_outbox = _none_gone


def _day(at: float) -> int:
    return int((EPOCH_SECONDS + at) // 86_400)


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
