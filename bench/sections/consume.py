"""A consumer with the inbox against one that commits one row a message by hand."""

from __future__ import annotations

from bench.figures import Figures, at_least, median
from bench.room import CONSUMERS, Room
from servers import Unavailable

ROUNDS = 3
OURS_MESSAGES = (20_000, 400)
HAND_MESSAGES = (5_000, 200)
BAR = 3.0
# The verbs of the program, with their names for people and what each is held against: a driver's
# connection against the driver alone, a session against a session.
WAYS = {
    "hand": "by hand, driver's connection",
    "hand-session": "by hand, session",
    "hands": "by hand, driver's connection, 4 workers",
    "driver": "postroom, driver's connection",
    "session": "postroom, session",
}
AGAINST = {"hands": "hand", "driver": "hand", "session": "hand-session"}
NAMES = {"postgresql": "PostgreSQL", "mariadb": "MariaDB", "sqlite": "SQLite"}


def consume(room: Room) -> Figures:
    """Messages a second from NATS JetStream, the ways of each database taking turns."""
    figures = Figures("Consumer with inbox, messages a second from NATS JetStream")
    figures.numbers["rates"] = {}
    for kind in NAMES:
        try:
            _measure(room, figures, kind)
        except Unavailable as why:
            room.console.print(str(why))
            figures.add(NAMES[kind], "not measured")
    return figures


def _measure(room: Room, figures: Figures, kind: str) -> None:
    # Workers side by side gain nothing where one writes at a time.
    ways = {verb: name for verb, name in WAYS.items() if (verb, kind) != ("hands", "sqlite")}
    found: dict[str, list[float]] = {verb: [] for verb in ways}
    for _ in range(room.size(ROUNDS, 1)):
        for verb, name in ways.items():
            room.tick(f"{NAMES[kind]}, {name}")
            found[verb].append(_one(room, kind, verb))
    rates = {verb: median(each) for verb, each in found.items()}
    figures.numbers["rates"][kind] = {ways[verb]: rate for verb, rate in rates.items()}
    for verb, rate in rates.items():
        other = AGAINST.get(verb)
        ratio, to = (rate / rates[other], ways[other]) if other else (None, "")
        bar = None if verb.startswith("hand") else at_least(BAR)
        figures.add(f"{NAMES[kind]}, {ways[verb]}", f"{rate:,.0f}/s", ratio, to=to, bar=bar)


def _one(room: Room, kind: str, verb: str) -> float:
    count = room.size(*(HAND_MESSAGES if verb.startswith("hand") else OURS_MESSAGES))
    with room.database_of(kind) as url:
        place = {"database": url, "nats": room.empty_stream(), "messages": count}
        room.run(CONSUMERS, "prepare", **place)
        found = room.run(CONSUMERS, verb, **place)
    assert found["messages"] == count, (kind, verb, found["messages"], count)
    return float(count / found["seconds"])
