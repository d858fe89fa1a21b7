"""`postroom doctor`: what could go wrong here, looked for; each thing with a remedy.

A check answers with findings of level ok, warning or wrong. One that cannot look, for want of a
right or because the server has no such thing, says so and is a warning. Quick at any size.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import postroom
from postroom.config import DAY_SECONDS, RelaySettings, Routes
from postroom.databases import migrate
from postroom.databases.database import Database, DatabaseLost, WorkerLink
from postroom.ops.consumers import ROOM as CONSUMERS
from postroom.ops.house import ROOM
from postroom.ops.keys import ROOM as KEYS
from postroom.ops.screen import age, span
from postroom.ops.status import look
from postroom.outbox.store import ROOM as OUTBOX
from postroom.signals import redact_url

__all__ = ["Check", "Limits", "Patient", "examine", "fine", "warning", "wrong"]


IDS_COMPARED = 10_000  # messages of each table
KEYS_COUNTED = 10_000


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at. `level` is ok, warning or wrong."""

    name: str
    level: str
    text: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    """From when on something is worth a word."""

    age_seconds: float = 900
    silent_seconds: float = 60
    clock_seconds: float = 5
    publisher_seconds: float = 30
    transaction_seconds: float = 300
    ping_seconds: float = 5


@dataclass(slots=True)
class Patient:
    """What every check may look at."""

    url: str
    database: Database
    link: WorkerLink
    state: dict[str, Any]
    settings: RelaySettings
    routes: Routes
    limits: Limits
    brokers: Mapping[str, Mapping[str, str]] = field(default_factory=dict, repr=False)


Checker: TypeAlias = Callable[[Patient], Awaitable[Iterable[Check]]]


def fine(name: str, text: str) -> Check:
    """All is well."""
    return Check(name, "ok", text)


def warning(name: str, text: str, remedy: str) -> Check:
    """Works, and may not go on to."""
    return Check(name, "warning", text, remedy)


def wrong(name: str, text: str, remedy: str) -> Check:
    """Does not work, or loses something."""
    return Check(name, "wrong", text, remedy)


async def examine(
    url: str,
    settings: RelaySettings,
    routes: Routes,
    limits: Limits | None = None,
    brokers: Mapping[str, Mapping[str, str]] | None = None,
) -> list[Check]:
    """Every check there is for this kind of database. `brokers`: options by scheme."""
    from postroom.ops.doctor_brokers import brokers as check_brokers
    from postroom.ops.doctor_servers import CHECKS

    if problems := await migrate.check(url):
        # What else there is to look at lies in tables that are not as they should be.
        return [wrong("schema", text.rstrip("."), "") for text in problems]
    database = Database(url)
    limits, brokers = limits or Limits(), brokers or {}
    patient = Patient(
        url, database, await database.connect(), {}, settings, routes, limits, brokers
    )
    found = [fine("schema", "the tables are complete")]
    try:
        patient.state = await look(patient.link)
        for check in (*_CHECKS, check_brokers, *CHECKS[database.dialect]):
            found += await _run(patient, check)
    except DatabaseLost as lost:
        raise database.explain(lost) from lost
    finally:
        await patient.link.close()
    return found


async def _run(patient: Patient, check: Checker) -> list[Check]:
    name = check.__name__.strip("_").replace("_", " ")
    try:
        return list(await check(patient))
    except DatabaseLost as lost:
        told = patient.database.explain(lost)
        patient.link = await patient.database.connect()
        return [warning(name, f"cannot be looked at: {str(told).rstrip('.')}", "give the right")]


# ── checks for every database ──────────────────────────────────────────────────────────────────


async def _clocks(patient: Patient) -> list[Check]:
    before = time.time()
    ((now_us,),) = await patient.link.query(ROOM, "now_us")
    ahead = now_us / 1e6 - (before + time.time()) / 2
    clocks = {"this machine": -ahead} | {
        worker["name"]: worker["clock_ahead_seconds"]
        for worker in patient.state["workers"]
        if worker["clock_ahead_seconds"] is not None
    }
    off = {who: by for who, by in clocks.items() if abs(by) > patient.limits.clock_seconds}
    if off:
        said = ", ".join(f"{who} by {by:+.1f} s" for who, by in off.items())
        return [
            warning(
                "clocks", f"clocks differ from the database's: {said}",
                "run NTP everywhere; leases go by the database's clock, but deliver_at and "
                "expires_at are made by publishers'",
            )
        ]  # fmt: skip
    return [fine("clocks", f"{len(clocks)} clocks agree with the database's")]


async def _workers(patient: Patient) -> list[Check]:
    state = patient.state
    found: list[Check] = []
    silent = [w for w in state["workers"] if w["seen_seconds_ago"] > patient.limits.silent_seconds]
    alive = [worker for worker in state["workers"] if worker not in silent]
    live = [worker for worker in alive if worker["kind"] == "relay"]
    found += [
        warning(
            "workers",
            f"{worker['name']} has not been seen for {age(worker['seen_seconds_ago'])}",
            "it died or is stalled: look at its process, or `postroom prune --only workers`",
        )
        for worker in silent
    ]
    consumers = sum(one["alive"] for one in state["consumers"])
    waiting = state["pending"] or state["held"] > state["blocked_keys"]
    if not live and not state["published"]:
        text = f"{consumers} consumer processes are alive"
        found.append(fine("workers", text if consumers else "nothing was published here yet"))
    elif not live and waiting:
        found.append(wrong("workers", "messages wait and no relay is alive", "start a relay"))
    elif not live:
        found.append(warning("workers", "no relay is alive", "start one: `postroom relay`"))
    else:
        found.append(
            fine(
                "workers", "1 relay is alive" if len(live) == 1 else f"{len(live)} relays are alive"
            )
        )
    versions = {str(w["report"].get("version")) for w in alive if w["report"]}
    if versions - {postroom.__version__}:
        found.append(
            warning(
                "versions",
                f"workers are of version {', '.join(sorted(versions))}, this is "
                f"{postroom.__version__}",
                "bring them to one version",
            )
        )  # fmt: skip
    return found


async def _consumers(patient: Patient) -> list[Check]:
    """Consumers that no process works for, cannot receive, or keep messages waiting."""
    found = []
    for one in patient.state["consumers"]:
        name, waiting = one["consumer"], one["waiting"]
        if not one["alive"]:
            seen = age(one["seen_seconds_ago"])
            found.append(
                (wrong if waiting else warning)(
                    "consumers",
                    f"consumer {name} is not alive, last seen {seen} ago; {waiting:,} messages "
                    "wait in it",
                    "start it: `postroom consume MODULE:CONSUMER`; of one that is gone for good, "
                    "`postroom prune --only consumers --older-than 1h` deletes the record",
                )
            )
        elif one["trouble"]:
            remedy = "check the server; the consumer retries automatically"
            found.append(warning("consumers", f"consumer {name}: {one['trouble']}", remedy))
        if (one["oldest_waiting_seconds"] or 0) > patient.limits.age_seconds:
            waited, limit = one["oldest_waiting_seconds"], patient.limits.age_seconds
            found.append(
                warning(
                    "consumers",
                    f"the oldest message that waits in consumer {name} has waited for "
                    f"{age(waited)}, longer than {age(limit)}",
                    f"`postroom inbox list --held --consumer {name}` shows the error",
                )
            )
    if found or not patient.state["consumers"]:
        return found
    return [fine("consumers", f"{len(patient.state['consumers'])} consumers receive and handle")]


async def _lanes(patient: Patient) -> list[Check]:
    rows = await patient.link.query(ROOM, "waiting_lanes")
    long_ms = patient.settings.lease_seconds * 1000
    idle = [lane for lane, paused, waits in rows if not paused and waits > long_ms]
    paused = [lane for lane, is_paused, _ in rows if is_paused]
    found = []
    if idle:
        found.append(
            wrong(
                "lanes", f"messages wait in lanes {span(idle)}, which nobody works",
                "start a relay, or look at the log of the one that runs",
            )
        )  # fmt: skip
    if paused:
        found.append(
            warning(
                "lanes", f"messages wait in lanes {span(paused)}, which are paused",
                "unpause them when the reason is gone",
            )
        )  # fmt: skip
    if not patient.state["published"]:
        return found
    return found or [fine("lanes", "no messages wait in a lane that nobody works")]


async def _backlog(patient: Patient) -> list[Check]:
    state, limit = patient.state, patient.limits.age_seconds
    found = []
    for name, what in (
        ("oldest_pending_seconds", "the oldest pending message waits"),
        ("oldest_held_seconds", "the oldest held message waits"),
        ("overdue_delayed_seconds", "a delayed message is overdue"),
    ):
        seconds = state[name]
        if seconds is not None and seconds > limit:
            tell = warning if name == "oldest_held_seconds" else wrong
            found.append(
                tell(
                    "backlog", f"{what} for {age(seconds)}, longer than {age(limit)}",
                    "`postroom status --watch` shows what is slow, down or held",
                )
            )  # fmt: skip
    return found or [fine("backlog", f"nothing waits longer than {age(limit)}")]


async def _destinations(patient: Patient) -> list[Check]:
    return [
        warning(
            "destinations",
            f"{each['name']} is down, says {each['worker']}: {each['error_code']}: {each['error']}",
            "mend it; nothing is lost meanwhile, and the relay tries again by itself",
        )
        for each in patient.state["destinations"]
    ]


async def _dead_letters(patient: Patient) -> list[Check]:
    dead, blocked = patient.state["dead"], patient.state["blocked_keys"]
    if not dead:
        return [fine("dead letters", "none waits for a person")]
    of = [f"{one['dead']:,} of consumer {one['consumer']}"
          for one in patient.state["consumers"] if one["dead"]]  # fmt: skip
    blocked += sum(one["blocked_keys"] for one in patient.state["consumers"])
    holding = f", {blocked:,} of them hold their key" if blocked else ""
    holding += f" ({', '.join(of)})" if of else ""
    more = "+" if dead >= patient.state["count_limit"] else ""
    return [
        warning(
            "dead letters", f"{dead:,}{more} dead letters wait for a person{holding}",
            "`postroom dead list`, then retry or discard them",
        )
    ]  # fmt: skip


async def _ids(patient: Patient) -> list[Check]:
    """Two waiting messages under one id; `verify` compares those of the archive too."""
    ((reused,),) = await patient.link.query(ROOM, "reused_waiting", most=IDS_COMPARED)
    if not reused:
        return []
    return [
        wrong(
            "ids",
            f"several waiting messages share an id, {reused:,} times, and receivers drop all but "
            "the first",
            "see which with `postroom verify`, and publish the others under new ids",
        )
    ]


async def _retention(patient: Patient) -> list[Check]:
    ((archive, dedup, inbox),) = await patient.link.query(ROOM, "oldest_kept")
    settings, found = patient.settings, []
    meta = await patient.link.query(OUTBOX, "meta_read", item="keep_delivered_seconds")
    kept = int(meta[0][0]) if meta else settings.keep_delivered_seconds
    for what, seconds, keep in (
        ("delivered messages", archive, kept),
        ("dedup keys", dedup, settings.keep_dedup_seconds),
        ("inbox records", inbox, settings.keep_inbox_seconds),
    ):
        # Whole days are kept, and a relay prunes every minute.
        if seconds is not None and seconds > keep + 2 * DAY_SECONDS:
            found.append(
                warning(
                    "retention", f"{what} are {age(seconds)} old, and are kept for {age(keep)}",
                    "relays prune: look for prune.failed in their logs, or run `postroom prune`",
                )
            )  # fmt: skip
    if kept != settings.keep_delivered_seconds:
        found.append(
            warning(
                "retention",
                f"the relay keeps delivered messages for {age(kept)}, the settings here say "
                f"{age(settings.keep_delivered_seconds)}",
                "use one postroom.toml for all",
            )
        )  # fmt: skip
    ((overflow,),) = await patient.link.query(OUTBOX, "archive_overflow")
    if overflow:
        found.append(
            warning(
                "retention", f"{overflow} delivered messages had no partition of their day",
                "they are kept and pruned with the others; see that a relay runs every day",
            )
        )  # fmt: skip
    return found or [fine("retention", "nothing is kept longer than it should be")]


async def _inbox(patient: Patient) -> list[Check]:
    """What may still come to a consumer must not be older than its memory of what it handled."""
    _, _, inbox = (await patient.link.query(ROOM, "oldest_kept"))[0]
    if inbox is None:
        return []
    keep = patient.settings.keep_inbox_seconds
    meta = await patient.link.query(OUTBOX, "meta_read", item="keep_delivered_seconds")
    ((letter,),) = await patient.link.query(CONSUMERS, "oldest_letter")
    delivered = int(meta[0][0]) if meta else patient.settings.keep_delivered_seconds
    late = "one that comes so late is handled again"
    found = []
    if delivered > keep:
        found.append(
            warning(
                "inbox",
                f"consumers remember for {age(keep)}, and delivered messages may be replayed for "
                f"{age(delivered)}: {late}",
                "raise keep_inbox_seconds, or lower keep_delivered_seconds",
            )
        )
    if (letter or 0) > keep:
        found.append(
            warning(
                "inbox",
                f"consumers remember for {age(keep)}, and a dead letter of a message made "
                f"{age(letter)} ago may be redriven: {late}",
                "raise keep_inbox_seconds, or discard it",
            )
        )
    return found or [
        fine("inbox", "consumers remember longer than anything may be replayed or redriven")
    ]


async def _keys(patient: Patient) -> list[Check]:
    """Requests nobody knows the end of wait for a person; resumable ones for a worker."""
    limit = int(patient.limits.age_seconds)
    ((doubts, oldest, orphans, left),) = await patient.link.query(
        KEYS, "keys_in_trouble", age_s=limit, most=KEYS_COUNTED
    )
    found = []
    if doubts:
        more = "+" if doubts >= KEYS_COUNTED else ""
        found.append(
            warning(
                "keys",
                f"of {doubts:,}{more} requests nobody knows whether they were carried out, the "
                f"oldest came {age(oldest)} ago",
                "`postroom keys list --status indeterminate`, look where they would have left a "
                "trace, then `postroom keys resolve`; a `verify` function does so by itself",
            )
        )
    if orphans:
        more = "+" if orphans >= KEYS_COUNTED else ""
        found.append(
            warning(
                "keys",
                f"{orphans:,}{more} resumable requests are at rest, the first for {age(left)}",
                "run a Finisher for their operations",
            )
        )
    return found or [fine("keys", f"no request is in doubt for longer than {age(limit)}")]


async def _ledger(patient: Patient) -> list[Check]:
    """Requests nobody knows the end of, those whose end was never written down, and those that are
    asked for again and again."""
    limit = int(patient.limits.age_seconds)
    ((unknown, stranded, asked),) = await patient.link.query(
        ROOM, "ledger_in_trouble", age_s=limit, most=KEYS_COUNTED
    )
    found = []
    if unknown:
        found.append(
            warning(
                "ledger",
                f"of {unknown:,} requests nobody knows whether they were carried out",
                "`postroom ledger list --state unknown`, ask the receiver, then `postroom ledger "
                "resolve`; an adapter with a `lookup` asks by itself",
            )
        )
    if stranded:
        found.append(
            warning(
                "ledger",
                f"{stranded:,} requests have no end, and no message that waits: a relay older than "
                "the ledger has sent them",
                "upgrade every relay, ask the receiver, then `postroom ledger resolve`",
            )
        )
    if asked:
        found.append(
            warning(
                "ledger",
                f"{asked:,} requests accepted more than {age(limit)} ago may have been carried "
                "out, and wait until somebody can say so",
                "`postroom ledger show` has the reason: mend the receiver or the adapter's "
                "`lookup`; or `postroom messages cancel`, ask yourself, then `postroom ledger "
                "resolve`",
            )
        )
    return found or [fine("ledger", "what became of each request is known, or its message waits")]


async def _routes(patient: Patient) -> list[Check]:
    recorded = patient.state["routes"]
    if not patient.routes.urls or recorded is None:
        return []
    mine = patient.routes.fingerprint(redact_url)
    if mine == recorded:
        return [fine("routes", "they are those on record")]
    return [
        warning(
            "routes",
            f"the routes here ({Routes.describe(mine)}) differ from those on record "
            f"({Routes.describe(recorded)})",
            "correct them, or start a relay once with --rebind",
        )
    ]  # fmt: skip


_CHECKS: tuple[Checker, ...] = (
    *(_workers, _consumers, _lanes, _backlog, _destinations, _dead_letters, _ids, _retention),
    _inbox,
    _keys,
    _ledger,
    _clocks,
    _routes,
)
