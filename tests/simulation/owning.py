"""Who owns a lane and what it was sending: the queries about lanes, workers and the journal."""

import json
from collections.abc import Callable
from dataclasses import replace

from postroom.flow import Rows
from postroom.outbox.rules import fence_number

from .tables import Entry, LaneRow, Transaction, Values


class Owning(Transaction):
    """Answers to those queries, as PostgreSQL gives them."""

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
            (lane, row.owner, 0, self._left_us(row), row.lease_us)
            for lane, row in sorted(self._rows("lane").items())
        ]

    def _left_us(self, row: LaneRow) -> int | None:
        return None if row.lease_until is None else int((row.lease_until - self.now()) * 1e6)

    def lanes_cap(self, values: Values) -> None:
        for lane, row in sorted(self._rows("lane").items()):
            lease_us = row.lease_us or values["lease_us"]
            if row.owner is not None and (self._left_us(row) or 0) > lease_us:
                self._put("lane", lane, replace(row, lease_until=self.now() + lease_us / 1e6))

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
            end = self.lease_end(values)
            self._put("lane", lane, LaneRow(values["owner"], epoch, end, values["lease_us"]))

    def lanes_renew(self, values: Values) -> Rows:
        renewed = []
        for lane, row in sorted(self._rows("lane").items()):
            if row.owner == values["owner"]:
                end = self.lease_end(values)
                self._put("lane", lane, replace(row, lease_until=end, lease_us=values["lease_us"]))
                renewed.append((lane, row.epoch, 0))
        return renewed

    def lanes_release(self, values: Values) -> None:
        for lane in self.fenced(values):
            row = self._get("lane", lane)
            self._put("lane", lane, LaneRow(None, row.epoch, None))

    def lanes_notice(self, values: Values) -> Rows:
        held = {lane for lane, _ in self._rows("held")}
        return [(lane, 0, int(lane in held)) for lane in values["lane_list"]]

    # ── workers ─────────────────────────────────────────────────────────────────────────────────

    def caches(self, values: Values) -> Rows:
        return []

    def meta_read(self, values: Values) -> Rows:
        value = self._get("meta", values["item"])
        return [] if value is None else [(value,)]

    def meta_write(self, values: Values) -> None:
        self._put("meta", values["item"], values["value"])

    def worker_beat(self, values: Values) -> None:
        _, kind = self._get("worker", values["incarnation"]) or (0, values["kind"])
        self._put("worker", values["incarnation"], (self.now(), kind))

    def workers_live(self, values: Values) -> Rows:
        since = self.now() - values["within_us"] / 1e6
        found = sorted(self._rows("worker").items())
        return [(who,) for who, (seen, kind) in found if seen > since and kind == values["kind"]]

    def worker_stops(self, values: Values) -> None:
        if (row := self._get("worker", values["incarnation"])) is not None:
            self._put("worker", values["incarnation"], (row[0], "stopping"))

    def worker_gone(self, values: Values) -> None:
        self._put("worker", values["incarnation"], None)

    def workers_forget(self, values: Values) -> None:
        for who, (seen, _) in list(self._rows("worker").items()):
            if seen < self.now() - 86_400:
                self._put("worker", who, None)

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
                lane == values["lane"]
                and e.lo == e.hi == place
                and (e.alone or values["late"] == 1)
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
