"""A client hangs up at any moment: an effect is whole or not there, and the next try finds out.

The call of the middleware is cancelled while the work under its key is at each of its awaits in
turn, which is what a server does when its client is gone; in each mode.
"""

import asyncio
import json
from typing import Any

import pytest
from clerks import DRIVERS
from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import create_async_engine
from stepping import Stepper, place_of

from postroom.idempotency import SHARED, Keys, Policy, resumable
from postroom.idempotency.asgi import IdempotencyMiddleware, turn_of
from stages import Stage, Stages

pytestmark = pytest.mark.guarantee

MOST = 500  # awaits; far more than there are


class HangUp(Stepper):
    """Cancels the task of the request, at the n-th await of its work."""

    request: asyncio.Task[Any] | None = None

    def waiting(self, work: Any, future: Any) -> None:
        place = place_of(work)
        self.passed[place] += 1
        if self.request is not None and self.passed.total() == self._at:
            self.where = place
            self.request.cancel()


class Middleware(IdempotencyMiddleware):
    """Hangs up as it is told."""

    hang_up = HangUp()

    async def _in_task(self, work: Any, request: Any) -> None:
        await super()._in_task(self.hang_up.watch(work), request)


class Service:
    """An application that has an effect inside and one outside of the database."""

    def __init__(self, stage: Stage, mode: Any) -> None:
        self.stage, self.mode = stage, mode
        self.outside: list[str] = []
        scheme, _, rest = stage.url.partition("://")
        self.engine = create_async_engine(f"{scheme}+{DRIVERS[scheme]}://{rest}")
        if stage.database == "sqlite":
            event.listen(
                self.engine.sync_engine,
                "connect",
                lambda connection, _: connection.execute("PRAGMA busy_timeout = 30000"),
            )
        policy = Policy(mode=mode, wait_seconds=60 if mode != "same_transaction" else None)
        self.keys = Keys(stage.url, scope=SHARED, policies={"POST /": policy})
        self.app = Middleware(self._app, self.keys)

        @resumable(self.keys, "count", policy)
        async def count(run: Any, wish: Any) -> Any:
            await run.point("inside", lambda tx: self._inside(tx, wish))
            await run.call("outside", lambda: self._outside(wish))
            return 200, wish

        self._count = count

    async def _inside(self, tx: Any, name: str) -> None:
        await tx.execute(text("INSERT INTO thing VALUES (:name)"), {"name": name})

    async def _outside(self, name: str) -> None:
        await asyncio.sleep(0)
        self.outside.append(name)
        await asyncio.sleep(0)

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        turn, name = turn_of(scope), json.loads((await receive())["body"])
        if self.mode == "same_transaction":
            await self._inside(await turn.session_async(self.engine), name)
        elif self.mode == "resume":
            await self._count.serve(turn, name)
        else:
            await self._outside(name)
        head = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": b"ok"})

    async def request(self, key: str) -> int:
        said: list[Any] = []

        async def receive() -> Any:
            await asyncio.sleep(0)
            return {"type": "http.request", "body": json.dumps(key).encode()}

        async def send(message: Any) -> None:
            await asyncio.sleep(0)
            said.append(message)

        headers = [(b"idempotency-key", key.encode()), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/", "headers": headers}
        await self.app(scope, receive, send)
        return int(said[0]["status"])

    async def close(self) -> None:
        await asyncio.gather(*self.app._left, return_exceptions=True)
        await self.keys.close_async()
        await self.engine.dispose()


@pytest.mark.parametrize("mode", ["same_transaction", "external", "resume"])
@pytest.mark.parametrize("database", ["sqlite", "postgresql", "mariadb"])
async def test_at_each_await(database: str, mode: str, stages: Stages) -> None:
    stage = stages[database]
    app = Service(stage, mode)
    names = []
    for at in range(1, MOST):
        names.append(name := f"n{at}")
        app.app.hang_up = hang_up = HangUp(at)
        hang_up.request = asyncio.ensure_future(app.request(name))
        await asyncio.gather(hang_up.request, return_exceptions=True)
        # The client that hung up asks again, at once.
        app.app.hang_up = HangUp()
        assert await app.request(name) == 200, hang_up.where
        if not hang_up.cancelled:
            break
    else:
        raise AssertionError("it never came to its end")
    assert len(names) > 5
    await app.close()
    inside, outside = mode != "external", mode != "same_transaction"
    assert stage.things() == (sorted(names) if inside else [])
    assert sorted(app.outside) == (sorted(names) if outside else [])
    rows = stage.query("SELECT status FROM {p}idempotency_key")
    assert rows == [("completed",)] * len(names)
