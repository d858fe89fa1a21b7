"""Bugs on purpose, each one that a relay or its SQL could have; every one must be found."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from postroom.brokers.base import Outcome, Transient, Unknown
from postroom.messages import Message
from postroom.outbox import lane, office, rules, sending
from postroom.outbox.rules import SETTLED, Horizon, Settled, Verdict
from postroom.outbox.store import Fence

from .size import SMALL, Size
from .tables import LANES, LaneRow, Row, Values
from .view import View
from .world import Living, World


@dataclass(frozen=True)
class Bug:
    """A bug, and what its traces look like."""

    shows: tuple[str, ...]
    view: type[View] = View
    world: type[World] = World
    plant: Callable[[], Any] = nullcontext
    size: Size = SMALL


# Relays are told to stop, and nothing worse befalls anybody.
HURRIED = Size(transactions=8, troubles=("stop",), latency_seconds=0.1)


class NoFence(View):
    """Settles whoever asks, even after a take-over."""

    def fence(self, values: Values) -> list[tuple[int]]:
        return [(number % LANES,) for number in values["fence_list"]]

    def settle_deleted(self, values: Values) -> list[tuple[Any, ...]]:
        gone = self.outbox_delete(values)
        self.journal_clear(values)
        return [(number % LANES, gone[0][0]) for number in values["fence_list"]]

    def settle_archived(self, values: Values) -> list[tuple[Any, ...]]:
        self.outbox_archive(values)
        return self.settle_deleted(values)


class ApplicationClock(View):
    """Leases are measured by the clock of whoever asks."""

    def _its_now(self) -> float:
        return self.now() + self.asker.skew_seconds

    def is_free(self, row: LaneRow, values: Values) -> bool:
        return row.owner is None or (row.lease_until or 0) < self._its_now()

    def lease_end(self, values: Values) -> float:
        return self._its_now() + float(values["lease_us"]) / 1e6


class ForgetsHeld(View):
    """A read does not look whether the key is held."""

    def key_is_held(self, row: Row) -> bool:
        return False


class PrunesAll(View):
    """What is old goes, and what is not old too."""

    def prune_dedup(self, values: Values) -> list[tuple[Any, ...]]:
        return super().prune_dedup({**values, "keep_seconds": 0})


class KeepsJournal(View):
    """What was sent and settled stands in the journal for ever."""

    def journal_clear(self, values: Values) -> None:
        pass

    def journal_clear_all(self, values: Values) -> None:
        pass


class LastRead(Horizon):
    """The watermark stands at the last position that was read."""

    def seen(self, lane: int, last: int | None, full: bool, begun: Mapping[int, int]) -> None:
        super().seen(lane, last, full, begun)
        self.safe[lane] = max(self.safe.get(lane, 0), last or 0)


class ExitsAtOnce(World):
    """SIGTERM ends the process as SIGKILL does."""

    def stop(self, living: Living) -> None:
        self._kill(living)


async def _settle_first(self: Any, wave: list[Message]) -> None:
    wave = [message for message in wave if message.order not in self._stopped]
    if wave:
        self._change.delivered += wave
        await self._flush()
        await self.desk.sender.send(wave, epoch=self.lane.fence.epoch, may_send=self.lane.may_send)


@contextmanager
def _whole_batch() -> Iterator[None]:
    send = sending.Sender.send

    async def generous(self: Any, wave: Sequence[Message], **how: Any) -> list[Verdict]:
        verdicts = await send(self, wave, **how)
        if any(isinstance(answer, Settled) for answer in verdicts):
            return [SETTLED] * len(verdicts)
        return verdicts

    with patch.object(sending.Sender, "send", generous):
        yield


def _blames_the_message(outcome: Outcome, *rest: Any) -> Verdict:
    if isinstance(outcome, Transient | Unknown):
        outcome = replace(outcome, down=None)
    return rules.verdict(outcome, *rest)


async def _keeps_its_lanes(self: Any, fences: Sequence[Fence]) -> None:
    pass


@contextmanager
def _impatient() -> Iterator[None]:
    hand_over = office.Office._hand_everything_over

    async def at_once(self: Any, *keepers: Any) -> None:
        self.settings = replace(self.settings, grace_seconds=0)
        await hand_over(self, *keepers)

    with patch.object(office.Office, "_hand_everything_over", at_once):
        yield


BUGS = {
    "no fence": Bug(
        ("wrote into a lane of another",),
        view=NoFence,
        size=Size(
            12,
            writers=5,
            transactions=8,
            gap_seconds=1.5,
            relays=3,
            pause_seconds=2,
            troubles=("freeze",),
            refuses=0.4,
            latency_seconds=0.2,
            settings={"batch_rows": 1},
        ),
    ),
    "watermark at the last position read": Bug(
        ("passed", "had been passed", "not drained"),
        plant=lambda: patch.object(office, "Horizon", LastRead),
    ),
    "settled before the receipt": Bug(
        ("lost",), plant=lambda: patch.object(lane._Batch, "_send_wave", _settle_first)
    ),
    "whole batch settled": Bug(("lost",), plant=_whole_batch),
    "clock of the application": Bug(("not drained", "came twice"), view=ApplicationClock),
    "pruned too early": Bug(("is gone",), view=PrunesAll),
    "held key not held": Bug(("passed",), view=ForgetsHeld),
    "attempts spent on an outage": Bug(
        ("died of", "attempts"),
        plant=lambda: patch.object(sending, "verdict", _blames_the_message),
    ),
    "exit at SIGTERM": Bug(
        ("came twice",),
        world=ExitsAtOnce,
        size=HURRIED,
    ),
    "lanes not given back": Bug(
        ("stopped and left lanes",),
        plant=lambda: patch.object(office.Office, "_release", _keeps_its_lanes),
    ),
    "journal not cleared": Bug(
        ("stopped and left the journal",),
        view=KeepsJournal,
        size=HURRIED,
    ),
    "grace not waited for": Bug(("stopped and left lanes",), plant=_impatient, size=HURRIED),
}
