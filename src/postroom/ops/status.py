"""How outbox and consumers stand, as plain values: for `status`, its live screen and `doctor`.

Costs the same at any size: counts stop at a limit, everything else goes by an index.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from postroom.config import Routes
from postroom.databases.database import WorkerLink
from postroom.ops.house import ROOM as HOUSE
from postroom.ops.receiving import consumers

__all__ = ["COUNT_LIMIT", "RATES", "Rates", "look", "waits_for"]

COUNT_LIMIT = 10_000
RATES = ("delivered", "held", "dead")

_OPS = __package__ or "postroom.ops"


async def look(link: WorkerLink) -> dict[str, Any]:
    """Return depth, ages, lanes and their owners, workers with their reports, and consumers."""
    ((pending, held, delayed, dead),) = await link.query(_OPS, "depth", most=COUNT_LIMIT)
    ((pending_ms, held_ms, due_ms),) = await link.query(HOUSE, "ages")
    ((waiting, blocked),) = await link.query(HOUSE, "held_keys", most=COUNT_LIMIT)
    lanes = await link.query(_OPS, "lanes")
    worked = any(epoch for _, _, _, epoch, _, _ in lanes)
    workers = [_worker(*row) for row in await link.query(HOUSE, "workers")]
    meta = {str(row[0]): str(row[1]) for row in await link.query(_OPS, "meta")}
    return {
        # A relay takes lanes where something was published; a database may only receive.
        "published": bool(worked or pending or held or delayed),
        "pending": pending,
        "held": held,
        "delayed": delayed,
        "dead": dead,
        "count_limit": COUNT_LIMIT,
        "oldest_pending_seconds": _seconds(pending_ms),
        "oldest_held_seconds": _seconds(held_ms),
        "overdue_delayed_seconds": _seconds(due_ms) if due_ms is not None and due_ms > 0 else None,
        "held_keys": waiting + blocked,
        "blocked_keys": blocked,
        "schema_version": int(meta.get("schema_version", 0)),
        "routes": meta.get("routes"),
        "lanes": [
            {
                "lane": lane,
                "owner": owner,
                "owner_name": name,
                "epoch": epoch,
                "paused": bool(paused),
                "lease_seconds": None if lease_ms is None else lease_ms / 1000,
            }
            for lane, owner, name, epoch, paused, lease_ms in lanes
        ],
        "workers": workers,
        "consumers": await consumers(link, workers, most=COUNT_LIMIT),
        "destinations": _destinations(workers),
    }


def _seconds(milliseconds: int | None) -> float | None:
    return None if milliseconds is None else max(0, milliseconds) / 1000


def _worker(
    who: str, kind: str, name: str, seen_ms: int, started_ms: int, seen_at_ms: int, text: str | None
) -> dict[str, Any]:
    report = _report(text)
    at = report.get("at")
    return {
        "incarnation": who,
        "kind": kind,
        "name": name,
        "seen_seconds_ago": seen_ms / 1000,
        "started_seconds_ago": started_ms / 1000,
        # The worker's clock against the database's, both read at the same beat.
        "clock_ahead_seconds": None if at is None else round(at - seen_at_ms / 1000, 3),
        "report": report or None,
    }


def _report(text: str | None) -> dict[str, Any]:
    """What a worker wrote of itself; another version may have written what we cannot read."""
    try:
        report = json.loads(text or "{}")
    except ValueError:
        return {}
    return report if isinstance(report, dict) else {}


def _destinations(workers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The destinations that live workers report as down. The next try is counted from now."""
    return [
        {
            "worker": worker["name"],
            **each,
            "retry_in_seconds": max(
                0.0, (each.get("retry_in_seconds") or 0.0) - worker["seen_seconds_ago"]
            ),
        }
        for worker in workers
        if worker["report"] and worker["seen_seconds_ago"] < Rates.window_seconds
        for each in worker["report"].get("destinations", [])
    ]


def waits_for(state: Mapping[str, Any], topic: str) -> str | None:
    """Return why messages of a topic wait: its broker or the topic itself is down."""
    table, default = json.loads((state["routes"] or "- [[], null]").partition(" ")[2])
    broker = Routes(tuple((pattern, url) for pattern, url in table), default).url_for(topic)
    for each in state["destinations"]:
        if each["name"] in (f"topic {topic}", broker):
            return f"{each['name']} is down, {each['error_code']}: {each['error']}"
    return None


@dataclass
class Rates:
    """What workers do in a second: differences between their own reports, summed over them.

    Each worker's totals are taken with the time it wrote them, over some seconds, so it does not
    matter how its beats and our looks fall together. A worker that is silent does nothing.
    """

    window_seconds = 10.0
    _seen: dict[str, deque[tuple[float, Mapping[str, Any]]]] = field(default_factory=dict)

    def add(self, state: Mapping[str, Any]) -> dict[str, float]:
        """Take in another look; returns the messages in a second by what became of them."""
        sums = dict.fromkeys(RATES, 0.0)
        here = {worker["incarnation"] for worker in state["workers"]}
        self._seen = {who: past for who, past in self._seen.items() if who in here}
        for worker in state["workers"]:
            report = worker["report"]
            if not report or "at" not in report:
                continue
            past = self._seen.setdefault(worker["incarnation"], deque(maxlen=100))
            if not past or past[-1][0] != report["at"]:
                past.append((report["at"], report))
            while len(past) > 2 and past[-1][0] - past[0][0] > self.window_seconds:
                past.popleft()
            seconds = past[-1][0] - past[0][0]
            if seconds > 0 and worker["seen_seconds_ago"] < self.window_seconds:
                for name in RATES:
                    grown = past[-1][1].get(name, 0) - past[0][1].get(name, 0)
                    sums[name] += max(0, grown) / seconds
        return {f"{name}_per_second": round(rate, 2) for name, rate in sums.items()}
