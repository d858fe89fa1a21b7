"""A process whose claims nobody answers: it gives them up, and back when it hears again."""

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from postroom import failpoints
from postroom.errors import Unreachable
from postroom.idempotency import SHARED, Keys, afterwards, idempotent

OPERATION = "pay"


def quitter(url: str, *, effects: str, how: str) -> int:
    """Ask for a key, be told that it cannot be had, and stay while anybody looks for it."""
    afterwards.PAUSE_SECONDS = afterwards.LONGEST_PAUSE_SECONDS = 0.05
    failpoints.arm("sql.claim.after", _lose_the_reply)
    keys = Keys(url, scope=SHARED)
    if how == "async":
        asyncio.run(_in_loop(keys, effects))
        return 0
    try:
        paying(keys, effects)("k")
    except Unreachable:
        while any(thread.name == "postroom-afterwards" for thread in threading.enumerate()):
            time.sleep(0.01)
    keys.close()
    return 0


async def _in_loop(keys: Keys, effects: str) -> None:
    @idempotent(OPERATION, key="key", keys=keys)
    async def pay(key: str) -> str:
        return _done(effects, key)

    try:
        await pay("k")
    except Unreachable:
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})
    await keys.close_async()


def paying(keys: Keys, effects: str) -> Callable[[str], Any]:
    """What is asked for: a line in a file, which nobody takes back."""

    @idempotent(OPERATION, key="key", keys=keys)
    def pay(key: str) -> str:
        return _done(effects, key)

    return pay


def _done(effects: str, key: str) -> str:
    with Path(effects).open("a") as file:
        file.write(f"{key}\n")
    return "paid"


def _lose_the_reply() -> None:
    raise Unreachable("the reply was lost")
