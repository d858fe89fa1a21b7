"""Who works which lane: the rules of `outbox/shares.py`, one look at a time and many together."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.leasing import leased
from postroom.messages import LANES
from postroom.outbox.shares import LaneSeen, Shares, fair_share

WORKERS = ("ada", "bob", "cyd", "dan")
LEASE_SECONDS = 4.0


@given(st.sets(st.uuids().map(str), min_size=1, max_size=LANES + 4))
def test_shares_are_fair_and_use_every_lane_once(workers: set[str]) -> None:
    shares = [fair_share(sorted(workers), me) for me in workers]
    assert sum(shares) == LANES
    assert max(shares) - min(shares) <= 1


def test_a_worker_not_registered_yet_counts_itself() -> None:
    assert fair_share([], "me") == LANES
    assert fair_share(["other"], "me") == LANES // 2


@given(
    st.lists(
        st.tuples(
            st.none() | st.sampled_from(WORKERS), st.booleans(), st.integers(-(10**7), 10**7)
        ),
        min_size=LANES,
        max_size=LANES,
    ),
    st.sets(st.sampled_from(WORKERS)),
)
def test_lanes_are_taken_that_nobody_works_and_no_others(
    found: list[tuple[str | None, bool, int]], seen: set[str]
) -> None:
    lanes = [
        LaneSeen(lane, owner, int(paused), left_us)
        for lane, (owner, paused, left_us) in enumerate(found)
    ]
    holders = {each.owner for each in lanes if each.owner and not each.is_free}
    free = {each.lane for each in lanes if each.is_free and not each.paused}
    for me in sorted(seen | holders):
        mine = [each.lane for each in lanes if each.owner == me and not each.is_free]
        live = seen | {me}
        share = fair_share(live, me)
        shares = Shares(me, LEASE_SECONDS)
        first = shares.look(lanes, seen, working=mine, owned=mine, now=100)
        assert len(first.give_up) == max(len(mine) - share, 0)
        assert set(first.give_up) <= set(mine)
        assert not (first.give_up and first.take)
        assert set(first.take) <= free
        assert len(first.take) == min(len(free), max(share - len(mine), 0))
        ends = [each.left_us for each in lanes if each.owner not in (None, me)]
        later = [left_us / 1e6 for left_us in ends if left_us is not None and left_us >= 0]
        assert first.again_seconds <= min([shares.rest_seconds, *(end + 0.02 for end in later)])
        # Still nobody's: whoever was to have them does not come.
        second = shares.look(lanes, seen, working=mine, owned=mine, now=100.3)
        over = {lane for lane in free if lanes[lane].owner is not None}
        assert over <= set(second.take)
        third = shares.look(lanes, seen, working=mine, owned=mine, now=102)
        assert set(third.take) == free
        if len(third.take) > len(first.take):
            assert not third.give_up


def test_what_is_left_from_before_a_reconnect_is_ones_own() -> None:
    lanes = [
        LaneSeen(lane, "ada" if lane < 2 else None, 0, 5 if lane < 2 else None) for lane in range(3)
    ]
    look = Shares("ada", LEASE_SECONDS).look(lanes, [], working=[0], owned=[0], now=100)
    assert (list(look.give_up), list(look.take)) == ([], [1, 2])


def test_a_lane_that_is_paused_is_not_waited_for() -> None:
    lanes = [LaneSeen(lane, None, 1, None) for lane in range(LANES)]
    shares = Shares("ada", LEASE_SECONDS)
    looks = [shares.look(lanes, [], working=[], owned=[], now=100 + n) for n in range(3)]
    assert [list(look.take) for look in looks] == [[], [], []]
    assert {look.again_seconds for look in looks} == {shares.rest_seconds}


@dataclass(eq=False)
class Worker:
    name: str
    shares: Shares
    next_look: float
    takes_seconds: float  # a look of it
    renewed_at: float = float("-inf")
    stops_at: float | None = None  # it was told to, and works off what it has


@dataclass
class Play:
    """Relays at one table of lanes, with a clock of its own; they come, stop and die as the dice
    say. Some are far from the database, and some are slow to work off what they have."""

    dice: random.Random
    now: float = 0.0
    lanes: dict[int, tuple[str, float] | None] = field(
        default_factory=lambda: dict.fromkeys(range(LANES))
    )
    seen: dict[str, float] = field(default_factory=dict)
    workers: list[Worker] = field(default_factory=list)
    came: int = 0
    moved: int = 0  # lanes given up

    def comes(self, takes_seconds: float = 0.02) -> Worker:
        self.came += 1
        name = f"relay {self.dice.randrange(10**6)} {self.came}"
        self.workers.append(Worker(name, Shares(name, LEASE_SECONDS), self.now, takes_seconds))
        return self.workers[-1]

    def dies(self) -> None:
        self.workers.remove(self.dice.choice(self.workers))

    def stops(self, worker: Worker, seconds: float) -> None:
        """All of its lanes are free but one, which takes so long."""
        worker.stops_at = self.now + seconds
        self.seen.pop(worker.name, None)
        for lane in self.held_by(worker)[1:]:
            self.lanes[lane] = None

    def held_by(self, worker: Worker) -> list[int]:
        return [lane for lane, held in self.lanes.items() if held and held[0] == worker.name]

    def looks(self, worker: Worker) -> None:
        mine, ends = self.held_by(worker), self.now + worker.shares.lease_seconds
        if self.now - worker.renewed_at > worker.shares.lease_seconds / 5:
            worker.renewed_at = self.now
            self.lanes |= dict.fromkeys(mine, (worker.name, ends))
        if worker.stops_at is not None:
            worker.next_look = self.now + 0.1
            if self.now >= worker.stops_at:
                self.lanes |= dict.fromkeys(mine)
                self.workers.remove(worker)
            return
        self.seen[worker.name] = self.now
        lanes = [
            LaneSeen(lane, held and held[0], 0, held and int((held[1] - self.now) * 1e6))
            for lane, held in self.lanes.items()
        ]
        live = [who for who, at in self.seen.items() if self.now - at < worker.shares.seen_seconds]
        look = worker.shares.look(lanes, live, working=mine, owned=mine, now=self.now)
        self.lanes |= dict.fromkeys(look.give_up)
        self.moved += len(look.give_up)
        self.lanes |= dict.fromkeys(look.take, (worker.name, ends))
        takes = worker.takes_seconds * (0.8 + 0.2 * self.dice.random())
        worker.next_look = self.now + look.again_seconds + takes

    def plays(self, until: float) -> float:
        """Look by look; returns for how long a lane was not worked at the longest, since the last
        sign of life of whoever had it."""
        given_up: dict[int, float] = {}
        longest = 0.0
        while self.workers:
            worker = min(self.workers, key=lambda each: each.next_look)
            if worker.next_look > until:
                break
            self.now = worker.next_look
            self.looks(worker)
            for lane, held in self.lanes.items():
                if held is None:
                    begun = given_up.setdefault(lane, self.now)
                else:
                    given_up.pop(lane, None)
                    begun = held[1] - leased(LEASE_SECONDS) if held[1] < self.now else self.now
                longest = max(longest, self.now - begun)
        self.now = until
        return longest

    def is_fair(self) -> bool:
        names = [worker.name for worker in self.workers]
        return all(len(self.held_by(w)) == fair_share(names, w.name) for w in self.workers)


@pytest.mark.parametrize("seed", range(40))
def test_no_lane_waits_longer_than_a_lease_whoever_has_died(seed: int) -> None:
    """However many have died, and however shortly before."""
    play = Play(random.Random(seed))
    for _ in range(3):
        play.comes()
    play.plays(until=10)
    for _ in range(60):
        if len(play.workers) > 1 and play.dice.random() < 0.5:
            play.dies()
        elif len(play.workers) < 5:
            play.comes()
        assert play.plays(until=play.now + play.dice.choice([0.1, 0.5, 1, 3])) < LEASE_SECONDS
    play.plays(until=play.now + 3 * LEASE_SECONDS)
    moved = play.moved
    play.plays(until=play.now + 3 * LEASE_SECONDS)
    assert play.moved == moved, "once nobody comes or dies, lanes stay where they are"
    assert play.is_fair()


def test_nothing_is_left_to_one_who_stops() -> None:
    play = Play(random.Random(1))
    one, other = play.comes(), play.comes()
    play.plays(until=10)
    assert play.is_fair()
    moved = play.moved
    play.stops(one, seconds=20)
    assert play.plays(until=25) < 2
    assert len(play.held_by(other)) == LANES - 1
    assert play.moved == moved


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("takes_seconds", [0.02, 0.3, 0.6, 0.9, 1.2, 1.5])
def test_whoever_is_slow_to_come_has_its_share(takes_seconds: float, seed: int) -> None:
    play = Play(random.Random(seed))
    play.comes()
    play.plays(until=10)
    play.comes(takes_seconds)
    assert play.plays(until=20) < 0.2 + takes_seconds
    assert play.is_fair()
    assert play.moved == LANES // 2


def test_lanes_do_not_go_to_and_fro_because_of_the_dead() -> None:
    play = Play(random.Random(1))
    first, other = play.comes(), play.comes()
    play.plays(until=10)
    moved = play.moved
    play.workers.remove(first)
    play.plays(until=12.5)
    ghost = play.comes()  # was seen, and is gone before the lease of the first is over
    play.looks(ghost)
    play.workers.remove(ghost)
    assert play.plays(until=30) < LEASE_SECONDS
    assert len(play.held_by(other)) == LANES
    assert play.moved == moved


def test_it_is_quiet_where_there_are_more_relays_than_lanes() -> None:
    play = Play(random.Random(1))
    for _ in range(LANES + 4):
        play.comes()
    play.plays(until=10)
    moved = play.moved
    play.plays(until=30)
    assert play.is_fair()
    assert play.moved == moved
