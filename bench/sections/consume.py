"""A consumer with the inbox against one that commits one row a message by hand."""

from __future__ import annotations

from bench.figures import Figures, at_least, median
from bench.room import CONSUMERS, Room
from servers import Unavailable

ROUNDS = 3
OURS_MESSAGES = (20_000, 400)
HAND_MESSAGES = (5_000, 200)
BAR = 3.0
HAND = "by hand, one at a time"
# By database: the verbs of the program, and their names for people.
WAYS = {
    "postgresql": {
        "hand": HAND,
        "hands": "by hand, 4 workers",
        "session": "postroom, session",
        "driver": "postroom, driver's connection",
    },
    "mariadb": {"hand": HAND, "session": "postroom, session"},
    "sqlite": {"hand": HAND, "session": "postroom, session"},
}
NAMES = {"postgresql": "PostgreSQL", "mariadb": "MariaDB", "sqlite": "SQLite"}


def consume(room: Room) -> Figures:
    """Messages a second from NATS JetStream, the ways of each database taking turns."""
    figures = Figures("Consumer with inbox, messages a second from NATS JetStream")
    figures.numbers["rates"] = {}
    for kind in WAYS:
        try:
            _measure(room, figures, kind)
        except Unavailable as why:
            room.console.print(str(why))
            figures.add(NAMES[kind], "not measured")
    return figures


def _measure(room: Room, figures: Figures, kind: str) -> None:
    found: dict[str, list[float]] = {verb: [] for verb in WAYS[kind]}
    for _ in range(room.size(ROUNDS, 1)):
        for verb, name in WAYS[kind].items():
            room.tick(f"{NAMES[kind]}, {name}")
            found[verb].append(_one(room, kind, verb))
    rates = {verb: median(each) for verb, each in found.items()}
    figures.numbers["rates"][kind] = {WAYS[kind][verb]: rate for verb, rate in rates.items()}
    for verb, rate in rates.items():
        bar = at_least(BAR) if kind == "postgresql" and verb in ("session", "driver") else None
        ratio, to = (None, "") if verb == "hand" else (rate / rates["hand"], HAND)
        figures.add(f"{NAMES[kind]}, {WAYS[kind][verb]}", f"{rate:,.0f}/s", ratio, to=to, bar=bar)


def _one(room: Room, kind: str, verb: str) -> float:
    count = room.size(*(HAND_MESSAGES if verb.startswith("hand") else OURS_MESSAGES))
    with room.database_of(kind) as url:
        place = {"database": url, "nats": room.empty_stream(), "messages": count}
        room.run(CONSUMERS, "prepare", **place)
        found = room.run(CONSUMERS, verb, **place)
    assert found["messages"] == count, (kind, verb, found["messages"], count)
    return float(count / found["seconds"])
