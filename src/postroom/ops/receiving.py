"""How consumers stand, as plain values: the receiving part of `status` and `doctor`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from postroom.databases.database import WorkerLink
from postroom.inbox.store import ROOM as INBOX
from postroom.ops.consumers import ROOM

__all__ = ["SILENT_SECONDS", "consumers"]

SILENT_SECONDS = 15.0  # a worker beats every second
TOTALS = ("received", "handled", "duplicates", "failed", "buried", "skipped", "in_hand")
RATES = ("received_per_second", "handled_per_second")

Worker = Mapping[str, Any]


async def consumers(
    link: WorkerLink, workers: Sequence[Worker], *, most: int
) -> list[dict[str, Any]]:
    """Describe every consumer: its processes, their figures, and the messages that wait in it."""
    known = {
        str(name): {"broker": broker, "topics": json.loads(topics), "seen": seen_ms / 1000}
        for name, broker, topics, seen_ms in await link.query(ROOM, "consumers")
    }
    processes: dict[str, list[Worker]] = {name: [] for name in known}
    for worker in workers:
        if worker["kind"] == "consumer" and worker["report"]:
            name = str(worker["report"].get("consumer"))
            processes.setdefault(name, []).append(worker)
    seats = await link.query(ROOM, "seats")
    return [
        {
            **_described(name, known.get(name, {}), own),
            **await _waiting(link, name, most),
            "sources": [
                {"source": source, "worker": worker["name"]}
                for consumer, source, owner in seats
                for worker in own
                if (consumer, owner) == (name, worker["incarnation"]) and _alive(worker)
            ],
        }
        for name, own in sorted(processes.items())
    ]


def _described(name: str, known: Mapping[str, Any], own: Sequence[Worker]) -> dict[str, Any]:
    """The consumer and the sums of the reports of its live processes."""
    reports = [worker["report"] for worker in own if _alive(worker)]
    # Each process counts its own sources.
    lags = [report["lag"] for report in reports if report.get("lag") is not None]
    seen = [worker["seen_seconds_ago"] for worker in own]
    return {
        "consumer": name,
        "broker": known.get("broker"),
        "topics": known.get("topics", []),
        "alive": len(reports),
        "seen_seconds_ago": min([*seen, *([known["seen"]] if known else [])]),
        **{each: round(sum(r.get(each, 0) for r in reports), 2) for each in (*TOTALS, *RATES)},
        "lag": sum(lags) if lags else None,
        "trouble": next((r["trouble"] for r in reports if r.get("trouble")), None),
    }


async def _waiting(link: WorkerLink, name: str, most: int) -> dict[str, Any]:
    ((held, dead, oldest_ms, keys, blocked),) = await link.query(
        INBOX, "measure", consumer=name, most=most
    )
    return {
        "waiting": held - dead,
        "oldest_waiting_seconds": None if oldest_ms is None else max(0, oldest_ms) / 1000,
        "held_keys": keys,
        "blocked_keys": blocked,
        "dead": dead,
    }


def _alive(worker: Worker) -> bool:
    return bool(worker["seen_seconds_ago"] < SILENT_SECONDS)
