"""The memory of a relay over a million messages, and what a second relay brings."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench.figures import Figures, at_least, at_most, median
from bench.room import OURS, Room

MILLION = (1_000_000, 5_000)
SHARED = (200_000, 4_000)
USERS = ("relay processes", "PostgreSQL", "NATS")
MIB_BYTES = 1024 * 1024


def memory(room: Room) -> Figures:
    """The most memory a relay's process held, from its start to its end."""
    count = room.size(*MILLION)
    figures = Figures(f"Memory of a relay that drains {count:,} messages")
    room.tick(f"{count:,} messages")
    with room.database() as url:
        room.run(OURS, "prepare", database=url, messages=count)
        found = room.run(OURS, "drain", database=url, messages=count)
    peak = found["peak_bytes"] / MIB_BYTES
    figures.add("postroom", f"{peak:.0f} MiB", peak / 150, to="150 MiB", bar=at_most(1.0))
    figures.add("postroom", f"{found['messages'] / found['seconds']:,.0f}/s")
    figures.numbers["peak_mib"] = peak
    return figures


def two(room: Room) -> Figures:
    """One relay, then two at once, on the same backlog; and who used the processors meanwhile."""
    figures = Figures("Two relays against one, to NATS JetStream")
    found: dict[int, list[dict[str, float]]] = {1: [], 2: []}
    for _ in range(room.size(3, 1)):
        for relays in (1, 2):
            room.tick(f"{relays} relays")
            found[relays].append(_together(room, relays))
    rates = {relays: median(run["rate"] for run in runs) for relays, runs in found.items()}
    cores = os.cpu_count() or 1
    for relays, runs in found.items():
        busy = {what: median(run[what] for run in runs) for what in USERS}
        figures.add(
            f"{relays} relay{'s' * (relays > 1)}",
            f"{rates[relays]:,.0f}/s",
            rates[relays] / rates[1],
            to="one",
            # Where all cores are in use already, a second relay has nothing to run on.
            bar=at_least(1.0) if relays == 2 and sum(busy.values()) < 0.85 * cores else None,
        )
        for what, used in busy.items():
            figures.add(f"  {what}", f"{used:.2f} of {cores} cores")
        figures.numbers[str(relays)] = {"rate": rates[relays], **busy}
    return figures


def _together(room: Room, relays: int) -> dict[str, float]:
    count = room.size(*SHARED)
    with room.database() as url:
        room.run(OURS, "prepare", database=url, messages=count)
        target = room.empty_stream()
        before, begun = room.server_cpu_seconds(), time.perf_counter()
        with ThreadPoolExecutor(relays) as threads:
            waiting: list[Any] = [
                threads.submit(room.run, OURS, "share", database=url, nats=target, messages=count)
                for _ in range(relays)
            ]
            done = [each.result() for each in waiting]
        seconds = time.perf_counter() - begun
        after = room.server_cpu_seconds()
    working = max(run["ended"] for run in done) - min(run["begun"] for run in done)
    return {
        "rate": sum(run["messages"] for run in done) / working,
        "relay processes": sum(run["cpu_seconds"] for run in done) / working,
        "PostgreSQL": (after[0] - before[0]) / seconds,
        "NATS": (after[1] - before[1]) / seconds,
    }
