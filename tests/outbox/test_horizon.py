"""The safe watermark: whatever happens in whatever order, nothing committed is left behind it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postroom.outbox.rules import Horizon

LANES = 2
ROWS = 3  # small, so that reads are often cut
PHASES, STEPS = 16, 12
ACTIONS = 6  # open, take a position, commit, roll back, one third of a read, one third of a look


@dataclass
class Read:
    lane: int
    after: int
    begun: Mapping[int, int]
    rows: list[int] | None = None
    full: bool = False


@dataclass
class World:
    """Publishers, a relay's reads and its looks, each in steps that may fall between any others."""

    horizon: Horizon
    next_position: int = 1
    next_name: int = 0
    open: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    outbox: set[tuple[int, int]] = field(default_factory=set)
    read: Read | None = None
    mark: Mapping[int, int] | None = None
    answer: list[str] | None = None

    def step(self, action: int, choice: int) -> None:
        if action == 0:
            # The publisher's lock comes first, the position later.
            self.open[f"tx{self.next_name}"] = []
            self.next_name += 1
        elif action == 4:
            self._read(choice)
        elif action == 5:
            self._look()
        elif self.open:
            self._publisher(action, sorted(self.open)[choice % len(self.open)], choice)

    def _publisher(self, action: int, name: str, choice: int) -> None:
        if action == 1:
            self.open[name].append((choice // 4 % LANES, self.next_position))
            self.next_position += 1
            return
        rows = self.open.pop(name)
        if action == 2:
            self.outbox |= set(rows)

    def _read(self, choice: int) -> None:
        read, lane = self.read, choice % LANES
        if read is None:
            self.read = Read(lane, self.horizon.after(lane), self.horizon.begin())
        elif read.rows is None:
            there = sorted(p for where, p in self.outbox if where == read.lane and p > read.after)
            read.rows, read.full = there[:ROWS], len(there) >= ROWS
        else:
            last = read.rows[-1] if read.rows else None
            self.horizon.seen(read.lane, last, read.full, read.begun)
            if choice == 7 and read.rows:
                # The destination was down: they stay, and must be found again.
                self.horizon.rewind(read.lane, read.rows[0])
            else:
                self.outbox -= {(read.lane, position) for position in read.rows}
            self.read = None

    def _look(self) -> None:
        if self.mark is None:
            self.mark = self.horizon.mark()
        elif self.answer is None:
            self.answer = list(self.open)
        else:
            self.horizon.look(self.mark, self.answer)
            self.mark = self.answer = None

    def check(self) -> None:
        under_way = set()
        if self.read and self.read.rows:
            under_way = {(self.read.lane, position) for position in self.read.rows}
        for lane, position in self.outbox - under_way:
            assert position > self.horizon.after(lane), f"{position} of lane {lane} is left behind"


def story(random: Random) -> Iterator[tuple[int, int]]:
    """Steps in phases in which some actors are quick and others nearly stand still.

    Drawn from a seed: of sequences drawn freely, hardly any lets one actor overtake another.
    """
    for _ in range(PHASES):
        weights = [random.expovariate(1) ** 2 for _ in range(ACTIONS)]
        weights[3] /= 4  # few are rolled back
        for action in random.choices(range(ACTIONS), weights, k=STEPS):
            yield action, random.randrange(8)


def explore(make: Callable[[], Horizon], examples: int, *, same: bool = False) -> None:
    @settings(max_examples=examples, deadline=None, database=None, derandomize=same)
    @given(st.integers(0, 2**64))
    def run(seed: int) -> None:
        world = World(make())
        for action, choice in story(Random(seed)):
            world.step(action, choice)
            world.check()

    run()


def test_nothing_committed_is_ever_behind_the_watermark() -> None:
    explore(Horizon, 400)


class LastRead(Horizon):
    def seen(self, lane: int, last: int | None, full: bool, begun: Mapping[int, int]) -> None:
        self.safe[lane] = max(self.safe.get(lane, 0), last or 0)


class ForgetsBegin(Horizon):
    """Takes what is safe when a read returns for what was safe when it began."""

    def seen(self, lane: int, last: int | None, full: bool, begun: Mapping[int, int]) -> None:
        super().seen(lane, last, full, self.begin())


class MarksLate(Horizon):
    """Takes what was seen until the answer came for what was seen before the question."""

    def look(self, mark: Mapping[int, int], open_transactions: Iterable[str]) -> None:
        super().look(self.mark(), open_transactions)


class WaitsForNone(Horizon):
    def look(self, mark: Mapping[int, int], open_transactions: Iterable[str]) -> None:
        super().look(mark, [])


class IgnoresCuts(Horizon):
    def seen(self, lane: int, last: int | None, full: bool, begun: Mapping[int, int]) -> None:
        super().seen(lane, last, False, begun)


@pytest.mark.parametrize("broken", [LastRead, WaitsForNone, IgnoresCuts])
def test_the_check_finds_a_broken_watermark(broken: type[Horizon]) -> None:
    with pytest.raises(AssertionError, match="left behind"):
        explore(broken, 1500, same=True)


OPEN, TAKE, COMMIT, ROLL_BACK, READ, LOOK = range(ACTIONS)
A, B = 0, 1
WHOLE_READ, WHOLE_LOOK = [(READ, 0)] * 3, [(LOOK, 0)] * 3
B_IS_READ_FIRST = [(OPEN, A), (TAKE, A), (OPEN, B), (TAKE, B), (COMMIT, B), *WHOLE_READ]
STORIES: list[tuple[type[Horizon], list[tuple[int, int]]]] = [
    # A's commit and a whole look fall between the snapshot of a read and its return.
    (
        ForgetsBegin,
        [*B_IS_READ_FIRST, *WHOLE_LOOK, (READ, 0), (READ, 0), (COMMIT, A), *WHOLE_LOOK, (READ, 0)],
    ),
    # A and B come, and B is read, while the answer "nobody is open" is on its way.
    (
        MarksLate,
        [(LOOK, 0), (LOOK, 0), *B_IS_READ_FIRST, (LOOK, 0), *WHOLE_LOOK, *WHOLE_READ, (COMMIT, A)],
    ),
]


@pytest.mark.parametrize(("broken", "steps"), STORIES)
def test_rare_interleavings(broken: type[Horizon], steps: list[tuple[int, int]]) -> None:
    def tell(horizon: Horizon) -> None:
        world = World(horizon)
        for action, choice in steps:
            world.step(action, choice)
            world.check()

    tell(Horizon())
    with pytest.raises(AssertionError, match="left behind"):
        tell(broken())


def test_it_moves_when_publishers_are_gone() -> None:
    # A watermark that never moved would be safe too, and useless.
    horizon = Horizon()
    for _ in range(3):
        begun = horizon.begin()
        horizon.seen(3, 40, False, begun)
        horizon.look(horizon.mark(), [])
    assert horizon.after(3) == 40
    assert not horizon.behind


def test_an_open_publisher_keeps_it_where_it_is() -> None:
    horizon = Horizon()
    for _ in range(5):
        horizon.seen(3, 40, False, horizon.begin())
        horizon.look(horizon.mark(), ["7/12"])
    assert horizon.after(3) == 0
    assert horizon.behind
    for _ in range(2):
        horizon.look(horizon.mark(), ["9/1"])
    horizon.seen(3, None, False, horizon.begin())
    assert horizon.after(3) == 40


def test_a_lane_that_was_lost_starts_from_its_beginning() -> None:
    horizon = Horizon()
    for _ in range(3):
        horizon.seen(3, 40, False, horizon.begin())
        horizon.look(horizon.mark(), [])
    horizon.forget(3)
    assert horizon.after(3) == 0
    assert not horizon.behind
