"""What a relay may leave behind when it stops: nothing, but for two reasons.

Something befell it or the database, shortly before or since: leases and the next relay see to that.
Or its grace was over while a send of a lane was under way. It says so, keeps that lane until its
lease ends, and may have receipts that it could not write down any more, and lines of that lane in
the journal. Even then its name is not among the workers.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .loop import Process

if TYPE_CHECKING:
    from .world import Living, World

# Within which a relay notices what befell it, and has put it right.
NOTICED_LEASES = 3
# What must be written down after the last answer takes less, when nothing befalls the database.
SETTLED_SECONDS = 1.0


@dataclass(frozen=True)
class Unsettled:
    """What a relay said when its grace was over."""

    at: float
    process: Process
    lanes: frozenset[int]
    ids: frozenset[str]  # the messages that were in these lanes then
    suspects: bool  # and whether any of them had killed a relay, or so it seemed


class Stops:
    """Hears what relays say when they stop, and looks at what they have left."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self.unsettled: list[Unsettled] = []

    def hear(self, process: Process, fields: dict[str, Any]) -> None:
        """`relay.unsettled`"""
        world, lanes = self._world, frozenset(fields["lanes"])
        tables = world.server.tables
        rows = [*tables.outbox.values(), *tables.held.values()]
        ids = frozenset(row.message.id for row in rows if row.message.lane in lanes)
        suspects = any(lane in lanes and who != process.owner for lane, who, _ in tables.batch)
        self.unsettled.append(Unsettled(world.loop.now, process, lanes, ids, suspects))
        world.trace("unsettled", process.name, sorted(lanes))

    def cut(self, process: Process, id: str, since: float, until: float) -> bool:
        """Whether the grace of this sender was over before it could write the message down."""
        return any(
            said.process is process and id in said.ids and since <= said.at <= until
            for said in self.unsettled
        )

    def left(self, living: "Living") -> str:
        """What this relay, which has stopped, has left and should not have; "": nothing."""
        assert living.relay is not None
        if self._befallen(living):
            return ""
        tables, owner = self._world.server.tables, living.relay.owner
        lanes = [lane for lane, row in tables.lane.items() if row.owner == owner]
        allowed = self._may_keep(living)
        kept = sorted(set(lanes) - allowed)
        journal = sorted({lane for lane, who, _ in tables.batch if who == owner} - allowed)
        found = [f"lanes {kept}"] * bool(kept) + [f"the journal of {journal}"] * bool(journal)
        return " and ".join(found + ["its name"] * (owner in tables.worker))

    def _befallen(self, living: "Living") -> bool:
        world = self._world
        told_at = world.loop.now if living.told_at is None else living.told_at
        since = told_at - NOTICED_LEASES * world.lease_seconds
        if not world.server.up or world.server.rose_at >= since:
            return True
        concerned = (None, living.process)
        return any(fault.process in concerned and fault.at >= since for fault in world.faults)

    def _may_keep(self, living: "Living") -> set[int]:
        """The lanes for which its grace was too short."""
        grace = float(self._world.settings["grace_seconds"])
        return {
            lane
            for said in self.unsettled
            if said.process is living.process
            and living.told_at is not None
            and said.at >= living.told_at + grace
            for lane in said.lanes
            if grace <= SETTLED_SECONDS or self._held_up(said, lane, grace)
        }

    def _held_up(self, said: Unsettled, lane: int, grace: float) -> bool:
        """Whether a send that began before the stop lasted as long as the grace: of this lane, or
        of any if a suspect waits until it is alone, or others wait for a suspect."""
        return any(
            send.process is said.process
            and (send.lane == lane or said.suspects)
            and send.at <= said.at - grace
            and (send.ended_at is None or send.ended_at > said.at - SETTLED_SECONDS)
            for send in self._world.exchange.sends
        )
