"""How each bug is planted: a function of its name. What it replaces must be there, or it fails."""

import asyncio
import hashlib
import inspect
import os
import re
import signal
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from postroom import payloads, signals
from postroom.brokers import kafka, webhook_net
from postroom.brokers.base import Delivered, Outcome, Permanent, Transient, Unknown
from postroom.brokers.kafka_clients import Clients
from postroom.brokers.kafka_proof import Proof
from postroom.brokers.nats_source import Source
from postroom.brokers.nats_tray import Tray
from postroom.brokers.webhook_guard import Allowed
from postroom.databases import sql
from postroom.databases.sql import Prepared
from postroom.databases.sqlite import AiosqliteLink
from postroom.dead_letters import store as letters
from postroom.flow import Flow, Value, run_async
from postroom.gateway import adapter, children
from postroom.gateway.counter import Counter
from postroom.idempotency import arguments, exchange, functions, keys, policy, resume, store, turn
from postroom.idempotency import rules as key_rules
from postroom.idempotency.borrowed import Borrowed
from postroom.idempotency.runs import Run
from postroom.idempotency.transaction import KeyedTransaction
from postroom.inbox import carrying, consumer, tray
from postroom.inbox import rules as inbox_rules
from postroom.inbox.rules import Letter
from postroom.inbox.store import Opened, Seat
from postroom.inbox.store import Store as InboxStore
from postroom.inbox.transactions import AsyncTransaction
from postroom.inbox.working import Worker
from postroom.ledger import store as ledger
from postroom.ledger.rules import Entry
from postroom.messages import Message
from postroom.ops import cli_relay
from postroom.outbox import (
    doubts,
    notify,
    noting,
    publish,
    relay,
    requests,
    rules,
    sending,
    writing,
)
from postroom.outbox import lane as lanes
from postroom.outbox.doubts import Doubts, Finding
from postroom.outbox.lane import Lane, _Batch
from postroom.outbox.notify import Pace
from postroom.outbox.office import Office
from postroom.outbox.relay import Relay
from postroom.outbox.rules import SETTLED, Horizon, Leftover, Segment, Settled, Verdict
from postroom.outbox.sending import Sender
from postroom.outbox.settling import Settling
from postroom.outbox.store import ROOM, Ask, Change, Store
from postroom.outbox.together import Pulse

FENCED = ("fence", "journal_write", "settle_deleted", "settle_archived")
OWNER = "owner = :owner AND "
EPOCHS = {
    "postgresql": "epoch * 16 + lane = ANY(CAST(CAST(:fence_list AS text) AS bigint[]))",
    "mysql": "epoch * 16 + lane IN :fence_list",
    "sqlite": "epoch * 16 + lane IN (SELECT value FROM json_each(:fence_list))",
}
ANY_EPOCH = {
    "postgresql": "lane IN (SELECT number % 16 FROM"
    " unnest(CAST(CAST(:fence_list AS text) AS bigint[])) AS f(number))",
    "mysql": "lane IN :lane_list",
    "sqlite": "lane IN (SELECT value % 16 FROM json_each(:fence_list))",
}
NOW = {
    "postgresql": "clock_timestamp()",
    "mysql": "UTC_TIMESTAMP(6)",
    "sqlite": sql._SQLITE_NOW_US,
}


def reword(dialect: str, name: str, old: str, new: str, room: str = ROOM) -> None:
    """Replace words of a query, wherever they stand in it."""
    queries = sql._room(room)[dialect]
    assert old in queries[name], f"{name} of {dialect} does not say {old!r} any more"
    queries[name] = queries[name].replace(old, new)
    sql.prepare.cache_clear()


def reword_fences(change: Mapping[str, tuple[str, str]]) -> None:
    for dialect, (old, new) in change.items():
        for name in FENCED:
            if sql.has_query(ROOM, dialect, name):
                reword(dialect, name, old, new)


def replayed_for_each_delivery() -> None:
    for dialect in sql.DIALECTS:
        by = "GROUP BY id, created_at"
        reword(dialect, "archive_take", by, f"{by}, position", "postroom.ops.jobs")


# ── The fence, and owning lanes ────────────────────────────────────────────────────────────────


def fence_removed() -> None:
    reword_fences({d: (OWNER + EPOCHS[d], ANY_EPOCH[d]) for d in sql.DIALECTS})


def fence_without_owner() -> None:
    reword_fences({d: (OWNER + EPOCHS[d], EPOCHS[d]) for d in sql.DIALECTS})


def fence_without_epoch() -> None:
    reword_fences({d: (OWNER + EPOCHS[d], OWNER + ANY_EPOCH[d]) for d in sql.DIALECTS})


def fence_that_does_not_lock() -> None:
    for name in ("fence", "settle_deleted", "settle_archived"):
        reword("postgresql", name, "ORDER BY lane FOR SHARE", "ORDER BY lane")
    reword("mysql", "fence", " LOCK IN SHARE MODE", "")


def take_without_lock() -> None:
    for dialect in ("postgresql", "mysql"):
        reword(dialect, "lanes_lock_free", " FOR UPDATE SKIP LOCKED", "")


def take_without_lease() -> None:
    for dialect, now in NOW.items():
        reword(dialect, "lanes_lock_free", f"lease_until < {now}", "lease_until IS NOT NULL")


def lease_never_ends() -> None:
    for dialect, now in NOW.items():
        reword(dialect, "lanes_lock_free", f"lease_until < {now}", "1 = 0")


def lease_of_the_future() -> None:
    for dialect in sql.DIALECTS:
        for room, name in (
            (ROOM, "lanes_cap"),
            ("postroom.idempotency", "cap"),
            ("postroom.idempotency", "cap_all"),
            ("postroom.inbox", "lease_cap"),
        ):
            reword(dialect, name, " WHERE ", " WHERE 1 = 0 AND ", room)


def application_clock() -> None:
    mark = "/* ours */"
    for dialect, now in NOW.items():
        for name in ("lanes_state", "lanes_lock_free", "lanes_take", "lanes_renew"):
            reword(dialect, name, now, mark)
    bind = Prepared.bind

    def with_our_time(
        self: Prepared, dialect: str, values: Mapping[str, Value]
    ) -> tuple[str, tuple[Any, ...]]:
        text, bound = bind(self, dialect, values)
        now = time.time()
        ours = {
            "postgresql": f"to_timestamp({now})",
            "mysql": f"CAST('{datetime.fromtimestamp(now, UTC):%F %T.%f}' AS DATETIME(6))",
            "sqlite": str(int(now * 1e6)),
        }
        return text.replace(mark, ours[dialect]), bound

    Prepared.bind = with_our_time  # type: ignore[method-assign]


def reaper_without_fence() -> None:
    def take(id: str, done: str, source: str | None) -> Flow[list[letters.Letter]]:
        found = yield from letters._letters(id, source)
        yield from letters.lock_lanes([letter.lane for letter in found])
        return [letter for letter in found if letter.state == "dead"]

    letters._take = take


def prune_without_state() -> None:
    for dialect in sql.DIALECTS:
        reword(dialect, "prune_dead", "state IN ('resolved', 'discarded')", "1 = 1")


def redrive_without_pace() -> None:
    for dialect in sql.DIALECTS:
        reword(dialect, "pace_lock", "ELSE 0", "ELSE 1", room=letters.ROOM)


# ── Reading ────────────────────────────────────────────────────────────────────────────────────


def watermark_last_read() -> None:
    def seen(
        self: Horizon, lane: int, last: int | None, full: bool, begun: Mapping[int, int]
    ) -> None:
        self.safe[lane] = max(self.safe.get(lane, 0), last or 0)

    Horizon.seen = seen  # type: ignore[method-assign]


def watermark_by_transaction_number() -> None:
    reword(
        "postgresql",
        "horizon",
        "AND granted",
        "AND granted AND pid IN (SELECT pid FROM pg_stat_activity WHERE backend_xid IS NOT NULL)",
    )


def figures_from_the_watermark() -> None:
    Horizon.settled = lambda self: dict(self.safe)  # type: ignore[method-assign]


def read_before_settle() -> None:
    """What stands in for a forgotten filter of just-settled rows, which a lane does not need."""
    read, settle = Office.read, Office.settle
    ahead: dict[int, tuple[list[Message], bool]] = {}

    async def take_what_was_read(self: Office, ask: Ask) -> tuple[list[Message], bool]:
        return ahead.pop(ask.lane) if ask.lane in ahead else await read(self, ask)

    async def read_and_settle(self: Office, change: Change) -> bool:
        lane = change.fence.lane
        self.budget.give(lane)
        ahead[lane] = await read(self, Ask(lane, self.horizon.after(lane), False))
        return await settle(self, change)

    Office.read = take_what_was_read  # type: ignore[method-assign]
    Office.settle = read_and_settle  # type: ignore[method-assign]


def hints_only() -> None:
    begin = Pulse.__init__

    def never(self: Pulse, shortest_seconds: float, longest_seconds: float) -> None:
        begin(self, 3600.0, 3600.0)

    Pulse.__init__ = never  # type: ignore[method-assign]


def hint_for_one_lane() -> None:
    wait = Pulse.wait

    async def first_only(self: Pulse, seen: int) -> None:
        early, self.hints = self.hints != seen, seen
        if not early:
            await wait(self, seen)

    Pulse.wait = first_only  # type: ignore[method-assign]


def hints_stay_rare() -> None:
    def latch(self: Pace, now: float, commits: int) -> float:
        waited, self._before = commits > self._before, commits
        self._pause = min(self._pause * 2, notify.BUSY_SECONDS) if waited else notify.QUIET_SECONDS
        return self._pause

    Pace.after = latch  # type: ignore[method-assign]


# ── Sending and settling ───────────────────────────────────────────────────────────────────────


def settled_before_receipt() -> None:
    send = _Batch._send_wave

    async def settle_and_send(self: _Batch, wave: list[Message]) -> None:
        self._change.delivered += [m for m in wave if m.order not in self._stopped]
        await self._flush()
        await send(self, wave)

    _Batch._send_wave = settle_and_send  # type: ignore[method-assign]


def receipts_forgotten() -> None:
    Settling.keep = lambda self, verdicts, epoch: None  # type: ignore[method-assign]


def no_probe() -> None:
    Settling.most = lambda self, rows: rows  # type: ignore[method-assign]


def batch_settled_as_one() -> None:
    send = Sender.send

    async def all_or_none(self: Sender, wave: Sequence[Message], **how: Any) -> list[Verdict]:
        verdicts = await send(self, wave, **how)
        some = any(isinstance(one, Settled) for one in verdicts)
        return [SETTLED] * len(wave) if some else verdicts

    Sender.send = all_or_none  # type: ignore[method-assign]


def held_key_passed() -> None:
    sort_out = _Batch._sort_out

    def as_if_free(self: _Batch) -> list[Message]:
        if not self.from_held:
            self.messages = [message._replace(held=0) for message in self.messages]
        return sort_out(self)

    _Batch._sort_out = as_if_free  # type: ignore[method-assign]


def key_in_flight_twice() -> None:
    lanes.waves = lambda batch: [list(batch)]


def _judge_as(change: Any) -> None:
    judge = sending.verdict

    def wrong(outcome: Outcome, *rest: Any) -> Verdict:
        changed = change(outcome)
        return changed if isinstance(changed, Settled) else judge(changed, *rest)

    sending.verdict = wrong


def attempts_spent_on_outage() -> None:
    def ours(outcome: Outcome) -> Outcome:
        down = isinstance(outcome, Transient | Unknown) and outcome.down
        return replace(outcome, down=None) if down else outcome

    _judge_as(ours)


def permanent_tried_again() -> None:
    _judge_as(lambda o: Transient(o.code, o.text) if isinstance(o, Permanent) else o)


def unknown_is_delivered() -> None:
    _judge_as(lambda o: SETTLED if isinstance(o, Unknown) else o)


# ── Deaths and ends ────────────────────────────────────────────────────────────────────────────


def random_kills_blamed() -> None:
    suspicion = rules._suspicion

    def blame(message: Message, leftovers: Sequence[Leftover]) -> Segment:
        return suspicion(message, [replace(left, alone=True) for left in leftovers])

    rules._suspicion = blame


def late_deaths_blamed() -> None:
    suspicion = rules._suspicion

    def blame(message: Message, leftovers: Sequence[Leftover]) -> Segment:
        seen = suspicion(message, leftovers)
        return replace(seen, deaths=seen.deaths + seen.late)

    rules._suspicion = blame


def no_journal() -> None:
    async def say_nothing(self: Lane, messages: Sequence[Message], alone: bool) -> int:
        return self.desk.next_batch()

    Lane.journal = say_nothing  # type: ignore[method-assign]


def sigterm_exits() -> None:
    async def until_stopped(worker: Any, work: Coroutine[Any, Any, Any]) -> Any:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        return await work

    cli_relay.until_stopped = until_stopped


def lanes_wait_for_the_house() -> None:
    hand_over = Office._hand_everything_over

    async def leave(self: Any, keeping: Any, *house: Any) -> None:
        await asyncio.wait([keeping, *house])
        await hand_over(self, keeping)

    Relay.stop = lambda self: self.stopping.set()  # type: ignore[method-assign]
    Office._leave = leave  # type: ignore[method-assign]


# ── Publishing ─────────────────────────────────────────────────────────────────────────────────


def serialize_key_ignored() -> None:
    item = writing.item

    def without_turns(message: Any, *, serialize_key: bool, chosen_id: bool) -> Any:
        return item(message, serialize_key=False, chosen_id=chosen_id)

    writing.item = without_turns


def publish_commits_alone() -> None:
    publish.refuse_alone = lambda *_: None


def was_committed_guesses() -> None:
    def guess(id: str) -> Flow[bool]:
        yield from ()
        return True

    writing.is_committed = guess


def nan_published() -> None:
    payloads._JSON.allow_nan = True


def chosen_id_unclaimed() -> None:
    whole = writing.item

    def item(message: Any, *, serialize_key: bool, chosen_id: bool) -> Any:
        return whole(message, serialize_key=serialize_key, chosen_id=False)

    writing.item = item


def sqlite_transaction_in_pieces() -> None:
    async def transact(self: AiosqliteLink, begin: str, flow: Flow[Any]) -> Any:
        await self.connection.execute(begin)
        result = await run_async(flow, self)
        await self.connection.execute("COMMIT")
        return result

    AiosqliteLink.transact = transact  # type: ignore[assignment]


def naive_model_published() -> None:
    payloads._compare = lambda *_: None


# ── Webhooks ───────────────────────────────────────────────────────────────────────────────────


def webhook_address_unchecked() -> None:
    webhook_net.why_refused = lambda *_: None


def webhook_resolved_twice() -> None:
    checked = webhook_net.GuardedBackend.addresses

    async def checked_and_asked_again(self: Any, host: str, port: int, until: float) -> list[str]:
        await checked(self, host, port, until)
        found: list[str] = await self._resolve(host, port, until)
        return found

    webhook_net.GuardedBackend.addresses = checked_and_asked_again


def kafka_goes_on_after_a_refusal() -> None:
    made = Clients._new_link

    def lenient(self: Any, settings: dict[str, Any], *, strict: bool) -> Any:
        settings.pop("enable.gapless.guarantee", None)
        return made(self, settings, strict=False)

    Clients._new_link = lenient  # type: ignore[method-assign]


def kafka_trusts_a_strange_partition() -> None:
    Proof.probes = lambda *_: {}  # type: ignore[method-assign]


def kafka_sends_what_is_behind() -> None:
    def all_that_failed(
        batch: Sequence[Message], outcomes: list[Outcome], sent: Sequence[int], **_: Any
    ) -> list[int]:
        return [n for n in sent if not isinstance(outcomes[n], Delivered | Transient)]

    kafka.again = all_that_failed


# ── Receiving ──────────────────────────────────────────────────────────────────────────────────


def take_over_at_once() -> None:
    async def settle_nothing(self: Source, link: Any) -> None:
        self._state = "owned"

    Source._settle = settle_nothing  # type: ignore[method-assign]


def empty_pull_believed() -> None:
    recover = Source._recover

    async def recover_what_came(self: Source, link: Any, recovery: Any, info: Any) -> None:
        if info is not None:
            recovery.expected = len(recovery.came)
        await recover(self, link, recovery, info)

    Source._recover = recover_what_came  # type: ignore[method-assign]


def pin_outlives_its_connection() -> None:
    opened = Source.open

    async def open_with_the_old_pin(self: Source, link: Any, *, update: bool) -> None:
        pin, self._pin = self._pin, None
        await opened(self, link, update=update)
        if pin is not None:
            self._pin, self._state = pin, "settling"

    Source.open = open_with_the_old_pin  # type: ignore[method-assign]


def given_back_is_passed() -> None:
    def give_back(self: Tray, sequence: int) -> bool:
        return self._hand.pop(sequence, None) is not None

    Tray.give_back = give_back  # type: ignore[method-assign]


def claim_never_grows() -> None:
    begin = Source._begin_claim

    def begin_again(self: Source) -> None:
        begin(self)
        self.claim = 1

    Source._begin_claim = begin_again  # type: ignore[method-assign]


def one_refusal_ends_a_worker() -> None:
    async def once(attempt: Any, *, report: Any, cause: Any, **_: Any) -> Any:
        report(cause, 0.0)
        return await attempt()

    for module in (relay, consumer):
        module.reopen = once  # type: ignore[assignment]


def silence_not_noticed() -> None:
    async def ask(self: Any, name: str, **values: Value) -> Any:
        return await self._house.query(tray.ROOM, name, **values)

    tray.Tray._ask = ask  # type: ignore[method-assign]


# ── Consumers ──────────────────────────────────────────────────────────────────────────────────


def inbox_forgets() -> None:
    def claim(self: InboxStore, letters: Sequence[Letter], opened: Opened) -> Flow[list[Letter]]:
        yield from claimed(self, letters, opened)
        opened.duplicates.clear()
        return list(letters)

    claimed = InboxStore._claim
    InboxStore._claim = claim  # type: ignore[method-assign]


def seat_not_checked() -> None:
    def enter(
        self: InboxStore, letters: Sequence[Letter], seats: Iterable[Seat], opened: Opened
    ) -> Flow[Sequence[Letter]]:
        yield from entered(self, letters, [], opened)
        return letters

    entered = InboxStore._enter
    InboxStore._enter = enter  # type: ignore[method-assign]


def parked_key_passed() -> None:
    def waiting(self: InboxStore, letters: Sequence[Letter]) -> Flow[set[Any]]:
        yield from waited(self, letters)
        return set()

    waited = InboxStore._waiting
    InboxStore._waiting = waiting  # type: ignore[method-assign]


def acknowledged_before_commit() -> None:
    def opened(self: Worker, letters: Sequence[Letter]) -> Any:
        self.desk.acknowledge(letters)
        return (yield from first(self, letters))

    first = Worker._open
    Worker._open = opened  # type: ignore[method-assign]


def content_not_compared() -> None:
    def changed(self: Letter) -> Letter:
        return self

    Letter.changed = changed  # type: ignore[method-assign]


def django_effect_outside() -> None:
    from postroom.inbox.django import DjangoTransaction

    def call(self: DjangoTransaction, function: Callable[[Any], Any]) -> None:
        # Another thread has another connection of Django's, which commits separately.
        with ThreadPoolExecutor(1) as threads:
            threads.submit(function, self.connection).result()

    DjangoTransaction.call = call  # type: ignore[method-assign]


def error_passed_over() -> None:
    from postroom.inbox import transactions

    assert transactions._note_error
    transactions._note_error = lambda context: None


def effect_in_a_second_transaction() -> None:
    """The inbox's row is committed before the handler runs."""

    async def call(self: AsyncTransaction, function: Any) -> None:
        await self.commit()
        await self.connection.begin()
        await first(self, function)

    first = AsyncTransaction.call
    AsyncTransaction.call = call  # type: ignore[method-assign]


def described_is_done() -> None:
    carrying.must_have_run = lambda *_: None


def held_forgotten() -> None:
    held = "h.message_id = i.message_id"
    reword("sqlite", "prune_inbox", held, f"{held} AND 1 = 0")


def type_not_compared() -> None:
    def of_content(type: str, headers: Mapping[str, str], payload: bytes) -> str:
        return hashlib.sha256(payload).hexdigest()

    inbox_rules._digest = of_content


# ── Idempotency keys ───────────────────────────────────────────────────────────────────────────


def reword_keys(name: str, change: Mapping[str, tuple[str, str]]) -> None:
    for dialect, (old, new) in change.items():
        queries = sql._room(store.ROOM)[dialect]
        assert old in queries[name], f"{name} of {dialect} does not say {old!r} any more"
        queries[name] = queries[name].replace(old, new)
    sql.prepare.cache_clear()


def key_without_scope() -> None:
    keys.scope_name = lambda scope: "everybody"


def fingerprint_not_compared() -> None:
    judge = key_rules.judge

    def careless(record: Any, name: Any, fingerprint: str, owner: str) -> Any:
        return judge(record._replace(fingerprint=fingerprint), name, fingerprint, owner)

    store.judge = careless


def model_without_its_class() -> None:
    form = arguments._form

    def anonymous(value: Any, path: str) -> Any:
        found = form(value, path)
        return ["model", "", found[2]] if isinstance(found, list) and found[0] == "model" else found

    arguments._form = anonymous


def key_in_a_second_transaction() -> None:
    begin = KeyedTransaction.begin

    def early(self: KeyedTransaction) -> Any:
        verdict = begin(self)
        if self.mine is not None:
            self.commit()
            self._root = self.connection.begin()
        return verdict

    KeyedTransaction.begin = early  # type: ignore[method-assign]


def view_committed_before_its_key() -> None:
    finish = Borrowed.finish

    def late(self: Borrowed, mine: Any, answer: Any) -> None:
        # Of Django the driver's, since its own refuses inside of atomic().
        (self.tx.connection if hasattr(self.tx, "atomic_blocks") else self.tx).commit()
        finish(self, mine, answer)

    Borrowed.finish = late  # type: ignore[method-assign]


def function_committed_before_its_key() -> None:
    """Its transaction is committed as soon as it has returned."""
    first = functions._Call.__init__

    def hasty(self: Any, function: Any, operation: str, key: Any, tx: Any, *rest: Any) -> None:
        first(self, function, operation, key, tx, *rest)
        if tx is None:
            return
        given = self._signature.bind

        def committed(*args: Any, **how: Any) -> Any:
            told = function(*args, **how)
            given(*args, **how).arguments[tx].commit()
            return told

        async def committed_async(*args: Any, **how: Any) -> Any:
            told = await function(*args, **how)
            await given(*args, **how).arguments[tx].commit()
            return told

        is_async = inspect.iscoroutinefunction(function)
        self.function = committed_async if is_async else committed

    functions._Call.__init__ = hasty  # type: ignore[method-assign]


def key_free_before_its_answer() -> None:
    def finish(mine: Any, answer: Any, *, keep_seconds: float) -> Any:
        return store.fail(mine, "free", keep_seconds=keep_seconds)

    exchange.store.finish = finish


def key_without_epoch() -> None:
    words = "AND owner = :owner\n   AND epoch = :epoch AND status IN ('pending', 'indeterminate')"
    reword_keys("finish", dict.fromkeys(sql.DIALECTS, (words, "")))


def lost_key_run_again() -> None:
    reword_keys("claim", dict.fromkeys(sql.DIALECTS, ("'resume'", "'external'")))


def given_up_and_kept() -> None:
    def give_back(name: Any, owner: str) -> Any:
        return (yield from store.look(name)) is None

    store.give_back = give_back


def key_ends_with_its_client() -> None:
    from postroom.idempotency.asgi import IdempotencyMiddleware

    async def in_task(self: Any, work: Any, request: Any) -> None:
        await work

    IdempotencyMiddleware._in_task = in_task  # type: ignore[method-assign]


def call_torn_by_its_caller() -> None:
    from postroom.idempotency import exchange, functions, resume

    async def at_once(work: Any) -> Any:
        return await work

    for door in (exchange, functions, resume):
        door.finish = at_once  # type: ignore[attr-defined]
    exchange._written = exchange._again  # type: ignore[assignment]


def point_not_fenced() -> None:
    words = "AND owner = :owner\n   AND epoch = :epoch "
    reword_keys("advance", dict.fromkeys(sql.DIALECTS, (words, "")))


def points_forget_each_other() -> None:
    made = Run.__init__

    def without_turns(self: Run, *about: Any) -> None:
        made(self, *about)
        self._turn = nullcontext()  # type: ignore[assignment]

    Run.__init__ = without_turns  # type: ignore[method-assign]


def key_of_nobody() -> None:
    resume.owned = turn.owned = lambda name: name  # type: ignore[attr-defined]


def path_to_the_letter() -> None:
    policy._SLASHES = re.compile("(?!)")


def redirect_not_kept() -> None:
    exchange.sent_elsewhere = lambda answer, path: 300 < answer.status < 309


def redirect_kept() -> None:
    """The root of an application is left out."""
    first = key_rules.sent_elsewhere
    exchange.sent_elsewhere = lambda answer, path: first(answer, f"/{path.rpartition('/')[2]}")


def decided_for_a_day() -> None:
    words = dict.fromkeys(sql.DIALECTS, ("(expires_at, ", "("))
    reword_keys("settle", words | {"sqlite": ("MAX(expires_at, ", "(")})


def commit_not_noted() -> None:
    """What a hook of Django raises is taken for a word about the commit."""
    from postroom.idempotency.django import _Atomic

    _Atomic._note_commit = lambda self: None  # type: ignore[method-assign]


def begun_and_forgotten() -> None:
    from postroom.idempotency import fastapi

    fastapi._has_begun = lambda error: False


# ── The ledger ─────────────────────────────────────────────────────────────────────────────────


def sent_again_unasked() -> None:
    async def nothing(self: Doubts, *about: Any) -> dict[int, Finding]:
        return {}

    Doubts.ask_first = nothing  # type: ignore[method-assign]


def doubt_left_behind() -> None:
    def nothing(self: _Batch, *about: Any) -> None: ...

    _Batch._carry_doubts = nothing  # type: ignore[method-assign]


def doubt_forgotten() -> None:
    """A message that was answered once is in doubt no more, whatever came before."""

    async def forgetful(
        self: Doubts, broker: Any, message: Message, outcome: Outcome, *about: Any
    ) -> Finding:
        return await first(self, broker, message, outcome, False, False)

    first = Doubts._look_after
    Doubts._look_after = forgetful  # type: ignore[method-assign]


def journal_dropped_in_doubt() -> None:
    Doubts.any_left = lambda self, lane=None: False  # type: ignore[method-assign, misc]


def any_answer_is_not_arrived() -> None:
    doubts.may_be_sent = lambda answer: not isinstance(answer, Delivered | Permanent)
    doubts.learnt = lambda found: found


def unknown_called_failed() -> None:
    first = noting.troubled

    def certain(message: Message, **how: Any) -> Any:
        return first(message, **how | {"doubt": False})

    noting.troubled = certain


def notes_unfenced() -> None:
    """What a relay learnt goes to the ledger whoever owns the lane."""
    first = Store._settle

    def settle(self: Store, changes: Sequence[Change]) -> Any:
        for change in changes:
            yield from ledger.write(change.notes.values())
        return (yield from first(self, changes))

    Store._settle = settle  # type: ignore[method-assign]


def asked_for_all_at_once() -> None:
    """A broker that keeps order gets a batch as one, though each of it is asked about by itself."""

    def is_ordered(self: Sender, batch: Sequence[Message]) -> bool:
        brokers = [self._brokers[url] for url in self._urls_of(batch) if url]
        return all(broker.capabilities.ordered_pipeline for broker in brokers)

    Sender.is_ordered = is_ordered  # type: ignore[method-assign]


def finished_overwritten() -> None:
    for dialect in sql.DIALECTS:
        queries = sql._room(ledger.ROOM)[dialect]
        assert " AND finished_at IS NULL" in queries["finish"]
        queries["finish"] = queries["finish"].replace(" AND finished_at IS NULL", "")


def digest_not_compared() -> None:
    first = requests.accept

    def accept(request: requests.Request) -> Any:
        receipt = yield from first(request)
        return replace(receipt, conflict=False)

    requests.accept = accept


def answered_before_commit() -> None:
    """The gateway says 202 and commits afterwards."""

    async def accept(self: Counter, request: requests.Request) -> requests.Receipt:
        found = await self.find(request.wish.scope, request.wish.key)
        if found is not None:
            return requests.Receipt(found, False, found.digest != request.wish.digest)
        later = asyncio.get_running_loop().call_later
        later(30, lambda: asyncio.ensure_future(first(self, request)))
        wish = request.wish
        entry = Entry(
            *(wish.id, wish.scope, wish.key, wish.digest, "accepted", wish.request, None, 0),
            *(None, None, None, None, 0, 0, None),
        )
        return requests.Receipt(entry, True, False)

    first = Counter.accept
    Counter.accept = accept  # type: ignore[method-assign]


# ── The gateway ────────────────────────────────────────────────────────────────────────────────


def proxy_believed() -> None:
    spelled = adapter._document
    adapter._document = lambda text: {"reason_code": "said by anybody"} | spelled(text)


def page_is_a_client() -> None:
    from postroom.gateway.service import SCOPE, Gateway

    Gateway._scope = lambda self, call: SCOPE  # type: ignore[method-assign]


def simulated_with_settings() -> None:
    inherited = children.environment_apart
    children.environment_apart = lambda: dict(os.environ) | inherited()


# ── Secrets ────────────────────────────────────────────────────────────────────────────────────


def password_with_a_comma() -> None:
    for place in (signals, sending):
        place.redact_url = signals.redact  # type: ignore[assignment]


def network_opens_metadata() -> None:
    covers = Allowed.covers

    def as_one_of_many(self: Allowed, address: Any, *, alone: bool = False) -> bool:
        return covers(self, address)

    Allowed.covers = as_one_of_many  # type: ignore[method-assign]
