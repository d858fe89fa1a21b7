"""A consumer in a process of its own, and all that can happen to the messages it receives."""

import asyncio
import json
import signal
import uuid
from typing import Any

from postbox import Postbox
from worlds import World

from postroom import Consumer, Outbox, Rejected, framework
from postroom.errors import PostroomError
from postroom.retry import RetryPolicy

NAME = "billing"
TOPIC = "facts"
RETRY = RetryPolicy((0.05,), attempts=3)
QUICK: dict[str, Any] = {"poll_seconds": 0.05, "grace_seconds": 5, "stuck_seconds": 5}
GONE = 3
ALIAS = "counted"


def consumer(
    url: str,
    *,
    box: str,
    settings: dict[str, Any] | None = None,
    plain: bool = False,
    django: bool = False,
) -> int:
    """Consume until SIGTERM. A payload may say what becomes of it: `transient` fails twice,
    in any process; `permanent` is rejected."""
    from programs import is_first

    from postroom.inbox import store

    store.LEASE_SECONDS = 2.0  # after so long another tries what a dead process was about to
    how = QUICK | {"topics": [TOPIC], "retry": RETRY} | (settings or {})
    if django:
        alias_of(url)
        billing = Consumer(NAME, broker=Postbox(box), using=ALIAS, **how)
    else:
        billing = Consumer(NAME, url, Postbox(box), gives="session", **how)
    outbox = Outbox()

    def judge(fact: Any, received: Any) -> None:
        if fact["do"] == "permanent":
            raise Rejected("it says so itself", code="refused")
        # Twice: with others, and then alone.
        marks = [f"{box}.{received.id}.{n}" for n in range(2)]
        if fact["do"] == "transient" and any(map(is_first, marks)):
            raise RuntimeError("not yet")

    async def apply(fact: Any, tx: Any, received: Any) -> None:
        effect = {"id": received.id, "k": received.key, "n": fact["n"]}
        outbox.publish(tx, effect, type="applied", topic="bills", key=received.key)
        judge(fact, received)

    def apply_in_thread(fact: Any, tx: Any, received: Any) -> None:
        effect = {"id": received.id, "k": received.key, "n": fact["n"]}
        outbox.publish(tx, effect, type="applied", topic="bills", key=received.key)
        judge(fact, received)

    billing.on("fact")(apply_in_thread if plain or django else apply)

    async def run() -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, billing.stop)

        await billing.run()

    try:
        asyncio.run(run())
    except PostroomError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        return GONE
    return 0


def alias_of(url: str) -> None:
    """Name a database in Django's DATABASES."""
    from django_doors import FRAMEWORK, connections, entry

    framework._present = FRAMEWORK

    both = {"default": connections.settings["default"], ALIAS: entry(url)}
    connections.settings[ALIAS] = connections.configure_settings(both)[ALIAS]


class Counter:
    """What was sent to a consumer, and what came of it, seen from outside."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.path = world.folder / f"box-{uuid.uuid4().hex[:8]}"
        self.box = Postbox(self.path)
        self.good: list[tuple[str | None, int, str]] = []
        self.dead: dict[str, str] = {}
        self.behind = 0

    def send(
        self, key: str | None, n: int, do: str = "", *, type: str = "fact", lives: bool = True
    ) -> str:
        id = str(uuid.uuid4())
        self.box.put([(id, key, type, json.dumps({"n": n, "do": do}).encode())])
        if lives:
            self.good.append((key, n, id))
        return id

    def send_scenario(self) -> None:
        """All that can happen to a message."""
        for n in range(6):
            for key in range(4):
                self.send(f"key-{key}", n)
        self.send("tried", 0)
        self.send("tried", 1, "transient")
        for n in range(2, 8):
            self.send("tried", n, "transient" if n == 4 else "")
        self.send(None, 0)
        self.send(None, 1, "transient")
        self.send("dead", 0)
        self.dead[self.send("dead", 1, "permanent", lives=False)] = "refused"
        for n in range(2, 5):
            self.send("dead", n, lives=False)
            self.behind += 1
        self.dead[self.send(None, 0, type="strange", lives=False)] = "unknown_type"

    def start(self, failpoints: str = "", log: Any = None, **options: Any) -> Any:
        environment = {"POSTROOM_FAILPOINTS": failpoints} if failpoints else {}
        if log is not None:
            environment["POSTROOM_FAILPOINTS_LOG"] = str(log)
        return self.world._start("consumer", environment, box=str(self.path), **options)

    def applied(self) -> list[tuple[str | None, int, str]]:
        rows = self.world.tables.query("SELECT payload FROM {p}outbox ORDER BY position")
        found = [json.loads(bytes(row[0])) for row in rows]
        return [(each["k"], each["n"], each["id"]) for each in found]

    def settled(self) -> bool:
        held = self.world.tables.query("SELECT COUNT(*) FROM {p}inbox_held")[0][0]
        return (
            self.box.left() == 0
            and len(self.applied()) >= len(self.good)
            and held == len(self.dead) + self.behind
        )

    def judge(self) -> None:
        """Each effect once, in the order of its key; who had to die is a letter, once."""
        applied = self.applied()
        assert sorted(id for _, _, id in applied) == sorted(id for _, _, id in self.good)
        keys: dict[str | None, list[int]] = {}
        for key, n, _ in applied:
            keys.setdefault(key, []).append(n)
        for key, numbers in keys.items():
            assert key is None or numbers == sorted(numbers), (key, numbers)
        rows = self.world.tables.query("SELECT id, error_code FROM {p}dead_letter")
        assert {str(id): code for id, code in rows} == self.dead
        inbox = self.world.tables.query("SELECT message_id FROM {p}inbox")
        assert len(inbox) == len(self.good) + len(self.dead) + self.behind
