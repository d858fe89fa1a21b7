"""A function that a scheduler calls now and then, such as AWS Lambda every minute.

It delivers what is due and returns the counts. Handler: `lambda_drain.handler`. Settings:
POSTROOM_DATABASE_URL and POSTROOM_BROKER_URL.

Each call has an event loop, a relay and connections of its own and closes all of them: a frozen
function must not keep a connection that dies, or a lane that others wait for. Two calls at the same
time do no harm; a lane that one has is left to it by the other, which says so in `lanes_elsewhere`.
A call that is cut off in the middle holds its lanes until its lease ends, here after 20 seconds.
"""

import asyncio
import os
from dataclasses import dataclass
from typing import Any

from postroom import Relay

# Less than the function's own limit is left for the last send and for closing.
SPARE_SECONDS = 5.0
DEFAULT_SECONDS = 60.0


@dataclass
class Limits:
    """How long a call may take."""

    seconds: float

    @classmethod
    def of(cls, context: Any) -> "Limits":
        if context is None:  # called by something other than Lambda
            return cls(DEFAULT_SECONDS)
        return cls(max(1.0, context.get_remaining_time_in_millis() / 1000 - SPARE_SECONDS))


async def drain(limits: Limits) -> dict[str, Any]:
    relay = Relay(
        os.environ["POSTROOM_DATABASE_URL"],
        os.environ["POSTROOM_BROKER_URL"],
        lease_seconds=20,
        send_timeout_seconds=5,
        listen=False,
    )
    # When time is up the relay stops at the next border between two waves and settles them.
    timer = asyncio.get_running_loop().call_later(limits.seconds, relay.stop)
    try:
        drained = await relay.drain_once()
    finally:
        timer.cancel()
        await relay.close()
    return {
        "delivered": drained.delivered,
        "held": drained.held,
        "dead": drained.dead,
        "lanes_elsewhere": drained.elsewhere,
        "stopped_early": relay.stopping.is_set(),
    }


def handler(event: Any, context: Any) -> dict[str, Any]:
    """What the scheduler calls. An error is raised, so that the scheduler sees it and alarms."""
    return asyncio.run(drain(Limits.of(context)))
