"""Kills at every point a program passes: first learn the points, then fail at each in turn."""

import os
import queue
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from worlds import World

T = TypeVar("T")

WORLDS = 6
OFTEN = 30
TOGETHER = 4


def tell(kind: str, begun: float, runs: int, what: str, ends: Counter[str]) -> None:
    """Print how the runs of a sweep ended."""
    print(f"{kind}: {what}, {runs} runs, {time.perf_counter() - begun:.0f} s")
    for end, count in sorted(ends.items()):
        print(f"  {count:4} {end}")


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
        return ";".join(f"{point}={self.action.split()[0]}@{self.at}" for point in self.points)

    def __str__(self) -> str:
        return self.failpoints

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
    """Errors before the effect and after it, at the first pass of every point."""
    for end in ("before", "after"):
        ours = [point for point in points if point.endswith(end)]
        # What fails at the start ends the relay: it says so instead of trying for ever.
        fatal = sorted(p for p in ours if p.startswith(("relay.", "sql.meta_", "link.")))
        survived = sorted(set(ours) - set(fatal))
        for point in fatal:
            yield Case(f"error {end}", (point,))
        if full_size():
            for point in survived:
                for at in sorted({1, 2, points[point]}):
                    if at <= points[point]:
                        yield Case(f"error {end}", (point,), at)
        else:
            for group in together(survived):
                yield Case(f"error {end}", tuple(group))


def share(cases: Sequence[Case], kind: str, seed: str) -> Sequence[Case]:
    """All of them at full size; every day each second one on PostgreSQL and each fourth on the
    others, by the seed."""
    if full_size():
        return cases
    return random.Random(seed).sample(cases, len(cases) // (2 if kind == "postgresql" else 4))


def together(things: Sequence[T]) -> list[Sequence[T]]:
    """A run has several faults, where a relay lives on after each; neighbours are kept apart."""
    groups = -(-len(things) // TOGETHER)
    return [things[number::groups] for number in range(groups)]


def sweep(
    make: Callable[[], World], chosen: Sequence[T], run: Callable[[World, T], str]
) -> Counter[str]:
    """Run all cases, several at a time, each in an empty world; returns how they ended."""
    worlds: queue.Queue[World] = queue.Queue()
    for _ in range(min(WORLDS, len(chosen))):
        worlds.put(make())

    def one(case: T) -> str:
        world = worlds.get()
        try:
            world.clear()
            return run(world, case)
        except Exception as error:
            logs = "\n".join(child.log for child in world.children)
            left = {table: rows for table, rows in world.tables.content().items() if rows}
            raise AssertionError(f"{case}: {error}\n{left}\n{logs}") from error
        finally:
            worlds.put(world)

    with ThreadPoolExecutor(WORLDS) as threads:
        futures = [threads.submit(one, case) for case in chosen]
        failures = [str(error) for future in futures if (error := future.exception())]
    assert not failures, f"{len(failures)} of {len(chosen)}:\n" + "\n\n".join(failures)[:20_000]
    return Counter(future.result() for future in futures)
