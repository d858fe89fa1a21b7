"""A relay that sends an order, loses its database before the settle, connects again, and is killed.

`python dying_relay.py DATABASE BOOK`
"""

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ledger_tools import NOT_THERE, URL, Askable

from postroom.brokers.base import Outcome
from postroom.messages import Message
from postroom.outbox.office import Office
from postroom.outbox.relay import Relay
from postroom.outbox.store import Store

OPENED: list[Office] = []
open_office, settle = Office.open, Store.settle


class Exchange(Askable):
    async def send(self, batch: Sequence[Message], *, epoch: int = 0) -> list[Outcome]:
        Path(sys.argv[2]).write_text("".join(f"{message.id}\n" for message in batch))
        return await super().send(batch)


async def lose(self: Store, link: Any, changes: Any) -> Any:
    if any(change.delivered for change in changes):
        await link.close()
    return await settle(self, link, changes)


async def open_and_die(self: Office) -> None:
    await open_office(self)
    OPENED.append(self)
    if len(OPENED) == 2:
        os.kill(os.getpid(), signal.SIGKILL)


async def main() -> None:
    Store.settle = lose  # type: ignore[method-assign]
    Office.open = open_and_die  # type: ignore[method-assign]
    receiver = Exchange(found=[NOT_THERE])
    how: dict[str, Any] = {"lease_seconds": 6, "send_timeout_seconds": 1, "rebind": True}
    async with Relay(sys.argv[1], URL, brokers={URL: receiver}, **how):
        await asyncio.sleep(60)


if __name__ == "__main__":
    asyncio.run(main())
