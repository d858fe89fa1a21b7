"""One database, the relays and writers around it, and what they wrote down."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from history import Delivery, Fact, History, Report, check
from nursery import Child, Nursery
from tables import Tables, connect, note_standing

from helpers import eventually
from postroom.messages import Draft, new_id
from postroom.outbox.publish import Outbox

# As tests/conftest.py names the servers; None: a file needs none.
KINDS = {"postgresql": "postgres", "mariadb": "mariadb", "sqlite": ""}

QUICK: dict[str, Any] = {
    "lease_seconds": 3,
    "send_timeout_seconds": 0.3,
    "poll_max_seconds": 0.1,
    "batch_rows": 20,
    "in_flight_rows": 200,
    "grace_seconds": 5,
}


class World:
    """What a test breaks."""

    def __init__(self, nursery: Nursery, tables: Tables, folder: Path) -> None:
        self.nursery = nursery
        self.tables = tables
        self.folder = folder
        self.gate = folder / "gate"
        self.children: list[Child] = []
        self.disturbed: set[int] = set()
        self._facts: list[Fact] = []
        self._runs = 0
        self._connection: Any = None

    @property
    def record(self) -> Path:
        return self.folder / f"record-{self._runs}"

    @property
    def writer_log(self) -> Path:
        return self.folder / f"writers-{self._runs}"

    @property
    def leave(self) -> Path:
        return self.folder / f"leave-{self._runs}"

    @property
    def faults(self) -> Path:
        return self.folder / f"faults-{self._runs}"

    def clear(self) -> None:
        """Begin anew: empty tables, new records."""
        self.end_children()
        self.tables.clear()
        self._facts = []
        self.disturbed = set()
        self._runs += 1

    # ── what happens in it ─────────────────────────────────────────────────────────────────────

    def publish(self, *drafts: Draft) -> list[str]:
        """Commit messages in one transaction of ours; returns their ids."""
        self._connection = self._connection or connect(self.tables.url)
        published = Outbox().publish_many(self._connection, drafts)
        self._connection.commit()
        for draft, message in zip(drafts, published, strict=True):
            n = draft.payload["n"] if draft.deliver_at is None else None
            self._facts.append(Fact(message.id, draft.key, n))
        return [message.id for message in published]

    def forget_connection(self) -> None:
        """Publish on a new connection: the server of the old one is gone."""
        self._connection.close()
        self._connection = None

    def relay(self, failpoints: str = "", *, log: Path | None = None, **options: Any) -> Child:
        """Start a relay that delivers into the record."""
        environment = {"POSTROOM_FAILPOINTS": failpoints} if failpoints else {}
        if log is not None:
            environment["POSTROOM_FAILPOINTS_LOG"] = str(log)
        if "broker" not in options:
            options.setdefault("record", str(self.record))
        settings = QUICK | options.pop("settings", {})
        return self._start("relay", environment, settings=settings, **options)

    def command(self, settings: dict[str, Any], *, call: str, delay_seconds: float) -> Child:
        """Start `postroom relay` itself, with a function of ours as its broker."""
        environment = {f"POSTROOM_RELAY_{k.upper()}": str(v) for k, v in settings.items()}
        environment["SINK_RECORD"] = str(self.record)
        environment["SINK_DELAY_SECONDS"] = str(delay_seconds)
        return self._start("command", environment, words=["relay", "--broker", f"call:{call}"])

    def writer(self, failpoints: str = "", *, program: str = "writer", **options: Any) -> Child:
        """Start a writer."""
        environment = {"POSTROOM_FAILPOINTS": failpoints} if failpoints else {}
        if log := options.pop("points", None):
            environment["POSTROOM_FAILPOINTS_LOG"] = str(log)
        return self._start(program, environment, log=str(self.writer_log), **options)

    def _start(self, program: str, environment: dict[str, str], **options: Any) -> Child:
        options.setdefault("url", self.tables.url)
        child = self.nursery.start(program, environment=environment, **options)
        self.children.append(child)
        return child

    def make_keys(self, keys: int) -> None:
        for number in range(keys):
            self.tables.query("INSERT INTO counter (k, n) VALUES (%s, 0)", f"key-{number}")

    # ── how it ends ────────────────────────────────────────────────────────────────────────────

    def settled(self) -> bool:
        """Whether no message is left that a relay could move."""
        return self.tables.waiting() == 0

    def until_settled(self, timeout: float = 20.0) -> None:
        eventually(self.settled, timeout, interval=0.03, retry=(Exception,))

    def until_taken(self, relay: Child) -> None:
        """Wait until a relay owns every lane."""
        eventually(lambda: relay.lanes_acquired >= 16)

    def deliveries(self) -> int:
        if not self.record.exists():
            return 0
        with self.record.open("rb") as file:
            return sum(1 for _ in file)

    def has_delivered(self, count: int) -> bool:
        return self.deliveries() >= count

    def settled_or_ended(self, relay: Child) -> bool:
        return relay.code is not None or self.settled()

    def delivered(self) -> set[str]:
        if not self.record.exists():
            return set()
        return {json.loads(line)[0] for line in self.record.read_text().splitlines()}

    def note_fault(self) -> None:
        """Something has just gone wrong: what was not settled by now may come again."""
        note_standing(self.tables.url, self.faults)

    def standing(self) -> set[str]:
        """What was noted at the last fault."""
        return set(json.loads(self.faults.read_text().splitlines()[-1]))

    def judge(
        self,
        *,
        in_flight: int = QUICK["in_flight_rows"],
        every_fault_noted: bool = False,
        deliveries: Sequence[Delivery] = (),
    ) -> Report:
        """The history of all that was published and delivered so far, elsewhere too."""
        history = History(disturbed=set(self.disturbed), in_flight=in_flight)
        history.commit(self._facts)
        history.read_writer(self.writer_log)
        history.read_deliveries(self.record)
        history.deliveries += deliveries
        history.read_tables(self.tables)
        if every_fault_noted:
            history.read_faults(self.faults)
        return check(history)

    def end_children(self) -> None:
        for child in self.children:
            if child.code is None:
                child.kill()
        self.children = []

    def close(self) -> None:
        self.end_children()
        self.tables.close()
        if self._connection is not None:
            self._connection.close()


def drafts(count: int, *, keys: int = 5, first: int = 1, prefix: str = "key") -> list[Draft]:
    """Messages in turn over some keys, numbered in their order."""
    return [
        Draft(
            payload={"n": first + number},
            type="fact",
            topic="facts",
            key=f"{prefix}-{number % keys}",
            id=new_id(),
        )
        for number in range(count)
    ]


def together(relays: Iterable[Child]) -> str:
    """What several relays wrote, for the message of a failed assertion."""
    return "\n".join(f"── {relay.pid}\n{relay.log}" for relay in relays)
