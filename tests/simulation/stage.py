"""The stage: what the relay's own modules see instead of the real time, dice and database."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from random import Random
from typing import TYPE_CHECKING, Any
from unittest.mock import patch
from uuid import UUID

from postroom import alerts, messages
from postroom.databases import database, opening
from postroom.outbox import housekeeping, office, relay, rules, sending, settling, watch
from postroom.outbox import lane as lane_module
from postroom.worker import reopening, vitals

from .loop import clocks
from .server import Link
from .tables import LANES

RARELY_SECONDS = 5.0

if TYPE_CHECKING:
    from .world import World


@contextmanager
def simulated(world: "World") -> Iterator[None]:
    """The relay's modules see the world's time, dice, database and nothing else."""
    time = clocks(world.loop)
    random = Random(world.seed + 5)
    uuids = Random(world.seed + 6)

    class Uuid:
        @staticmethod
        def uuid4() -> UUID:
            return UUID(int=uuids.getrandbits(128))

    with ExitStack() as stack:

        def put(target: Any, name: str, value: Any) -> None:
            stack.enter_context(patch.object(target, name, value))

        for module in (relay, office, housekeeping, settling, lane_module, watch, database):
            put(module, "time", time)
        for module in (messages, rules, office, watch):
            put(module, "LANES", LANES)
        # Millions of lines that nobody reads would take most of the time, and beats a tenth of it
        # that only show people outside that the loop turns.
        put(logging.getLogger("postroom"), "disabled", True)
        put(vitals, "BEAT_SECONDS", RARELY_SECONDS)
        put(watch, "ELECTION_SECONDS", RARELY_SECONDS)
        put(reopening, "random", random)
        put(relay, "uuid", Uuid)
        put(opening, "postgresql", world.server.connect)
        put(database, "_link_on", lambda dialect, driver: Link(driver))
        # What stands as a default was taken from the real modules when they were imported.
        for method in (sending.Sender.__init__, alerts.Alerts.__init__):
            put(method, "__kwdefaults__", {**method.__kwdefaults__, "clock": time.monotonic})
        put(
            sending.Sender.__init__,
            "__kwdefaults__",
            {**sending.Sender.__init__.__kwdefaults__, "randomness": random.random},
        )
        for method in (vitals.Vitals.__init__, watch.Publishers.__init__):
            put(method, "__defaults__", (time.monotonic,))
        yield
