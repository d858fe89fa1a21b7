"""A crew of relays under a supervisor, the blows that fall on it, and the verdict at the end."""

import json
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, TypeAlias

from history import Delivery, History, check
from nursery import Child
from worlds import World, together

from helpers import eventually, until_none_left
from servers import Server

LEASE = 2.0
SETTINGS: dict[str, Any] = {
    "lease_seconds": LEASE,
    "send_timeout_seconds": 0.3,
    "batch_rows": 100,
    "in_flight_rows": 400,
}

Blow: TypeAlias = Callable[[], None]


class Crew:
    """Relays under a supervisor: whoever dies is replaced at once."""

    what = "relay"

    def __init__(
        self,
        world: World,
        relays: int,
        seed: str,
        settings: dict[str, Any] = SETTINGS,
        **options: Any,
    ) -> None:
        self.world = world
        self._settings = settings
        self.blows: Counter[str] = Counter()  # by kind
        self._dice = random.Random(seed)
        self._options = options
        self._hits: Counter[int] = Counter()  # by process
        self._look_at = 0.0
        self._everyone: list[Child] = []
        self._crew = [self._new() for _ in range(relays)]

    def _new(self, failpoint: str = "") -> Child:
        child = self.world.relay(failpoint, settings=self._settings, **self._options)
        self._everyone.append(child)
        return child

    # ── what happens to it ─────────────────────────────────────────────────────────────────────

    def kill_one(self) -> None:
        """Now and then all at once, so that only the ends of leases help."""
        for _ in range(self._dice.choice((1, 1, 1, len(self._crew)))):
            self._replace(self._dice.randrange(len(self._crew)))

    def _replace(self, place: int, failpoint: str = "") -> Child:
        victim = self._crew[place]
        if victim.code is None:
            self._hit(f"{self.what} killed", victim)
            victim.kill()
        self._crew[place] = self._new(failpoint)
        return self._crew[place]

    def freeze_one(self) -> None:
        """Past its lease, and then let it go on."""
        zombie = self._dice.choice(eventually(self._alive, 30))
        zombie.stop()
        self._thaw(f"{self.what} frozen", zombie)

    def freeze_at(self, point: str) -> None:
        """One that stops itself at a point of its work."""
        while True:
            zombie = self._replace(self._dice.randrange(len(self._crew)), f"{point}=stop@1")
            eventually(zombie.stands_or_ended, 60)
            if zombie.is_stopped():
                return self._thaw(f"{self.what} frozen at {point}", zombie)

    def _thaw(self, what: str, zombie: Child) -> None:
        self._hit(what, zombie)
        time.sleep(self._settings["lease_seconds"] * 1.5)
        zombie.resume()

    def kill_server(self, server: Server) -> None:
        self._hit(f"{type(server).__name__.removesuffix('Server')} killed", *self._crew)
        server.kill()
        time.sleep(self._dice.random())
        server.start()

    def _hit(self, what: str, *victims: Child) -> None:
        self.blows[what] += 1
        self._hits.update(victim.pid for victim in victims)

    def _alive(self) -> list[Child]:
        self.replace_ended()
        return [child for child in self._crew if child.code is None]

    def replace_ended(self) -> None:
        """A supervisor starts anew whoever gave up, as when the database was away at its start.

        Not at once: starting all the time would keep a busy machine from ever getting one started.
        """
        if time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + LEASE
        for place, child in enumerate(self._crew):
            if child.code is not None:
                assert "ConfigurationError" not in child.log, child.log
                self._crew[place] = self._new()

    # ── how it ends ────────────────────────────────────────────────────────────────────────────

    def drain(self) -> None:
        """Heal: what is left is drained, and everybody goes home."""

        def left() -> int:
            self.replace_ended()
            return self.world.tables.waiting()

        try:
            until_none_left(left)
        except AssertionError as error:
            raise AssertionError(together(self._everyone[-9:])[-9000:]) from error
        self.dismiss()
        dead = self.world.tables.dead()
        assert dead == {}, f"random kills bury nothing: {dead}"

    def dismiss(self) -> None:
        """Everybody stops in good order."""
        for child in self._crew:
            child.terminate()
        for child in self._crew:
            # One that was started a moment ago may end before it listens to the signal.
            assert child.wait() in (0, -signal.SIGTERM), child.log

    def judge(self, deliveries: Sequence[Delivery] | None = None) -> str:
        """The verdict, in words; `deliveries` if they are not in the world's own record."""
        for child in self._everyone:
            # Each loss of a lease or a connection is a blow too, whoever dealt it.
            log = child.log
            lanes = -(-log.count("lane.lost") // 16)
            self._hits[child.pid] += lanes + log.count("database.lost")
        history = History(
            disturbed={pid for pid, hits in self._hits.items() if hits},
            blows=self._hits,
            in_flight=self._settings["in_flight_rows"],
        )
        history.read_writer(self.world.writer_log)
        if deliveries is None:
            history.read_deliveries(self.world.record)
        else:
            history.deliveries = list(deliveries)
        history.read_tables(self.world.tables)
        report = check(history)
        assert not report.violations, f"{str(report)[:5000]}\n{together(self._everyone)[-5000:]}"
        first = {delivery.id for delivery in history.deliveries}
        twice = [report.duplicates[pid] for pid in history.disturbed]
        dealt = dealt_out(self.blows)
        return (
            f"{self.world.tables.kind}: {len(history.committed)} committed = {len(first)} delivered"
            f" + {len(history.pending)} pending + {len(history.held)} held"
            f" + {len(history.dead)} dead; 0 lost, 0 invented, 0 out of order.\n"
            f"  {dealt}.\n"
            f"  Delivered twice: {len(history.deliveries) - len(first)} in all; for each of"
            f" {len(twice)} disturbed relays {median(twice or [0]):g} in the middle,"
            f" {max(twice, default=0)} at most."
        )


def dealt_out(blows: Counter[str]) -> str:
    return ", ".join(f"{what} {count} times" for what, count in sorted(blows.items()))


class Progress:
    """How much the writers have committed, read from what they write down."""

    def __init__(self, world: World, messages: int) -> None:
        self.messages = messages
        self._log = world.writer_log
        self._read = 0
        self._count = 0

    def committed(self) -> int:
        if self._log.exists():
            with self._log.open("rb") as log:
                log.seek(self._read)
                text = log.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._read += len(whole)
            for line in whole.splitlines():
                what, *rest = json.loads(line)
                self._count += len(rest[0]) if what == "committed" else 0
        return self._count


def play(
    crew: Crew,
    writers: Sequence[Child],
    messages: int,
    blows: Sequence[Blow],
    beside: Sequence[Crew] = (),
) -> None:
    """Let every blow fall at its part of the writers' work, then heal.

    Writers that ask for leave are one part ahead of the blows, however long those take.
    """
    progress, told, under_load = Progress(crew.world, messages), 0.0, 0
    for number, blow in enumerate(blows, 1):
        due = messages * number // (len(blows) + 1)
        _give_leave(crew.world, (number + 1) / (len(blows) + 1))
        while progress.committed() < due and any(writer.code is None for writer in writers):
            for each in (crew, *beside):
                each.replace_ended()
            time.sleep(0.02)
        if time.monotonic() > told + 5:
            told = time.monotonic()
            _say(f"{progress.committed():,} of {messages:,} committed, blow {number}/{len(blows)}")
        under_load += any(writer.code is None for writer in writers)
        blow()
    assert under_load >= 0.7 * len(blows), f"{under_load} of {len(blows)} blows met load: rest more"
    for writer in writers:
        assert writer.wait(300) == 0, writer.log
    _say("every writer is done; draining what is left")
    crew.drain()


def _give_leave(world: World, share: float) -> None:
    young = world.leave.with_suffix(".new")
    young.write_text(str(share))
    young.replace(world.leave)


def _say(text: str) -> None:
    """For whoever watches a long run (`pytest -s`)."""
    print(text, file=sys.stderr, flush=True)
