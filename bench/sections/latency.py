"""How soon a committed message is with the broker, and what waking the relay costs the writers."""

from __future__ import annotations

import time
from dataclasses import dataclass

from bench.figures import Figures, at_least, at_most, median
from bench.room import OURS, Room, System

RUNS = 5
SECONDS = (5, 1)
BURST = 200
WRITERS = 16
WRITING_SECONDS = (4, 1)
# Its order costs it nothing at this rate, and its one worker would only make it slower.
LEFT_OUT = ("txoutbox, no order", "faststream-outbox, strict order")
ON_SESSIONS_ALONE = ("faststream-outbox, no order",)


@dataclass(frozen=True, slots=True)
class Pace:
    """Messages a second, how many of them in a transaction, and on what they are published."""

    rate: int
    each: int
    driver: bool

    @property
    def arguments(self) -> tuple[str, ...]:
        return ("--driver",) if self.driver else ()


# One process cannot commit two thousand sessions a second beside the relay on two cores, so higher
# rates are written on asyncpg, five hundred transactions a second.
PACES = (Pace(200, 1, driver=False), Pace(1000, 2, driver=True), Pace(2000, 4, driver=True))


@dataclass(frozen=True, slots=True)
class Seen:
    """What one run saw: milliseconds, and the part of the rate that the writer kept."""

    p50: float
    p99: float
    kept: float


def latency(room: Room) -> Figures:
    """From the server's commit to the broker's acknowledgement, at a steady rate after a burst.

    Each system has its wake-up on.
    """
    figures = Figures(f"Commit → broker acknowledged after a burst, median of {RUNS} runs")
    found: dict[tuple[int, str], list[Seen]] = {}
    for _ in range(room.size(RUNS, 1)):
        for pace in PACES:
            for system in room.systems:
                if system.name in LEFT_OUT or (pace.driver and system.name in ON_SESSIONS_ALONE):
                    continue
                room.tick(f"{system.name}, {pace.rate}/s")
                found.setdefault((pace.rate, system.name), []).append(_one(room, system, pace))
    for pace in PACES:
        runs = {name: seen for (rate, name), seen in found.items() if rate == pace.rate}
        for what in ("p50", "p99"):
            _compare(figures, pace, what, runs)
    return figures


def _compare(figures: Figures, pace: Pace, what: str, runs: dict[str, list[Seen]]) -> None:
    values = {name: median(getattr(one, what) for one in seen) for name, seen in runs.items()}
    figures.numbers[f"{what}_ms_at_{pace.rate}"] = values
    peers = {name: value for name, value in values.items() if name != OURS.name}
    best = min(peers, key=peers.__getitem__) if peers else ""
    for name, value in values.items():
        kept = median(one.kept for one in runs[name])
        short = "" if kept > 0.95 else f", {kept * pace.rate:,.0f}/s written"
        must = at_most(1.2) if name == OURS.name and best and pace is PACES[0] else None
        figures.add(
            name,
            f"{pace.rate:,}/s {what} {value:.2f} ms{short}",
            value / peers[best] if best else None,
            to=best,
            bar=must,
        )


def _one(room: Room, system: System, pace: Pace) -> Seen:
    count = pace.rate * room.size(*SECONDS)
    with room.database() as url:
        room.run(system, "prepare", "--wake", database=url, messages=0)
        target = room.empty_stream()
        with room.running(system, "relay", database=url, nats=target) as finish:
            done = room.run(
                system,
                "write",
                "--wake",
                *pace.arguments,
                database=url,
                messages=count,
                rate=pace.rate,
                each=pace.each,
                burst=BURST // pace.each,
            )
            time.sleep(1 + count / 5000)
            acks = finish()["acks"]
    missing = set(done["commits"]) - set(acks)
    assert not missing, f"{system.name}: {len(missing)} of {count} were not delivered"
    # The burst is not counted, nor half a second after it: connections are made, caches filled.
    warm = BURST + pace.rate // 2
    millis = sorted((acks[n] - at) * 1000 for n, at in done["commits"].items() if int(n) >= warm)
    kept = count / pace.rate / done["seconds"]
    return Seen(millis[len(millis) // 2], millis[int(len(millis) * 0.99)], kept)


def tax(room: Room) -> Figures:
    """What being woken costs writers: ours notifies after the commit, the others within it."""
    figures = Figures(
        f"{WRITERS} concurrent writers with the relay's wake-up, of their rate without"
    )
    named = {peer.name: peer for peer in room.peers}
    peers = [named[n] for n in ("txoutbox, strict order", "pgqueuer, no order") if n in named]
    found: dict[tuple[str, str, bool], list[float]] = {}
    kinds = {"AsyncSession": (), "asyncpg": ("--driver",)}
    for _ in range(room.size(RUNS, 1)):
        for kind, arguments in kinds.items():
            for system in (OURS, *peers):
                room.tick(f"{system.name}, {kind}")
                for wake in (False, True):
                    rate = _writing(room, system, arguments, wake)
                    found.setdefault((kind, system.name, wake), []).append(rate)
    for kind in kinds:
        for system in (OURS, *peers):
            name = f"{system.name}, on {kind}"
            with_it, without = found[kind, system.name, True], found[kind, system.name, False]
            pairs = zip(with_it, without, strict=True)
            ratio = median(rate / plain for rate, plain in pairs)
            bar = at_least(0.95) if system is OURS and kind == "AsyncSession" else None
            rate = median(with_it)
            figures.add(name, f"{rate:,.0f} tx/s", ratio, to="itself without", bar=bar)
            figures.numbers[name] = ratio
    return figures


def _writing(room: Room, system: System, arguments: tuple[str, ...], wake: bool) -> float:
    with room.database() as url:
        waking = ("--wake",) if wake else ()
        room.run(system, "prepare", *waking, database=url, messages=0)
        seconds = room.size(*WRITING_SECONDS)
        done = room.run(
            system, "writers", *waking, *arguments, database=url, writers=WRITERS, seconds=seconds
        )
    return float(done["transactions"] / done["seconds"])
