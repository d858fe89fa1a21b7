"""Whether a pooler stands between us and PostgreSQL, and what it keeps together.

A pooler in session mode gives a client one server for as long as it stays; in transaction mode it
gives one for each transaction, so nothing said outside of one (SET, LISTEN, session locks, named
prepared statements) may be relied on. Nobody can ask a pooler for its mode, but two clients can
watch: in session mode they never meet the same server, and neither ever meets another one.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from postroom.databases.database import Database, DatabaseLost, WorkerLink
from postroom.databases.opening import ROOM
from postroom.errors import PostroomError

__all__ = ["Pooling", "pooling"]

Pooling: TypeAlias = Literal["none", "session", "transaction", "unknown"]

ROUNDS = 20


async def pooling(database: Database) -> Pooling:
    """What stands before the database: nothing, or a pooler in this mode.

    `unknown`: a pooler had no second connection to give, so its mode could not be seen. A very busy
    one in transaction mode might pass for `session`; a wrong `transaction` cannot be.
    """
    first = await database.connect()
    try:
        if not first.pooled:
            return "none"
        try:
            second = await database.connect()
        except PostroomError:
            return "unknown"
        try:
            return await _watch(first, second)
        finally:
            await second.close()
    except DatabaseLost as error:
        raise database.explain(error) from error
    finally:
        await first.close()


async def _watch(first: WorkerLink, second: WorkerLink) -> Pooling:
    mine: set[int] = set()
    theirs: set[int] = set()
    for _ in range(ROUNDS):
        mine.add(await _server_of(first))
        theirs.add(await _server_of(second))
        if len(mine) > 1 or len(theirs) > 1 or mine & theirs:
            return "transaction"
    return "session"


async def _server_of(link: WorkerLink) -> int:
    ((pid,),) = await link.query(ROOM, "backend")
    return int(pid)
