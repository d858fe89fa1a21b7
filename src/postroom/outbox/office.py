"""One connected life of a relay: its links, its lanes, and what they share.

An office is opened, works, and is closed for good; a relay that lost its database opens another.
Nothing an office knew outlives it, so nothing stale can.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from asyncio import FIRST_COMPLETED
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from postroom import failpoints, signals
from postroom.databases.database import DatabaseLost, WorkerLink
from postroom.errors import PostroomError
from postroom.messages import LANES, Message
from postroom.outbox import telling, wake
from postroom.outbox.admission import check_routes, check_schema
from postroom.outbox.housekeeping import Housekeeper
from postroom.outbox.lane import Lane, LaneLost
from postroom.outbox.rules import Horizon, Leftover
from postroom.outbox.settling import answered
from postroom.outbox.shares import LaneSeen, Shares
from postroom.outbox.store import ROOM, Ask, Change, Entry, Fence, Store
from postroom.outbox.together import Budget, Gate, Pulse, Together
from postroom.outbox.watch import COUNT_LIMIT, Watch
from postroom.worker import version
from postroom.worker.waiting import finish, pause, undisturbed

if TYPE_CHECKING:
    from postroom.outbox.relay import Relay

__all__ = ["Office"]

KIND = "relay"
# At the end of the grace a statement may be under way, and a relay has its last word to say.
GOODBYE_SECONDS = 2.0
# For what keeps house, once the lanes are given back: nothing is lost if it is cut short.
HOUSE_SECONDS = 1.0


class Office:
    """One connected life of a relay: its links, its lanes, and what they share (see lane.Desk)."""

    def __init__(self, relay: Relay) -> None:
        settings = relay.settings
        self.relay = relay
        self.settings = settings
        self.owner = relay.owner
        self.sender = relay.sender
        self.tally = relay.tally
        self.settling = relay.settling
        self.settling.reopen()
        self.horizon = Horizon()
        self.gate = Gate()
        self.budget = Budget(settings)
        self.pulse = Pulse(settings.poll_min_seconds, settings.poll_max_seconds)
        self.batch_rows = settings.batch_rows
        self.batch_bytes = settings.batch_bytes
        self.rescan_seconds = settings.rescan_seconds
        self.margin_seconds = settings.send_timeout_seconds + 1.0
        self.holds_key = settings.on_dead == "hold"
        self.safe_reads = relay.database.dialect == "postgresql"
        self.lived = False
        self._store = Store(
            relay.database.dialect, relay.owner, archive=settings.keep_delivered_seconds > 0
        )
        self._links: list[WorkerLink] = []
        self._reads = Together(self._serve_reads, lambda: self.pulse.share(self.budget.rows))
        self._journals = Together(self._serve_journals)
        self._settles = Together(self._serve_settles)
        self._lanes: dict[int, tuple[Lane, asyncio.Task[None]]] = {}
        self._batch = int(time.time() * 1000) << 20
        self._shares = Shares(relay.owner, settings.lease_seconds)
        self.lease_seconds = self._shares.lease_seconds
        self._lease = {"lease_us": int(self.lease_seconds * 1e6)}
        self._looked_at = 0.0
        self._turn = 0
        self._renewed_at = self._beaten_at = float("-inf")
        self._clock_us = 0  # how far the database's clock is ahead of ours

    # ── opening and closing ────────────────────────────────────────────────────────────────────

    async def open(self) -> None:
        """Connect, and check that schema and routes are what this relay was made for."""
        for _ in range(4):
            self._links.append(await self._connect())
        self._reader, self._writer, self._control, self._house = self._links
        await check_schema(self._control)
        await check_routes(self._control, self.relay)
        await self._store.clear_journal(self._control, keep=self.sender.unsettled())
        keep = str(int(self.settings.keep_delivered_seconds))
        await self._control.query(ROOM, "meta_write", item="keep_delivered_seconds", value=keep)
        await self._set_clock()

    async def _connect(self) -> WorkerLink:
        return await self.relay.database.connect(idle_seconds=self.lease_seconds / 3)

    async def close(self) -> None:
        """Drop everything; what was not settled will be read again by whoever owns the lane."""
        await finish(self._close())  # a link that is not closed may hold a lock

    async def finish_sends(self) -> None:
        """Await the answers to sends in flight; the lanes cannot settle, and keep the receipts."""
        self.stop_lanes()
        for link in self._links:
            link.lost = True
        await answered(
            [lane for lane, _ in self._lanes.values()],
            within_seconds=min(self.margin_seconds, self.settings.grace_seconds),
        )

    async def _close(self) -> None:
        tasks = [task for _, task in self._lanes.values()]
        self._lanes.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for together in (self._reads, self._journals, self._settles):
            await together.close()
        for link in self._links:
            await link.close()

    # ── working ────────────────────────────────────────────────────────────────────────────────

    async def work(self, stopping: asyncio.Event) -> None:
        """Own lanes and keep house until told to stop; then hand over cleanly."""
        loop = asyncio.get_running_loop()

        def hint() -> None:
            loop.call_soon_threadsafe(self.pulse.hint)

        unlisten = wake.listen(hint)
        keepers: list[asyncio.Task[Any]] = [
            asyncio.create_task(self._keep_lanes(stopping), name="keep lanes"),
            asyncio.create_task(Housekeeper(self).keep(stopping), name="keep house"),
            asyncio.create_task(Watch(self).keep(stopping), name="watch"),
        ]
        links = {"keep lanes": lambda: self._control}
        for task in keepers:
            self.relay.vitals.add(task, links.get(task.get_name(), lambda: self._house))
        if self.relay.listener is not None:
            listening = self.relay.listener.run(self.pulse.hint)
            keepers.append(asyncio.create_task(listening, name="listen"))
        stop = asyncio.create_task(stopping.wait())
        try:
            await asyncio.wait([stop, *keepers], return_when=FIRST_COMPLETED)
            if stopping.is_set():
                self.relay.vitals.forget(keepers)
                await self._leave(*keepers[:3])
            for task in keepers:
                if task.done() and not task.cancelled():
                    task.result()
            if not stopping.is_set():
                raise RuntimeError("a background task of the relay was ended from outside")
        finally:
            unlisten()
            self.relay.vitals.forget(keepers)
            for task in [stop, *keepers]:
                task.cancel()
            await asyncio.gather(stop, *keepers, return_exceptions=True)

    async def drain(self) -> int:
        """Work every free lane until nothing is due; returns how many lanes others own."""
        if self._store.archive:  # it may be the only relay there is: who else makes room for today?
            await self._control.query(ROOM, "archive_days")
        lanes, begun = list(range(LANES)), time.monotonic()
        await self._control.query(ROOM, "lanes_cap", **self._lease)
        fences = await self._store.take_lanes(self._control, lanes, self.lease_seconds)
        ends = begun + self.lease_seconds
        while await self._store.promote(self._control, fences, self.batch_rows):
            pass
        for fence in fences:
            lane = Lane(self, fence, ends)
            self._lanes[fence.lane] = (lane, asyncio.create_task(lane.run(once=True)))
        while tasks := [task for _, task in self._lanes.values()]:
            if self.relay.stopping.is_set():
                self.stop_lanes()
            await asyncio.wait(
                tasks, timeout=min(0.5, self.lease_seconds / 4), return_when=FIRST_COMPLETED
            )
            self._reap()
            if time.monotonic() - begun > self.lease_seconds / 5:
                begun = time.monotonic()
                await self._renew()
        await self._release(fences)
        return LANES - len(fences)

    async def waiting_topics(self) -> dict[str, int]:
        """Count the messages that wait for delivery, by topic, up to a limit."""
        rows = await self._control.query(ROOM, "waiting_topics", most=COUNT_LIMIT)
        return {str(topic): int(count) for topic, count in rows}

    async def _keep_lanes(self, stopping: asyncio.Event) -> None:
        """Stay registered, keep the leases, and keep to a fair share."""
        while not stopping.is_set():
            self.relay.vitals.beat("keep lanes")
            if time.monotonic() - self._renewed_at > self.lease_seconds / 5:
                await self._set_clock()
                await self._renew()
            if time.monotonic() - self._beaten_at >= self._shares.rest_seconds / 2:
                await self._beat()
            again_seconds = await self._share()
            await self._notice()
            self._reap()
            # Whoever cannot settle has not lived: its pauses grow.
            self.lived = self.lived or not self.settling.in_doubt
            await pause(stopping, again_seconds)

    async def _beat(self) -> None:
        """Say that this relay lives, and what it does: one small row, about once a second."""
        self._beaten_at = time.monotonic()
        said = {"at": time.time(), "version": version(), **self.relay.report()}
        row = {"incarnation": self.owner, "kind": KIND, "worker_name": self.relay.name}
        await self._control.query(ROOM, "worker_beat", **row, report=json.dumps(said))

    async def _renew(self) -> None:
        # Measured from before the renewal was sent: the lease cannot end earlier than we think.
        begun = time.monotonic()
        rows = await self._control.query(ROOM, "lanes_renew", owner=self.owner, **self._lease)
        self._renewed_at = begun
        ours = {lane: epoch for lane, epoch, _ in rows}
        for number, (lane, task) in list(self._lanes.items()):
            if task.done():
                continue  # given back already, and not reaped yet
            if ours.get(number) == lane.fence.epoch:
                lane.lease_ends = begun + self.lease_seconds
            elif not lane.over:
                await self._drop(number, "another relay took it over")
        # Left from before a reconnect: renewed for ever and worked by nobody, unless given back.
        stray = [Fence(lane, epoch) for lane, epoch, _ in rows if lane not in self._lanes]
        if stray:
            await self._release(stray)

    async def _share(self) -> float:
        """Keep to a fair share of the lanes; returns the seconds until the next look."""
        lanes = [LaneSeen(*row) for row in await self._control.query(ROOM, "lanes_state")]
        if any(each.outlasts(self._lease["lease_us"]) for each in lanes):
            await self._control.query(ROOM, "lanes_cap", **self._lease)
        seen_us = int(self._shares.seen_seconds * 1e6)
        seen = await self._control.query(ROOM, "workers_live", kind=KIND, within_us=seen_us)
        look = self._shares.look(
            lanes,
            [who for (who,) in seen],
            working=[number for number, (lane, _) in self._lanes.items() if not lane.stopping],
            owned=self._lanes,
            now=time.monotonic(),
        )
        for number in look.give_up:
            self._lanes[number][0].stop()
        if look.take and not self.relay.stopping.is_set():
            await self._take(look.take)
        return look.again_seconds

    async def _notice(self) -> None:
        """An operator may have paused a lane, or put a redriven message where there was none."""
        if self._lanes:
            rows = await self._control.query(ROOM, "lanes_notice", lane_list=list(self._lanes))
            for number, paused, any_held in rows:
                lane = self._lanes[number][0]
                lane.paused = bool(paused)
                lane.any_held = lane.any_held or bool(any_held)

    async def _take(self, lanes: Sequence[int]) -> None:
        begun = time.monotonic()
        fences = await self._store.take_lanes(self._control, lanes, self.lease_seconds)
        # The first one is the probe, and is another lane each time.
        for fence in sorted(fences, key=lambda fence: (fence.lane + fence.epoch) % LANES):
            self.horizon.forget(fence.lane)
            lane = Lane(self, fence, begun + self.lease_seconds)
            lane.stopping = self.relay.stopping.is_set()  # it was told meanwhile
            self._lanes[fence.lane] = (lane, asyncio.create_task(self._run_lane(lane)))
        telling.acquired(fences, self.owner)

    async def _run_lane(self, lane: Lane) -> None:
        """Work a lane until it is told to stop, then give it back."""
        await lane.run()
        lane.over = True
        await self._release([lane.fence])

    def _reap(self) -> None:
        """Lanes that ended: handed over, lost, or failed; a failure ends this office."""
        released: list[Fence] = []
        for number, (lane, task) in list(self._lanes.items()):
            if not task.done():
                continue
            del self._lanes[number]
            error = task.exception()
            if isinstance(error, LaneLost):
                self._lost(lane, str(error))
            elif error is not None:
                raise error
            elif lane.over:
                released.append(lane.fence)
        telling.released(released, self.owner)

    async def _drop(self, number: int, reason: str) -> None:
        lane, task = self._lanes.pop(number)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self._lost(lane, reason)

    def _lost(self, lane: Lane, reason: str) -> None:
        self.horizon.forget(lane.fence.lane)
        self.budget.give(lane.fence.lane)
        telling.lost(lane.fence, self.owner, reason)

    async def _release(self, fences: Sequence[Fence]) -> None:
        failpoints.hit("relay.release.before")
        numbers = [fence.number for fence in fences]
        await undisturbed(
            self._control.query(ROOM, "lanes_release", owner=self.owner, fence_list=numbers)
        )
        failpoints.hit("relay.release.after")

    def stop_lanes(self) -> None:
        """No send begins from here on."""
        for lane, _ in self._lanes.values():
            lane.stop()

    async def _leave(
        self, lanes: asyncio.Task[Any], house: asyncio.Task[Any], watch: asyncio.Task[Any]
    ) -> None:
        """Hand over first: a statement of the house may wait for a lock longer than the grace.

        Who still waits then is cancelled, which ends the connection with whatever it had begun.
        """
        give_up_at = time.monotonic() + self.settings.grace_seconds
        await self._hand_everything_over(lanes)
        rest = max(0.0, give_up_at - time.monotonic())
        await asyncio.wait([house, watch], timeout=min(HOUSE_SECONDS, rest))

    async def _hand_everything_over(self, keeping: asyncio.Task[Any]) -> None:
        """Begin no send, settle what is in flight, give the lanes back; all within the grace."""
        grace = self.settings.grace_seconds
        give_up_at = time.monotonic() + grace
        # For statements: a lock may keep those of the lanes waiting as well.
        over_at = asyncio.get_running_loop().time() + grace + GOODBYE_SECONDS
        self.stop_lanes()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(over_at):
                await keeping  # its last round may renew, or register this relay
                with contextlib.suppress(DatabaseLost):
                    await self._control.query(ROOM, "worker_stops", incarnation=self.owner)
                await self._settle_lanes(give_up_at)
        if self._lanes:
            signals.emit("relay.unsettled", incarnation=self.owner, lanes=sorted(self._lanes))
        with contextlib.suppress(DatabaseLost, TimeoutError):
            async with asyncio.timeout_at(over_at):
                if not self._lanes:  # else it tells the next owner what may have arrived
                    await self._store.clear_journal(self._control, keep=self.sender.unsettled())
                await self._control.query(ROOM, "worker_gone", incarnation=self.owner)

    async def _settle_lanes(self, give_up_at: float) -> None:
        """Keep the leases until each lane has come to its end, or the grace has."""
        while self._lanes and (rest := give_up_at - time.monotonic()) > 0:
            tasks = [task for _, task in self._lanes.values()]
            await asyncio.wait(tasks, timeout=min(0.5, self.lease_seconds / 4, rest))
            self._reap()
            if time.monotonic() - self._renewed_at > self.lease_seconds / 5:
                await self._renew()

    # ── keeping house ──────────────────────────────────────────────────────────────────────────

    async def promote(self) -> int:
        """Move delayed messages of our lanes that have become due; returns how many."""
        fences = [lane.fence for lane, _ in self._lanes.values()]
        if not fences:
            return 0
        return await self._store.promote(self._house, fences, self.batch_rows)

    async def reconnect_house(self) -> None:
        """Replace the link for background work."""
        try:
            fresh = await self._connect()
        except PostroomError as error:
            raise DatabaseLost(str(error)) from error
        self._links[self._links.index(self._house)] = fresh
        self._house = fresh

    # ── what lanes ask for (lane.Desk) ─────────────────────────────────────────────────────────

    async def read(self, ask: Ask) -> tuple[list[Message], bool]:
        messages, size, more, begun = await self._reads.ask(ask)
        # Here and not where it was served: a lane that was lost meanwhile has read nothing.
        if messages:
            self.budget.take(ask.lane, len(messages), size)
            self.horizon.take(ask.lane, messages[0].position)
        last = messages[-1].position if messages else None
        self.horizon.seen(ask.lane, last, more, begun)
        return messages, more

    async def journal(self, entry: Entry) -> bool:
        return await self._journals.ask(entry)

    async def settle(self, change: Change) -> bool:
        return await self._settles.ask(change)

    async def held_due(self, lane: int) -> list[Message]:
        rows, size = self.settling.most(self.batch_rows // 4 or 1), self.batch_bytes // 4
        return await undisturbed(self._store.held_due(self._reader, lane, rows=rows, bytes=size))

    async def held_run(self, head: Message) -> list[Message]:
        rows, size = self.batch_rows // 4 or 1, self.batch_bytes // 4
        return await undisturbed(self._store.held_run(self._reader, head, rows=rows, bytes=size))

    async def held_any(self, lane: int) -> bool:
        return bool(await undisturbed(self._reader.query(ROOM, "held_any", lane=lane)))

    async def load(self, lane: int) -> tuple[list[Leftover], bool]:
        keep = self.sender.unsettled(lane)
        return await undisturbed(self._store.load_lane(self._writer, lane, keep=keep))

    async def forget(self, lane: int) -> list[Leftover]:
        return await undisturbed(self._store.forget_journal(self._writer, lane))

    @property
    def house(self) -> WorkerLink:
        """The link for work nobody waits for."""
        return self._house

    def elected(self) -> bool:
        """Whether this relay speaks for the whole outbox: the owner of lane 0 does."""
        lane, _ = self._lanes.get(0, (None, None))
        return lane is not None and not lane.over and lane.lease_ends > time.monotonic()

    def silent_seconds(self) -> float:
        """For how long the database has not answered a statement of ours."""
        asked = [link.asked_at for link in self._links if not link.lost]
        now = time.monotonic()
        return max([0.0, *(now - at for at in asked if at is not None)])

    async def _set_clock(self) -> None:
        begun = time.time()
        ((now_us,),) = await self._control.query(ROOM, "clock")
        self._clock_us = int(now_us - (begun + time.time()) / 2 * 1e6)

    def now_us(self) -> int:
        return int(time.time() * 1e6) + self._clock_us

    def next_batch(self) -> int:
        self._batch += 1
        return self._batch

    async def _serve_reads(
        self, asks: Sequence[Ask]
    ) -> list[tuple[list[Message], int, bool, dict[int, int]]]:
        per_lane, total_rows, most_bytes = await self.budget.portion(len(asks))
        per_lane = self.settling.most(per_lane)
        await self._look()
        # Another lane is first each time, so that a full read starves none.
        self._turn += 1
        turned = sorted(asks, key=lambda ask: (ask.lane + self._turn) % LANES)
        begun = self.horizon.begin()
        found = await self._store.read(
            self._reader, turned, rows=per_lane, total_rows=total_rows, bytes=most_bytes
        )
        rows = sum(len(messages) for messages in found.values())
        sizes = {lane: sum([m.size for m in messages]) for lane, messages in found.items()}
        cut = rows >= total_rows or sum(sizes.values()) >= most_bytes
        return [
            (found[lane], sizes[lane], cut or len(found[lane]) >= per_lane, begun)
            for lane in (ask.lane for ask in asks)
        ]

    async def _look(self) -> None:
        """See which publishers are still open, now and then: it moves the safe watermark."""
        recent = time.monotonic() - self._looked_at < self.settings.horizon_seconds
        if not self.safe_reads or not self.horizon.behind or recent:
            return
        mark, rows = self.horizon.mark(), await self._reader.query(ROOM, "horizon")
        self.horizon.look(mark, [transaction for (transaction,) in rows])
        self._looked_at = time.monotonic()

    async def _serve_journals(self, entries: Sequence[Entry]) -> list[bool]:
        mine = await self._store.write_journal(self._writer, entries)
        return [entry.fence.lane in mine for entry in entries]

    async def _serve_settles(self, changes: Sequence[Change]) -> list[bool]:
        """What went well in one statement for all lanes, each trouble in a transaction of its own,
        so that none grows longer than the lease."""
        plain = [change for change in changes if change.plain]
        groups = [plain] if plain else []
        ours: set[int] = set()
        for group in groups + [[change] for change in changes if not change.plain]:
            try:
                mine, missing = await self._store.settle(self._writer, group)
            except DatabaseLost:
                self.settling.failed()
                raise
            self.settling.succeeded()
            ours |= mine
            if missing:
                signals.emit("message.missing", lane=sorted(mine), count=missing)
        return [change.fence.lane in ours for change in changes]
