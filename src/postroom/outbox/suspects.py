"""A suspect's send, alone: the journal says whether the process outlived the beginning.

A message that kills its sender nearly always does so when the send begins. A process that is killed
for another reason dies at any moment of a send. So a death in the first `QUICK_SECONDS` weighs much
more than one after them, and a process that lives for so long settles the quick deaths before.

Crash between the two commits: the death counts as a quick one and as a late one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

from postroom.messages import Message
from postroom.outbox.rules import QUICK_SECONDS
from postroom.outbox.store import Change, Fence

__all__ = ["send_alone"]


class Journal(Protocol):
    """What a suspect's send needs of its lane."""

    fence: Fence

    async def journal(self, messages: Sequence[Message], alone: bool) -> int: ...
    async def settle(self, change: Change) -> None: ...


async def send_alone(lane: Journal, message: Message, send: Coroutine[Any, Any, None]) -> list[int]:
    """Run a send that the journal has announced; return the lines that were added meanwhile."""
    batches: list[int] = []
    sending = asyncio.create_task(send)
    try:
        await asyncio.wait([sending], timeout=QUICK_SECONDS)
        if not sending.done():
            # Whatever fails here, the send goes on: its settle finds the same trouble.
            with contextlib.suppress(Exception):
                batches.append(await lane.journal([message], alone=False))
                await lane.settle(Change(lane.fence, outlived=[message.position]))
        await sending
    finally:
        sending.cancel()
    return batches
