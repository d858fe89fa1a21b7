"""A clerk in a process of its own, who carries out requests with keys in each of the three modes.

What it does outside of the database is a line in a file, which no rollback takes back; what it
answers is a line in another.
"""

import asyncio
import json
import random
from functools import cached_property
from pathlib import Path
from typing import Any

from clerk_doors import DOORS
from registers import requests
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from tables import connect, run

from postroom import Outbox, failpoints
from postroom.idempotency import SHARED, Answer, Finisher, Keys, NotDone, Policy, resumable

DRIVERS = {"postgresql": "asyncpg", "mysql": "asyncmy", "sqlite": "aiosqlite"}
SYNC_DRIVERS = {"postgresql": "psycopg", "mysql": "pymysql", "sqlite": "pysqlite"}
INSERT = "INSERT INTO business (id, k, n) VALUES (%s, %s, %s)"
JSON = (("content-type", "application/json"),)


def clerk(url: str, *, door: str, effects: str, answers: str, rounds: int = 1) -> int:
    """Carry every request out, as a client would have it; then finish what is left over. In
    several rounds, before each of which the leases of a dead clerk are over."""
    asyncio.run(_clerk(Desk(url, Path(effects)), door, Path(answers), rounds))
    return 0


async def _clerk(desk: "Desk", door: str, answers: Path, rounds: int) -> None:
    ask, go_on = DOORS[door](desk)
    for _ in range(rounds):
        if rounds > 1:
            desk.end_leases()
        for mode, key in requests(door):
            try:
                status, body = await ask(mode, key)
            except Exception as error:
                print(f"{key}: {type(error).__name__}: {error}", flush=True)
                status, body = 500, b""
            with answers.open("a") as file:
                file.write(json.dumps([key, status, body.decode()]) + "\n")
        try:
            await Finisher(go_on).once()
        except Exception as error:
            print(f"{type(error).__name__}: {error}", flush=True)
    await desk.keys.close_async()
    await desk.engine_async.dispose()
    desk.engine.dispose()


class Desk:
    """What a clerk works with, whichever door a request came through."""

    def __init__(self, url: str, effects: Path) -> None:
        self.url = url
        self.scheme, _, self._rest = url.partition("://")
        self.outbox = Outbox()
        self.external = Policy(mode="external", verify=self.verify)
        self.policies = {
            "POST /same": Policy(mode="same_transaction"),
            "POST /refused": Policy(mode="same_transaction"),
            "POST /external": self.external,
            "POST /resume": Policy(mode="resume"),
        }
        self._effects = effects

    @cached_property
    def keys(self) -> Keys:
        return Keys(self.url, scope=SHARED, policies=self.policies)

    @cached_property
    def engine(self) -> Engine:
        engine = create_engine(f"{self.scheme}+{SYNC_DRIVERS[self.scheme]}://{self._rest}")
        return self._patient(engine)

    @cached_property
    def engine_async(self) -> AsyncEngine:
        engine = create_async_engine(f"{self.scheme}+{DRIVERS[self.scheme]}://{self._rest}")
        self._patient(engine.sync_engine)
        return engine

    def _patient(self, engine: Engine) -> Engine:
        if self.scheme == "sqlite":
            event.listen(engine, "connect", lambda c, _: c.execute("PRAGMA busy_timeout = 30000"))
        return engine

    @staticmethod
    def status(path: str) -> int:
        """A refusal comes after the work, which is undone."""
        return 410 if path == "/refused" else 200

    # ── what is done for a request: each attempt answers with a number of its own ──────────────

    def charge(self, key: str, card: str) -> dict[str, Any]:
        """Do it outside of the database, where it is known by the name `card`."""
        n = random.getrandbits(40)
        failpoints.hit("clerk.effect.before")
        with self._effects.open("a") as file:
            file.write(json.dumps([key, card, n]) + "\n")
        failpoints.hit("clerk.effect.after")
        return {"key": key, "n": n}

    def verify(self, name: Any) -> Any:
        lines = self._effects.read_text().splitlines() if self._effects.exists() else []
        for key, _, n in map(json.loads, lines):
            if key == name.key:
                return Answer(200, JSON, json.dumps({"key": key, "n": n}).encode())
        return NotDone

    def insert(self, tx: Any, key: str) -> dict[str, Any]:
        """Do it in a session of SQLAlchemy's, in a cursor of Django's or on a connection."""
        n = random.getrandbits(40)
        if hasattr(tx, "get_bind"):
            tx.execute(*_bound(key, n))
        elif self.scheme == "sqlite" and not hasattr(tx, "atomic_blocks"):
            tx.execute(INSERT.replace("%s", "?"), (key, key, n))
        else:
            with tx.cursor() as cursor:
                cursor.execute(INSERT, (key, key, n))
        self.outbox.publish(tx, {"n": n}, type="fact", topic="facts", key=key)
        return {"key": key, "n": n}

    async def insert_async(self, tx: Any, key: str) -> dict[str, Any]:
        """The same in an AsyncSession."""
        n = random.getrandbits(40)
        await tx.execute(*_bound(key, n))
        self.outbox.publish(tx, {"n": n}, type="fact", topic="facts", key=key)
        return {"key": key, "n": n}

    @cached_property
    def go_on(self) -> Any:
        """Both of it, from point to point."""

        @resumable(self.keys, "resume")
        def go_on(run: Any, wish: Any) -> Any:
            told = run.point("created", lambda tx: self.insert(tx, wish["key"]))
            run.call("charged", lambda: self.charge(wish["key"], run.key_for("card")))
            return 200, told

        return go_on

    @cached_property
    def go_on_async(self) -> Any:
        """The same in an event loop."""

        @resumable(self.keys, "resume")
        async def go_on(run: Any, wish: Any) -> Any:
            told = await run.point("created", lambda tx: self.insert_async(tx, wish["key"]))
            await run.call("charged", lambda: self.charge(wish["key"], run.key_for("card")))
            return 200, told

        return go_on

    def end_leases(self) -> None:
        """Let the time pass that leases would still last."""
        table = f"postroom{'.' if self.scheme == 'postgresql' else '_'}idempotency_key"
        past = "0" if self.scheme == "sqlite" else "'2020-01-01'"
        connection = connect(self.url, autocommit=True)
        run(connection, f"UPDATE {table} SET locked_until = {past} WHERE locked_until IS NOT NULL")
        connection.close()


def _bound(key: str, n: int) -> tuple[Any, dict[str, Any]]:
    values = {"id": key, "k": key, "n": n}
    return text("INSERT INTO business (id, k, n) VALUES (:id, :k, :n)"), values
