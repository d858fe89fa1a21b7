"""What must be true when a schedule is over, told from outside: what was said, what arrived."""

from collections.abc import Iterator
from itertools import pairwise

from .application import Fact
from .exchange import Arrival, Send
from .world import HOUSE_SECONDS, Fault, World

# A connection may be broken for a while before anybody uses it; what befalls the process itself
# has its effect while the lease it had then lasts.
UNNOTICED_LEASES = 3
DAY_SECONDS = 86_400
OWN_FAULTS = {"crash", "freeze", "wakes"}


def violations(world: World) -> list[str]:
    """Every promise that was broken, in a sentence."""
    return [
        *world.wrong,
        *world.server.foreign,
        *world.loop.errors,
        *_fate(world),
        *_ghosts(world),
        *_order(world),
        *_duplicates(world),
        *_attempts(world),
        *_kept(world),
    ]


def _fate(world: World) -> Iterator[str]:
    """Nothing is lost: what was committed has arrived, or waits where a person can see it."""
    tables = world.server.tables
    if not world.drained:
        left = [*tables.outbox.values(), *tables.held.values(), *tables.delayed.values()]
        yield f"not drained: {sorted(int(row.message.payload) for row in left)}"
    arrived = {arrival.id for arrival in world.exchange.arrivals}
    kept = {row.message.id for row in [*tables.outbox.values(), *tables.held.values()]}
    kept |= set(tables.delayed)
    for fact in world.facts:
        if fact.committed is None or fact.id in arrived or fact.id in kept:
            continue
        letter = tables.dead.get(fact.id)
        if letter is None:
            yield f"message {fact.number} is lost"


def _ghosts(world: World) -> Iterator[str]:
    committed = {fact.id for fact in world.facts if fact.committed is not None}
    for arrival in world.exchange.arrivals:
        if arrival.id not in committed:
            yield f"{arrival.id} arrived, and was never committed"


def _order(world: World) -> Iterator[str]:
    """First deliveries: whatever was committed before another was published comes before it."""
    first: dict[str, int] = {}
    for place, arrival in enumerate(world.exchange.arrivals):
        first.setdefault(arrival.id, place)
    dead = world.server.tables.dead
    keys: dict[tuple[str, str], list[Fact]] = {}
    for fact in world.facts:
        # A dead letter may have arrived without anybody knowing: it has no place any more.
        if fact.order and fact.committed is not None and fact.id not in dead:
            keys.setdefault(fact.order, []).append(fact)
    for facts in keys.values():
        for one in facts:
            for other in facts:
                if not _before(one, other) or other.id not in first:
                    continue
                if one.id not in first or first[one.id] > first[other.id]:
                    yield f"message {other.number} passed {one.number} of {one.order}"


def _before(one: Fact, other: Fact) -> bool:
    if one.transaction == other.transaction:
        return one.published < other.published
    return one.committed is not None and one.committed < other.published


def _duplicates(world: World) -> Iterator[str]:
    """A message is sent again only if its sender was not told, or something befell its sender.

    Judged by the times of sending: packets overtake each other, and what comes late on its way is
    no new decision of anybody's.
    """
    sends: dict[str, list[Arrival]] = {}
    for arrival in world.exchange.arrivals:
        sends.setdefault(arrival.id, []).append(arrival)
    numbers = {fact.id: fact.number for fact in world.facts}
    for id, arrivals in sends.items():
        arrivals.sort(key=lambda arrival: arrival.send.at)
        for before, again in pairwise(arrivals):
            if _given_up(world, before, again.send.at) or world.stops.cut(
                before.send.process, id, before.send.at, again.send.at
            ):
                continue
            if not any(_excuses(world, fault, before.send, again.send) for fault in world.faults):
                yield f"message {numbers.get(id)} came twice for no reason"


def _given_up(world: World, before: Arrival, now: float) -> bool:
    """Whether its sender had a reason to send again: another answer, or none in time."""
    send, timeout = before.send, world.settings["send_timeout_seconds"]
    if before.told or send.ended_at is None or send.ended_at > now:
        return False
    return send.answered or send.ended_at - send.at >= timeout


def _excuses(world: World, fault: Fault, before: Send, again: Send) -> bool:
    unnoticed = (1 if fault.why in OWN_FAULTS else UNNOTICED_LEASES) * world.lease_seconds
    concerned = fault.process in (None, before.process)
    return concerned and before.at - unnoticed <= fault.at <= again.at


def _attempts(world: World) -> Iterator[str]:
    """An attempt is spent only where the message itself was refused; nobody dies for less."""
    tables, refusals = world.server.tables, world.exchange.refusals
    for row in tables.held.values():
        if row.attempts > refusals[row.message.id]:
            yield f"held message {row.message.payload!r} has {row.attempts} attempts"
    expiring = {fact.id for fact in world.facts if fact.expires}
    for letter in tables.dead.values():
        known = letter.id in world.exchange.poison or letter.id in expiring
        if letter.attempts > refusals[letter.id]:
            yield f"{letter.id} died of {letter.code} after {letter.attempts} attempts"
        elif not known and (letter.code == "suspected_killer" or letter.attempts < 6):
            yield f"{letter.id} died of {letter.code} and should live"


def _kept(world: World) -> Iterator[str]:
    """What was delivered, and what was said once, is kept as long as was asked and not for ever."""
    tables, now = world.server.tables, world.loop.now
    keep = world.settings["keep_delivered_seconds"]
    waiting = {row.message.id for row in [*tables.outbox.values(), *tables.held.values()]}
    if keep:
        for arrival in world.exchange.arrivals:
            ended = arrival.id not in waiting and arrival.id not in tables.dead
            if ended and arrival.at > now - keep and arrival.id not in tables.archive:
                yield f"{arrival.id} was delivered, and is not in the archive"
    for id, at in world.application.dedup.items():
        if at > now - world.settings["keep_dedup_seconds"] and id not in tables.dedup:
            yield f"the dedup key of {id} is gone"
    if world.pruned_at is None:
        return
    # The archive goes by whole days, and a day ends at midnight.
    for table, seconds in (
        (tables.archive, keep + DAY_SECONDS),
        (tables.dedup, world.settings["keep_dedup_seconds"]),
    ):
        old = [id for id, at in table.items() if at < world.pruned_at - seconds - HOUSE_SECONDS]
        if old:
            yield f"{len(old)} that should have been pruned are still there"
