"""How soon a committed message is with the broker, and what waking the relay costs the writers."""

from __future__ import annotations

import time

from bench.figures import Figures, at_least, at_most, median
from bench.room import OURS, Room, System

RUNS = 5
RATE = 200
SECONDS = (5, 1)
WRITERS = 16
WRITING_SECONDS = (4, 1)
# Its order costs it nothing at this rate, and its one worker would only make it slower.
LEFT_OUT = ("txoutbox, no order", "faststream-outbox, strict order")


def latency(room: Room) -> Figures:
    """From the server's commit to the broker's yes, at a steady rate, each with its wake-up on."""
    figures = Figures(f"Commit → broker acknowledged at {RATE} msg/s, median of {RUNS} runs")
    found: dict[str, list[tuple[float, float]]] = {}
    for _ in range(room.size(RUNS, 1)):
        for system in room.systems:
            if system.name not in LEFT_OUT:
                room.tick(system.name)
                found.setdefault(system.name, []).append(_one(room, system))
    halves = {name: median(half for half, _ in runs) for name, runs in found.items()}
    tails = {name: median(tail for _, tail in runs) for name, runs in found.items()}
    figures.numbers |= {"p50_ms": halves, "p99_ms": tails}
    for what, values, bar in (("p50", halves, 3.0), ("p99", tails, 1.5)):
        peers = {name: value for name, value in values.items() if name != "postroom"}
        best = min(peers, key=peers.__getitem__) if peers else ""
        for name, value in values.items():
            ratio = value / peers[best] if best else None
            must = at_most(bar) if name == "postroom" and best else None
            figures.add(name, f"{what} {value:.2f} ms", ratio, to=best, bar=must)
    return figures


def _one(room: Room, system: System) -> tuple[float, float]:
    """p50 and p99 in milliseconds."""
    count = RATE * room.size(*SECONDS)
    with room.database() as url:
        room.run(system, "prepare", "--wake", database=url, messages=0)
        target = room.empty_stream()
        with room.running(system, "relay", database=url, nats=target) as finish:
            done = room.run(system, "write", "--wake", database=url, messages=count, rate=RATE)
            time.sleep(1)
            acks = finish()["acks"]
    missing = set(done["commits"]) - set(acks)
    assert not missing, f"{system.name}: {len(missing)} of {count} were not delivered"
    warm = RATE // 2  # the first half second makes connections and fills caches
    millis = sorted((acks[n] - at) * 1000 for n, at in done["commits"].items() if int(n) >= warm)
    return millis[len(millis) // 2], millis[int(len(millis) * 0.99)]


def tax(room: Room) -> Figures:
    """What being woken costs writers: ours notifies after the commit, the others within it."""
    figures = Figures(
        f"{WRITERS} concurrent writers with the relay's wake-up, of their rate without"
    )
    named = {peer.name: peer for peer in room.peers}
    peers = [named[n] for n in ("txoutbox, strict order", "pgqueuer, no order") if n in named]
    found: dict[tuple[str, bool], list[float]] = {}
    for _ in range(room.size(RUNS, 1)):
        for system in (OURS, *peers):
            room.tick(system.name)
            for wake in (False, True):
                found.setdefault((system.name, wake), []).append(_writing(room, system, wake))
    for system in (OURS, *peers):
        pairs = zip(found[system.name, True], found[system.name, False], strict=True)
        ratio = median(with_it / without for with_it, without in pairs)
        rate = median(found[system.name, True])
        bar = at_least(0.95) if system is OURS else None
        figures.add(system.name, f"{rate:,.0f} tx/s", ratio, to="itself without", bar=bar)
        figures.numbers[system.name] = ratio
    return figures


def _writing(room: Room, system: System, wake: bool) -> float:
    with room.database() as url:
        arguments = ("--wake",) if wake else ()
        room.run(system, "prepare", *arguments, database=url, messages=0)
        seconds = room.size(*WRITING_SECONDS)
        done = room.run(
            system, "writers", *arguments, database=url, writers=WRITERS, seconds=seconds
        )
    return float(done["transactions"] / done["seconds"])
