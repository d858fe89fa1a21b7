"""A clerk in a process of its own, who carries out requests with keys in each of the three modes.

What it does outside of the database is a line in a file, which no rollback takes back; what it
answers is a line in another.
"""

import asyncio
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import create_async_engine

from postroom import Outbox, failpoints
from postroom.idempotency import SHARED, Answer, Finisher, Keys, NotDone, Policy, resumable
from postroom.idempotency.asgi import IdempotencyMiddleware, turn_of

if TYPE_CHECKING:
    from worlds import World

DRIVERS = {"postgresql": "asyncpg", "mysql": "asyncmy", "sqlite": "aiosqlite"}
EACH = 2 if os.environ.get("POSTROOM_SWEEP") == "full" else 1
REQUESTS = [(mode, f"{mode}-{n}") for n in range(EACH) for mode in ("same", "external", "resume")]


def clerk(url: str, *, effects: str, answers: str, rounds: int = 1) -> int:
    """Carry every request out, as a client would have it; then finish what is left over. In
    several rounds, before each of which the leases of a dead clerk are over."""
    asyncio.run(_clerk(url, Path(effects), Path(answers), rounds))
    return 0


async def _clerk(url: str, effects: Path, answers: Path, rounds: int) -> None:
    scheme, _, rest = url.partition("://")
    engine = create_async_engine(f"{scheme}+{DRIVERS[scheme]}://{rest}")
    if scheme == "sqlite":
        event.listen(
            engine.sync_engine, "connect", lambda c, _: c.execute("PRAGMA busy_timeout = 30000")
        )
    outbox = Outbox()

    def effect(key: str) -> None:
        failpoints.hit("clerk.effect.before")
        with effects.open("a") as file:
            file.write(f"{key}\n")
        failpoints.hit("clerk.effect.after")

    def verify(name: Any) -> Any:
        done = effects.exists() and f"{name.derive('card')}\n" in effects.read_text()
        return (
            Answer(200, (("content-type", "text/plain"),), name.key.encode()) if done else NotDone
        )

    policies = {
        "POST /same": Policy(mode="same_transaction"),
        "POST /external": Policy(mode="external", verify=verify),
        "POST /resume": Policy(mode="resume"),
    }
    keys = Keys(url, scope=SHARED, policies=policies)

    @resumable(keys, "resume")
    async def go_on(run: Any, wish: Any) -> Any:
        await run.point("created", lambda tx: insert(tx, wish["key"]))
        await run.call("charged", lambda: effect(run.key_for("card")))
        return 200, wish["key"]

    async def insert(tx: Any, key: str) -> None:
        values = {"id": key, "k": key}
        await tx.execute(text("INSERT INTO business (id, k, n) VALUES (:id, :k, 1)"), values)
        outbox.publish(tx, {"n": 1}, type="fact", topic="facts", key=key)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        turn, body = turn_of(scope), (await receive())["body"]
        wish = json.loads(body)
        if scope["path"] == "/same":
            await insert(await turn.session_async(engine), wish["key"])
        elif scope["path"] == "/external":
            effect(turn.key_for("card"))
        else:
            await go_on.serve(turn, wish)
        head = [(b"content-type", b"text/plain"), (b"content-length", b"0")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": wish["key"].encode()})

    middle = IdempotencyMiddleware(app, keys)
    for _ in range(rounds):
        if rounds > 1:
            await _end_leases(engine, scheme)
        for mode, key in REQUESTS:
            status, body = await _request(middle, f"/{mode}", key)
            with answers.open("a") as file:
                file.write(json.dumps([key, status, body.decode()]) + "\n")
        try:
            await Finisher(go_on).once()
        except Exception as error:
            print(f"{type(error).__name__}: {error}", flush=True)
    await keys.close_async()
    await engine.dispose()


async def _end_leases(engine: Any, scheme: str) -> None:
    """Let the time pass that leases would still last."""
    table = f"postroom{'.' if scheme == 'postgresql' else '_'}idempotency_key"
    past = "0" if scheme == "sqlite" else "'2020-01-01'"
    async with engine.begin() as connection:
        await connection.execute(
            text(f"UPDATE {table} SET locked_until = {past} WHERE locked_until IS NOT NULL")
        )


async def _request(app: Any, path: str, key: str) -> tuple[int, bytes]:
    said: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": json.dumps({"key": key}).encode()}

    async def send(message: Any) -> None:
        said.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": [(b"idempotency-key", key.encode()), (b"content-type", b"application/json")],
    }
    try:
        await app(scope, receive, send)
    except Exception as error:
        print(f"{key}: {type(error).__name__}: {error}", flush=True)
        return 500, b""
    return said[0]["status"], said[1]["body"]


class Register:
    """What clerks were asked, and what came of it, seen from outside."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.effects = world.folder / f"effects-{world._runs}"
        self.answers = world.folder / f"answers-{world._runs}"

    def start(self, failpoints: str = "", log: Any = None, rounds: int = 1) -> Any:
        environment = {"POSTROOM_FAILPOINTS": failpoints} if failpoints else {}
        if log is not None:
            environment["POSTROOM_FAILPOINTS_LOG"] = str(log)
        files = {"effects": str(self.effects), "answers": str(self.answers)}
        return self.world._start("clerk", environment, **files, rounds=rounds)

    def judge(self) -> None:
        """Each request carried out once, and answered alike whenever it was."""
        tables = self.world.tables
        wanted = sorted(key for _, key in REQUESTS)
        column = "`key`" if tables.kind == "mariadb" else "key"
        rows = tables.query(f"SELECT {column}, status FROM {{p}}idempotency_key")
        assert sorted(map(tuple, rows)) == [(key, "completed") for key in wanted]
        in_tables = [key for mode, key in REQUESTS if mode != "external"]
        assert tables.business() == set(in_tables)
        messages = tables.query(f"SELECT {column} FROM {{p}}outbox")
        assert sorted(key for (key,) in messages) == sorted(in_tables)
        self._judge_effects()
        told: dict[str, set[str]] = {}
        for line in self.answers.read_text().splitlines():
            key, status, body = json.loads(line)
            assert status in (200, 409, 500, 503), line
            if status == 200:
                told.setdefault(key, set()).add(body.strip('"'))
        assert told == {key: {key} for key in wanted}

    def _judge_effects(self) -> None:
        lines = self.effects.read_text().split()
        for mode, key in REQUESTS:
            count = sum(line.endswith(f":{key}:card") for line in lines)
            # A call may be made twice in `resume`, under one key that its receiver knows.
            most = {"same": 0, "external": 1, "resume": 2}[mode]
            assert min(most, 1) <= count <= most, (key, count)
