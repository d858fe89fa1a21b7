"""Who works which lane: the rules of `outbox/shares.py`, one look at a time and many together."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.leasing import LEASED
from postroom.messages import LANES
from postroom.outbox.shares import LaneSeen, Shares, fair_share

WORKERS = ("ada", "bob", "cyd", "dan")
LEASE_SECONDS = 4.0
WRITING_SECONDS = 0.02  # what a look takes at the most, in the play below


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
        shares = Shares(me, LEASE_SECONDS)
        first = shares.look(lanes, seen, working=mine, owned=mine, now=100)
        share = fair_share(sorted(seen | holders), me)
        assert len(mine) - len(first.give_up) == min(len(mine), share)
        assert not (first.give_up and first.take)
        assert set(first.take) <= free
        assert len(first.take) == min(len(free), max(share - len(mine), 0))
        ends = [each.left_us for each in lanes if each.owner not in (None, me)]
        later = [left_us / 1e6 for left_us in ends if left_us is not None and left_us >= 0]
        assert first.again_seconds <= min([shares.rest_seconds, *(end + 0.02 for end in later)])
        # Still nobody's: whoever was to have them does not come.
        second = shares.look(lanes, seen, working=mine, owned=mine, now=101)
        assert set(second.take) == free
        if second.take and len(second.take) > len(first.take):
            assert not second.give_up


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


@dataclass
class Worker:
    name: str
    shares: Shares
    next_look: float
    renewed_at: float = float("-inf")


@dataclass
class Play:
    """Relays at one table of lanes, with a clock of its own; they come and die as the dice say."""

    dice: random.Random
    now: float = 0.0
    lanes: dict[int, tuple[str, float] | None] = field(
        default_factory=lambda: dict.fromkeys(range(LANES))
    )
    seen: dict[str, float] = field(default_factory=dict)
    workers: list[Worker] = field(default_factory=list)
    came: int = 0
    moved: int = 0  # lanes given up

    def comes(self) -> None:
        self.came += 1
        name = f"relay {self.dice.randrange(10**6)} {self.came}"
        self.workers.append(Worker(name, Shares(name, LEASE_SECONDS), self.now))

    def dies(self) -> None:
        self.workers.remove(self.dice.choice(self.workers))

    def looks(self, worker: Worker) -> None:
        mine = [lane for lane, held in self.lanes.items() if held and held[0] == worker.name]
        if self.now - worker.renewed_at > worker.shares.lease_seconds / 5:
            worker.renewed_at = self.now
            for lane in mine:
                self.lanes[lane] = (worker.name, self.now + worker.shares.lease_seconds)
        self.seen[worker.name] = self.now
        lanes = [
            LaneSeen(lane, held and held[0], 0, held and int((held[1] - self.now) * 1e6))
            for lane, held in self.lanes.items()
        ]
        live = [who for who, at in self.seen.items() if self.now - at < worker.shares.seen_seconds]
        look = worker.shares.look(lanes, live, working=mine, owned=mine, now=self.now)
        for lane in look.give_up:
            self.lanes[lane] = None
        self.moved += len(look.give_up)
        for lane in look.take:
            self.lanes[lane] = (worker.name, self.now + worker.shares.lease_seconds)
        worker.next_look = self.now + look.again_seconds + self.dice.random() * WRITING_SECONDS

    def alone(self) -> dict[int, float]:
        """The lanes that nobody works: since now, or since a lease was over."""
        return {
            lane: held[1] if held else self.now
            for lane, held in self.lanes.items()
            if held is None or held[1] < self.now
        }

    def plays(self, until: float) -> dict[int, float]:
        """Look by look; returns how long each lane was nobody's at the longest."""
        since: dict[int, float] = {}
        longest = dict.fromkeys(range(LANES), 0.0)
        while self.workers:
            worker = min(self.workers, key=lambda each: each.next_look)
            if worker.next_look > until:
                break
            self.now = worker.next_look
            self.looks(worker)
            alone = self.alone()
            since = {lane: since.get(lane, begun) for lane, begun in alone.items()}
            for lane, begun in since.items():
                longest[lane] = max(longest[lane], self.now - begun)
        self.now = until
        return longest


@pytest.mark.parametrize("seed", range(40))
def test_no_lane_is_left_alone_whoever_has_died(seed: int) -> None:
    """However many have died, and however shortly before: whoever lives takes what is nobody's,
    within the rest of `lease_seconds`."""
    play = Play(random.Random(seed))
    for _ in range(3):
        play.comes()
    play.plays(until=10)
    for _ in range(60):
        if len(play.workers) > 1 and play.dice.random() < 0.5:
            play.dies()
        elif len(play.workers) < 5:
            play.comes()
        longest = play.plays(until=play.now + play.dice.choice([0.1, 0.5, 1, 3]))
        assert max(longest.values()) < (1 - LEASED) * LEASE_SECONDS
    play.plays(until=play.now + 3 * LEASE_SECONDS)
    moved = play.moved
    play.plays(until=play.now + 3 * LEASE_SECONDS)
    assert play.moved == moved, "once nobody comes or dies, lanes stay where they are"
    names = [worker.name for worker in play.workers]
    held = [held and held[0] for held in play.lanes.values()]
    assert {name: held.count(name) for name in names} == {
        name: fair_share(names, name) for name in names
    }
