"""Kills at every point a program passes: first learn the points, then fail at each in turn."""

import os
import queue
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from worlds import World

WORLDS = 6
OFTEN = 30
TOGETHER = 4


def full_size() -> bool:
    return os.environ.get("POSTROOM_SWEEP") == "full"


@dataclass(frozen=True)
class Case:
    """What goes wrong, and at which pass of which points."""

    action: str
    points: tuple[str, ...]
    at: int = 1

    @property
    def failpoints(self) -> str:
        return ";".join(f"{point}={self.action}@{self.at}" for point in self.points)

    @property
    def certain(self) -> bool:
        """Whether every run comes so far; the later passes depend on who is faster."""
        return self.at == 1


def learn(path: Path) -> Counter[str]:
    return Counter(path.read_text().split())


def kills(points: Counter[str]) -> Iterator[Case]:
    """The first pass of every point; of those passed often also the second and the last."""
    for point, passes in sorted(points.items()):
        wanted = [1]
        if full_size():
            wanted += [2, 3, passes // 2, passes]
        elif passes > OFTEN:
            wanted += [2, passes]
        for at in sorted({at for at in wanted if 1 <= at <= passes}):
            yield Case("kill", (point,), at)


def errors(points: Counter[str]) -> Iterator[Case]:
    """The first pass of every point. A run has several, where a relay lives on after each."""
    # What fails at the start ends the relay: it says so instead of trying for ever.
    fatal = sorted(point for point in points if point.startswith(("relay.", "sql.meta_")))
    survived = sorted(points.keys() - fatal)
    groups = len(survived) if full_size() else -(-len(survived) // TOGETHER)
    for point in fatal:
        yield Case("error", (point,))
    for number in range(groups):
        yield Case("error", tuple(survived[number::groups]))


def sweep(
    make: Callable[[], World], chosen: list[Case], run: Callable[[World, Case], str]
) -> Counter[str]:
    """Run all cases, several at a time, each in an empty world; returns how they ended."""
    worlds: queue.Queue[World] = queue.Queue()
    for _ in range(WORLDS):
        worlds.put(make())

    def one(case: Case) -> str:
        world = worlds.get()
        try:
            world.clear()
            return run(world, case)
        except Exception as error:
            logs = "\n".join(child.log for child in world.children)
            raise AssertionError(f"{case.failpoints}: {error}\n{logs}") from error
        finally:
            worlds.put(world)

    with ThreadPoolExecutor(WORLDS) as threads:
        futures = [threads.submit(one, case) for case in chosen]
        failures = [str(error) for future in futures if (error := future.exception())]
    assert not failures, f"{len(failures)} of {len(chosen)}:\n" + "\n\n".join(failures)[:20_000]
    return Counter(future.result() for future in futures)
