"""What is written about a key, as flows: they run in the caller's transaction or in one of ours."""

from __future__ import annotations

import uuid
from contextlib import suppress

from postroom.flow import Flow, Statement, Value
from postroom.idempotency.rules import (
    MODES,
    Answer,
    Claim,
    Doubtful,
    Mode,
    Name,
    Record,
    Running,
    Verdict,
    judge,
    owned,
)
from postroom.leasing import lease_us, leased

__all__ = [
    "ROOM",
    "adopt",
    "advance",
    "beat",
    "claim",
    "doubt",
    "fail",
    "finish",
    "give_back",
    "look",
    "orphans",
    "patiently",
    "settle",
    "sweep",
]

ROOM = __package__ or "postroom.idempotency"
TRIES = 3
ERROR_CHARACTERS = 1000
_SEPARATOR = "\x1f"


def new_owner() -> str:
    """A token for one claim: no two are alike."""
    return uuid.uuid4().hex


def claim(
    name: Name,
    fingerprint: str,
    mode: Mode,
    *,
    keep_seconds: float,
    lease_seconds: float | None = None,
    request: bytes | None = None,
    owner: str | None = None,
) -> Flow[Verdict]:
    """Claim a key, or learn what became of it. Nothing is carried out without a claim."""
    token = owner or new_owner()
    values: dict[str, Value] = {
        **owned(name)._asdict(),
        "fingerprint": fingerprint,
        "mode": MODES[mode],
        "owner": token,
        "lease_us": None if lease_seconds is None else lease_us(lease_seconds),
        "keep_us": int(keep_seconds * 1e6),
        "request": request,
    }
    for _ in range(TRIES):
        rows = yield Statement(ROOM, "claim", values)
        if not rows:  # somebody committed it after our snapshot; or it was pruned meanwhile
            rows = yield Statement(ROOM, "look", name._asdict())
        if rows:
            verdict = judge(Record._make(rows[0]), name, fingerprint, token)
            if isinstance(verdict, Doubtful) and verdict.lost:
                told = yield Statement(ROOM, "lose", {**name._asdict(), "epoch": verdict.epoch})
                if not told:
                    continue  # its owner was alive after all, or has just finished
            if isinstance(verdict, Running) and (yield from _capped(name, verdict, lease_seconds)):
                continue
            return verdict
    return Running(1.0)  # it changes hands as fast as it is claimed


def _capped(name: Name, running: Running, lease_seconds: float | None) -> Flow[bool]:
    """Whether a lease that ends too late was cut to one lease from now: the clock went back."""
    if lease_seconds is None or running.retry_after_seconds <= leased(lease_seconds):
        return False
    values = {**name._asdict(), "lease_us": lease_us(lease_seconds)}
    return bool((yield Statement(ROOM, "cap", values)))


def patiently(claiming: Flow[Verdict], wait_seconds: float | None) -> Flow[Verdict]:
    """Claim, and wait no longer for another's transaction than this; then it is a conflict."""
    if wait_seconds is None:
        return (yield from claiming)
    ((before,),) = yield Statement(ROOM, "patience", {})
    yield Statement(ROOM, "be_patient", _patience(wait_seconds))
    try:
        verdict = yield from claiming
    except Exception:
        # What was set for a session of MariaDB's would stay; PostgreSQL hears nothing more and
        # forgets it with the transaction.
        with suppress(Exception):
            yield Statement(ROOM, "be_patient", _patience(before))
        raise
    yield Statement(ROOM, "be_patient", _patience(before))
    return verdict


def look(name: Name) -> Flow[Record | None]:
    """The record of a key as it stands."""
    rows = yield Statement(ROOM, "look", name._asdict())
    return Record._make(rows[0]) if rows else None


def finish(mine: Claim, answer: Answer, *, keep_seconds: float) -> Flow[bool]:
    """Write down the answer; False: the key is somebody else's by now, and nothing was written."""
    body = None if answer.absent else answer.body
    values = _of(mine, keep_seconds) | {
        "response_status": answer.status,
        "response_headers": answer.headers_json(),
        "response_body": body,
        "body_absent": answer.absent,
    }
    return bool((yield Statement(ROOM, "finish", values)))


def fail(
    mine: Claim, error: str, *, keep_seconds: float, delay_seconds: float | None = None
) -> Flow[bool]:
    """Nothing was done: the same request may be tried again."""
    delay = None if delay_seconds is None else int(delay_seconds * 1e6)
    values = _of(mine, keep_seconds) | {"error": error[:ERROR_CHARACTERS], "delay_us": delay}
    return bool((yield Statement(ROOM, "fail", values)))


def doubt(mine: Claim, error: str) -> Flow[bool]:
    """Whether anything was done is not known."""
    values = _of(mine) | {"error": error[:ERROR_CHARACTERS]}
    return bool((yield Statement(ROOM, "doubt", values)))


def give_back(name: Name, owner: str) -> Flow[bool]:
    """Undo a claim that nobody carries out, if it was made at all."""
    record = yield from look(name)
    if record is None or (record.owner, record.status) != (owner, "pending"):
        return False
    return (yield from fail(Claim(name, owner, record.epoch), "given up", keep_seconds=0))


def beat(mine: Claim, lease_seconds: float) -> Flow[bool]:
    """Keep the lease for a while longer; False: it is lost."""
    values = _of(mine) | {"lease_us": lease_us(lease_seconds)}
    return bool((yield Statement(ROOM, "beat", values)))


def advance(mine: Claim, point: str, progress: str, lease_seconds: float) -> Flow[bool]:
    """Reach a recovery point, in the transaction of the work that leads to it."""
    values = _of(mine) | {
        "recovery_point": point,
        "progress": progress,
        "lease_us": lease_us(lease_seconds),
    }
    return bool((yield Statement(ROOM, "advance", values)))


def settle(
    name: Name, epoch: int, answer: Answer | None, *, why: str | None, keep_seconds: float
) -> Flow[bool]:
    """End a doubt: it was done and answered so, or (None) it was not and may be tried again."""
    values: dict[str, Value] = {
        **name._asdict(),
        "epoch": epoch,
        "status": "failed" if answer is None else "completed",
        "response_status": None if answer is None else answer.status,
        "response_headers": None if answer is None else answer.headers_json(),
        "response_body": None if answer is None or answer.absent else answer.body,
        "body_absent": None if answer is None else answer.absent,
        "error": None if why is None else why[:ERROR_CHARACTERS],
        "keep_us": int(keep_seconds * 1e6),
    }
    return bool((yield Statement(ROOM, "settle", values)))


def orphans(operations: list[str], rows: int) -> Flow[list[tuple[Name, int, int]]]:
    """Resumable requests that nobody is at: name, epoch, attempts."""
    values: dict[str, Value] = {"operations": _SEPARATOR.join(operations), "rows": rows}
    found = yield Statement(ROOM, "orphans", values)
    return [(Name(row[0], row[1], row[2]), int(row[3]), int(row[4])) for row in found]


def adopt(name: Name, epoch: int, *, lease_seconds: float) -> Flow[tuple[Claim, Record] | None]:
    """Take a request over that nobody is at; None: somebody else did."""
    owner = new_owner()
    values: dict[str, Value] = {
        **name._asdict(),
        "epoch": epoch,
        "owner": owner,
        "lease_us": lease_us(lease_seconds),
    }
    if not (yield Statement(ROOM, "adopt", values)):
        return None
    rows = yield Statement(ROOM, "look", name._asdict())
    record = Record._make(rows[0])
    return Claim(name, owner, record.epoch), record


def sweep(rows: int) -> Flow[list[Name]]:
    """Call what its owner has left indeterminate, whether or not its client comes back."""
    yield Statement(ROOM, "cap_all", {})
    found = yield Statement(ROOM, "lost", {"rows": rows})
    names = []
    for scope, operation, key, epoch in found:
        name = Name(scope, operation, key)
        if (yield Statement(ROOM, "lose", {**name._asdict(), "epoch": int(epoch)})):
            names.append(name)
    return names


def _patience(wait: float | str) -> dict[str, Value]:
    """As a new wish in seconds, or as the database said it before."""
    if isinstance(wait, str):  # PostgreSQL's own form
        return {"wait": wait, "wait_s": 0}
    return {"wait": f"{max(1, int(wait * 1000))}ms", "wait_s": max(1, int(wait))}


def _of(mine: Claim, keep_seconds: float | None = None) -> dict[str, Value]:
    values: dict[str, Value] = {**mine.name._asdict(), "owner": mine.owner, "epoch": mine.epoch}
    if keep_seconds is not None:
        values["keep_us"] = int(keep_seconds * 1e6)
    return values
