"""A process with keys: it holds one until it is killed, or finishes what others have left.

python holding.py URL external|same|resume|finish LEASE_SECONDS
"""

import asyncio
import sys
import time
from typing import Any

from serving import SYNC_DRIVERS, with_driver
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from postroom.idempotency import SHARED, Finisher, Keys, Policy, idempotent, resumable

WORK = text("INSERT INTO thing VALUES ('a')")


def hold() -> None:
    """Say so, and stay."""
    print("held", flush=True)
    time.sleep(600)


async def work(tx: Any) -> None:
    await tx.execute(WORK)


async def main(url: str, role: str, lease_seconds: float) -> None:
    keys, policy = Keys(url, scope=SHARED), Policy(lease_seconds=lease_seconds)

    @idempotent("pay", key="key", keys=keys, policy=policy)
    def pay(key: str) -> None:
        hold()

    @idempotent("place", key="key", tx="session")
    def place(session: Session, key: str) -> None:
        session.execute(WORK)
        hold()

    @resumable(keys, "ride", policy)
    async def ride(run: Any, wish: Any) -> str:
        await run.point("made", work)
        if role == "resume":
            print("held", flush=True)
            await asyncio.sleep(600)
        return "done"

    if role == "external":
        await asyncio.to_thread(pay, "k")
    elif role == "same":
        with Session(create_engine(with_driver(url, SYNC_DRIVERS))) as session:
            place(session, "k")
    elif role == "resume":
        await ride("k", 1)
    else:
        print("held", flush=True)
        await Finisher(ride).run()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3])))
