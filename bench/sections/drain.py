"""How fast a relay drains the outbox, to a receiver that says yes at once and to NATS JetStream."""

from __future__ import annotations

from typing import Any

from bench.figures import Figures, at_least, at_most, median
from bench.room import OURS, Room, System

ROUNDS = 3
MESSAGES = (100_000, 2_000)
# To NATS, and on a hot key, it sends one at a time or few: a hundred thousand would take minutes.
SLOW_MESSAGES = (10_000, 200)
SKEWED_MESSAGES = (25_000, 2_000)
LIMIT = "database alone"
ARCHIVE = "postroom, with archive"
KEPT = "txoutbox, strict order, kept"


def noop(room: Room) -> Figures:
    """To a receiver that says yes at once: what the relay and its tables cost by themselves."""
    figures = Figures("Drain to a receiver that says yes at once, messages a second")
    rates = _measure(room, nats=False)
    _compare(figures, rates, bar=5.0)
    ours, limit = figures.numbers["rates"]["postroom"], figures.numbers["rates"][LIMIT]
    figures.add("postroom", f"{ours:,.0f}/s", ours / limit, to=LIMIT, bar=at_least(0.4))
    return figures


def nats(room: Room) -> Figures:
    """To JetStream, with all our headers, and the CPU that the relay's process takes for it."""
    figures = Figures("Drain to NATS JetStream, messages a second and relay CPU")
    found = _measure(room, nats=True)
    _compare(figures, found, bar=4.0)
    cpu = {name: median(_micros(one) for one in runs) for name, runs in found.items()}
    figures.numbers["cpu_micros"] = cpu
    peers = {name: value for name, value in cpu.items() if not name.startswith("postroom")}
    best = min(peers, key=peers.__getitem__) if peers else ""
    for name, value in cpu.items():
        ratio = value / cpu[best] if best else None
        bar = at_most(1 / 3) if name == "postroom" and best else None
        figures.add(name, f"{value:.0f} µs CPU", ratio, to=best, bar=bar)
    return figures


def hot_key(room: Room) -> Figures:
    """Half of all messages on one key, of which only one may be under way at a time."""
    figures = Figures("Half of all messages on one key, to NATS JetStream")
    systems = [system for system in room.systems if system.ordered]
    found: dict[str, list[Any]] = {}
    alone: list[float] = []
    for _ in range(room.size(ROUNDS, 1)):
        room.tick("nats-py alone")
        sent = room.run(OURS, "client", nats=room.empty_stream(), messages=room.size(5000, 200))
        alone.append(sent["messages"] / sent["seconds"])
        for system in systems:
            room.tick(system.name)
            count = _count(room, system, nats=True, skew=True)
            found.setdefault(system.name, []).append(
                _one(room, system, count, nats=True, arguments=("--skew",))
            )
    rates = {name: median(map(_rate, runs)) for name, runs in found.items()}
    client = median(alone)
    figures.numbers["rates"] = rates | {"nats-py, one at a time": client}
    ours = rates["postroom"]
    figures.add("nats-py, one at a time", f"{client:,.0f}/s")
    twice = "twice one at a time"
    figures.add("postroom", f"{ours:,.0f}/s", ours / (2 * client), to=twice, bar=at_least(0.8))
    peers = {name: rate for name, rate in rates.items() if name != "postroom"}
    if peers:
        best = max(peers, key=peers.__getitem__)
        figures.add("postroom", f"{ours:,.0f}/s", ours / peers[best], to=best, bar=at_least(1.0))
        for name, rate in peers.items():
            figures.add(name, f"{rate:,.0f}/s", rate / peers[best], to=best)
    return figures


def _measure(room: Room, *, nats: bool) -> dict[str, list[Any]]:
    """Every system once, then every system again: what disturbs the machine disturbs them all."""
    found: dict[str, list[Any]] = {}
    for _ in range(room.size(ROUNDS, 1)):
        for system in (*room.systems, *(() if nats else room.others)):
            count = _count(room, system, nats=nats)
            room.tick(system.name)
            found.setdefault(system.name, []).append(_one(room, system, count, nats=nats))
        for name, system in ((ARCHIVE, OURS), *((KEPT, p) for p in room.peers[:1])):
            room.tick(name)
            count = _count(room, system, nats=nats)
            kept = _one(room, system, count, nats=nats, arguments=("--keep",))
            found.setdefault(name, []).append(kept)
        if not nats:
            room.tick(LIMIT)
            count = room.size(*MESSAGES)
            found.setdefault(LIMIT, []).append(_one(room, OURS, count, verb="limit"))
    return found


def _one(
    room: Room,
    system: System,
    count: int,
    *,
    verb: str = "drain",
    nats: bool = False,
    arguments: tuple[str, ...] = (),
) -> Any:
    with room.database() as url:
        room.run(system, "prepare", *arguments, database=url, messages=count)
        options: dict[str, object] = {"database": url, "messages": count}
        if nats:
            options["nats"] = room.empty_stream()
        found = room.run(system, verb, *arguments, **options)
    assert found["messages"] == count, (system.name, found["messages"], count)
    return found


def _count(room: Room, system: System, *, nats: bool, skew: bool = False) -> int:
    if nats and "faststream" in system.name:
        return room.size(*SLOW_MESSAGES)
    return room.size(*(SKEWED_MESSAGES if skew else MESSAGES))


def _compare(figures: Figures, found: dict[str, list[Any]], *, bar: float) -> None:
    """Our rate against the best peer that keeps the order, and every other beside it."""
    rates = {name: median(map(_rate, runs)) for name, runs in found.items()}
    figures.numbers["rates"] = rates
    ordered = {name: rate for name, rate in rates.items() if "strict order" in name}
    plain = {name: rate for name, rate in ordered.items() if not name.endswith("kept")}
    best = max(plain, key=plain.__getitem__) if plain else ""
    for name, rate in rates.items():
        to = best
        if name == ARCHIVE and KEPT in rates:
            to = KEPT
        ratio = rate / rates[to] if to else None
        must = at_least(bar) if name in ("postroom", ARCHIVE) and to else None
        figures.add(name, f"{rate:,.0f}/s", ratio, to=to, bar=must)


def _rate(found: Any) -> float:
    return float(found["messages"] / found["seconds"])


def _micros(found: Any) -> float:
    return float(found["cpu_seconds"] / found["messages"] * 1e6)
