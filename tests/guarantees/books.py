"""Consumers that keep books: every message is one row, and the rows tell what came of all of it."""

import asyncio
import logging
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from chaos import Crew
from history import History
from nursery import Child
from sqlalchemy import text
from worlds import World, together

from helpers import until_none_left
from postroom import Consumer
from postroom.errors import PostroomError

GONE = 3
# No constraint keeps an effect from being there twice, or too early.
TABLE = "CREATE TABLE effect (seq BIGSERIAL PRIMARY KEY, id VARCHAR(36), k VARCHAR(50), n BIGINT)"
ENTRY = text("INSERT INTO effect (id, k, n) VALUES (:id, :k, :n)")


def bookkeeper(url: str, *, broker: str, topic: str) -> int:
    """Consume until SIGTERM: one row in the table `effect` for each message."""
    from postroom.inbox import store

    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    store.LEASE_SECONDS = 2.0  # after so long another tries what a dead process was about to
    books = Consumer(
        "books",
        url,
        broker,
        topics=[topic],
        gives="session",
        poll_seconds=0.2,
        grace_seconds=5,
        stuck_seconds=5,
    )

    @books.on("fact")
    async def enter(fact: Any, tx: Any, received: Any) -> None:
        await tx.execute(ENTRY, {"id": received.id, "k": received.key, "n": fact["n"]})

    async def run() -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, books.stop)
        await books.run()

    try:
        asyncio.run(run())
    except PostroomError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        return GONE
    return 0


class Bookkeepers(Crew):
    """Consumers under a supervisor."""

    what = "consumer"

    def __init__(self, world: World, consumers: int, seed: str, **options: Any) -> None:
        world.tables.query(TABLE)
        super().__init__(world, consumers, seed, **options)

    def _new(self, failpoint: str = "") -> Child:
        environment = {"POSTROOM_FAILPOINTS": failpoint} if failpoint else {}
        child = self.world._start("bookkeeper", environment, **self._options)
        self._everyone.append(child)
        return child

    def ready(self) -> bool:
        """Whether each has subscribed."""
        self.replace_ended()
        return all(child.wrote("consumer.started") for child in self._crew)

    def effects(self) -> list[tuple[str, str, int]]:
        rows = self.world.tables.query("SELECT id, k, n FROM effect ORDER BY seq")
        return [(str(id), str(key), int(n)) for id, key, n in rows]

    def finish(self) -> None:
        """Wait until every committed fact has its effect, then send everybody home."""
        history = self._history()

        def left() -> int:
            self.replace_ended()
            ((rows,),) = self.world.tables.query("SELECT COUNT(*) FROM effect")
            ((held,),) = self.world.tables.query("SELECT COUNT(*) FROM {p}inbox_held")
            return max(len(history.committed) - int(rows), 0) + int(held)

        try:
            until_none_left(left)
        except AssertionError as error:
            lost = history.committed.keys() - {id for id, _, _ in self.effects()}
            logs = together(self._everyone[-9:])[-9000:]
            raise AssertionError(
                f"{len(lost)} without an effect: {sorted(lost)[:5]}\n{logs}"
            ) from error
        self.dismiss()

    def _history(self) -> History:
        history = History()
        history.read_writer(self.world.writer_log)
        history.read_tables(self.world.tables)
        return history

    def judge_effects(self) -> str:
        """Each committed fact has one effect, in the order of its key; in words."""
        committed, effects = self._history().committed, self.effects()
        times = Counter(id for id, _, _ in effects)
        violations = [f"lost: {committed[id]}" for id in committed.keys() - times.keys()]
        violations += [f"invented: {id}" for id in times.keys() - committed.keys()]
        violations += [f"applied {count} times: {id}" for id, count in times.items() if count > 1]
        violations += _out_of_order(effects)
        assert self.world.tables.dead() == {}, "random kills bury nothing"
        assert not violations, "\n".join(violations)[:5000] + together(self._everyone)[-5000:]
        return (
            f"{len(committed)} committed = {len(effects)} applied, each once; 0 lost, 0 invented, "
            "0 out of order"
        )


def _out_of_order(effects: Sequence[tuple[str, str, int]]) -> list[str]:
    last: dict[str, int] = {}
    found = []
    for id, key, n in effects:
        if n < last.get(key, 0):
            found.append(f"out of order: {id}, {n} of {key} after {last[key]}")
        last[key] = n
    return found
