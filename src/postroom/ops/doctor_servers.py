"""What `doctor` looks for in each kind of database: settings, and whoever stands in the way."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from postroom.databases.pooling import pooling
from postroom.messages import DEFAULT_MAX_BYTES
from postroom.ops.doctor import Check, Checker, Patient, fine, warning, wrong
from postroom.ops.house import ROOM
from postroom.ops.screen import age

__all__ = ["CHECKS"]

DAYS_AHEAD = 3
MANY_DEAD_ROWS = 1_000_000
LARGE_WAL_BYTES = 256 * 1024 * 1024
NETWORK_FILE_SYSTEMS = (
    *("nfs", "nfs4", "cifs", "smb", "smb3", "smbfs", "9p", "afs", "ceph", "glusterfs", "sshfs"),
)
TABLE_OPTION = "autovacuum_vacuum_scale_factor=0"


async def _settings(patient: Patient) -> dict[str, str]:
    rows = await patient.link.query(ROOM, "server_settings")
    return {str(name): str(value) for name, value in rows}


async def _publishers(patient: Patient) -> list[Check]:
    """Whoever has published and neither committed nor rolled back keeps readers behind it."""
    rows = await patient.link.query(ROOM, "open_publishers")
    limit = patient.limits.publisher_seconds
    found = [
        warning(
            "publishers",
            f"process {pid} ({who}, {state}) has an open transaction for {age(seconds)}",
            "let it commit or roll back: a transaction that publishes should be short",
        )
        for pid, who, seconds, state in rows
        if seconds > limit
    ]
    return found or [fine("publishers", f"none is open for longer than {age(limit)}")]


# ── PostgreSQL ─────────────────────────────────────────────────────────────────────────────────


async def _isolation(patient: Patient) -> list[Check]:
    level = (await _settings(patient)).get("default_transaction_isolation", "")
    if level == "serializable":
        return [
            warning(
                "isolation", "the default isolation is serializable",
                "publishers must be ready to try again; relays use read committed by themselves",
            )
        ]  # fmt: skip
    return [fine("isolation", f"the default is {level}")]


async def _durability(patient: Patient) -> list[Check]:
    settings = await _settings(patient)
    off = [name for name in ("fsync", "synchronous_commit") if settings.get(name) == "off"]
    if off:
        return [
            warning(
                "durability", f"{' and '.join(off)} is off: a commit may be lost in a crash",
                "turn it on where committed messages must not be lost",
            )
        ]  # fmt: skip
    return [fine("durability", "a commit is on disk")]


async def _vacuum(patient: Patient) -> list[Check]:
    settings = await _settings(patient)
    ((options, dead, live, seconds),) = await patient.link.query(ROOM, "outbox_health")
    found = []
    off = [name for name in ("autovacuum", "track_counts") if settings.get(name) != "on"]
    if off:
        found.append(
            wrong("vacuum", f"{' and '.join(off)} is off: the outbox will grow", "turn it on")
        )
    if TABLE_OPTION not in options:
        found.append(
            warning(
                "vacuum", "the outbox has lost its own autovacuum settings",
                "take them from `postroom db sql`: ALTER TABLE postroom.outbox SET (…)",
            )
        )  # fmt: skip
    if dead > MANY_DEAD_ROWS:
        found.append(
            warning(
                "vacuum",
                f"the outbox has {dead:,} dead rows beside {live:,} live ones, vacuumed "
                f"{age(seconds, 'never')} ago",
                "see what pins them, below; then VACUUM postroom.outbox",
            )
        )  # fmt: skip
    return found or [fine("vacuum", f"{dead:,} dead rows in the outbox")]


async def _horizon(patient: Patient) -> list[Check]:
    long_ms = int(patient.limits.transaction_seconds * 1000)
    rows = await patient.link.query(ROOM, "pinned", long_ms=long_ms)
    found = [
        warning(
            "horizon",
            f"{what} ({who}) keeps dead rows" + ("" if seconds is None else f" for {age(seconds)}"),
            "end it" if "slot" not in str(what) else "drop the slot if nobody will read it again",
        )
        for what, who, seconds in rows
    ]
    return found or [fine("horizon", "nothing keeps dead rows for long")]


async def _partitions(patient: Patient) -> list[Check]:
    ((days,),) = await patient.link.query(ROOM, "days_ahead")
    if not days:
        return [
            wrong(
                "partitions", "the archive has no partition for today",
                "start a relay: it makes them a week ahead",
            )
        ]  # fmt: skip
    if days <= DAYS_AHEAD:
        return [
            warning(
                "partitions", f"the archive has partitions for {days} days only",
                "start a relay: it makes them a week ahead",
            )
        ]  # fmt: skip
    return [fine("partitions", f"the archive has them for {days} days")]


async def _pooler(patient: Patient) -> list[Check]:
    """Relays work through a pooler in transaction mode, but nobody can wake them through it."""
    mode = await pooling(patient.database)
    if mode == "none":
        return [fine("pooler", "connections are our own")]
    if mode == "transaction" and not patient.settings.notify_url:
        return [
            warning(
                "pooler",
                "a pooler in transaction mode stands between, so relays poll and are not woken",
                "set notify_url to a URL that leads to PostgreSQL itself",
            )
        ]
    return [fine("pooler", f"a pooler stands between, its mode is {mode}")]


# ── MariaDB ────────────────────────────────────────────────────────────────────────────────────


async def _variables(patient: Patient) -> list[Check]:
    settings = await _settings(patient)
    found = []
    if settings.get("innodb_flush_log_at_trx_commit") != "1":
        found.append(
            warning(
                "durability",
                "innodb_flush_log_at_trx_commit is not 1: a commit may be lost in a crash",
                "set it to 1 where committed messages must not be lost",
            )
        )
    if settings.get("log_bin", "OFF").upper() in ("ON", "1"):
        if settings.get("binlog_format", "").upper() == "STATEMENT":
            found.append(
                wrong(
                    "binary log", "binlog_format is STATEMENT, which READ COMMITTED cannot use",
                    "set it to ROW or MIXED",
                )
            )  # fmt: skip
        if settings.get("sync_binlog") == "0":
            found.append(
                warning(
                    "binary log", "sync_binlog is 0: after a crash replicas may lack commits",
                    "set it to 1",
                )
            )  # fmt: skip
    level = settings.get("transaction_isolation") or settings.get("tx_isolation") or ""
    if level in ("READ-UNCOMMITTED", "SERIALIZABLE"):
        found.append(
            warning("isolation", f"the default isolation is {level}", "use READ-COMMITTED")
        )
    packet = int(settings.get("max_allowed_packet") or 0)
    if packet < 2 * DEFAULT_MAX_BYTES:
        found.append(
            wrong(
                "packets",
                f"max_allowed_packet is {packet:,} bytes, and a message may have "
                f"{DEFAULT_MAX_BYTES:,}, which its statement can double",
                "set it to 16M or more",
            )
        )
    return found or [fine("settings", "durability, isolation, binary log and packets are fine")]


# ── SQLite ─────────────────────────────────────────────────────────────────────────────────────


async def _file(patient: Patient) -> list[Check]:
    path = Path(patient.database.target.url.database or "")
    found = [
        fine("publishers", "who has the file open cannot be known with SQLite"),
        fine(
            "settings",
            "synchronous and busy_timeout belong to each connection: publishers should use NORMAL "
            "or FULL, and some seconds",
        ),
    ]
    kind = _file_system(path)
    if _is_network(kind):
        found.append(
            wrong(
                "file", f"{path} is on a network file system ({kind}), whose locks WAL cannot use",
                "put it on a local disk",
            )
        )  # fmt: skip
    wal = path.with_name(path.name + "-wal")
    size = wal.stat().st_size if wal.exists() else 0
    if size > LARGE_WAL_BYTES:
        found.append(
            warning(
                "file", f"{wal.name} has {size:,} bytes: a reader keeps it from being folded in",
                "end the transaction that has been reading for long",
            )
        )  # fmt: skip
    if not os.access(path.parent, os.W_OK):
        found.append(wrong("file", f"{path.parent} cannot be written to", "give the right"))
    return found


def _file_system(path: Path, mounts: str = "/proc/mounts") -> str | None:
    """The kind of file system a path is on, where the system tells."""
    if sys.platform != "linux" or not Path(mounts).exists():
        return None
    place, best, kind = path.resolve(), -1, None
    for line in Path(mounts).read_text(encoding="utf-8", errors="replace").splitlines():
        words = line.split()
        if len(words) > 2 and place.is_relative_to(words[1]) and len(words[1]) > best:
            best, kind = len(words[1]), words[2]
    return kind


def _is_network(kind: str | None) -> bool:
    return bool(kind) and str(kind).split(".")[-1] in NETWORK_FILE_SYSTEMS


CHECKS: dict[str, tuple[Checker, ...]] = {
    "postgresql": (
        *(_partitions, _publishers, _horizon, _vacuum, _isolation, _durability),
        _pooler,
    ),
    "mysql": (_publishers, _variables),
    "sqlite": (_file,),
}
