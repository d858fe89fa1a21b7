"""What an operator can see of idempotency keys, and how a doubt is ended by a person."""

from __future__ import annotations

import json
from typing import Any

from postroom import audit
from postroom.errors import ConfigurationError, Refused
from postroom.flow import Flow
from postroom.idempotency import store
from postroom.idempotency.exchange import tell_doubt
from postroom.idempotency.policy import DAY_SECONDS
from postroom.idempotency.rules import Answer, Name, checked_answer
from postroom.ops.desk import checked_reason, desk, readable

__all__ = ["ROOM", "STATUSES", "keys_list", "keys_resolve", "keys_show"]

KEYS = store.ROOM
ROOM = __package__ or "postroom.ops.keys"
STATUSES = ("pending", "completed", "failed", "indeterminate")
SWEPT_ROWS = 1000
SCOPES = 20  # of those that have the same key, named to whoever must choose
_LOST = "the process that had it was lost"
_COLUMNS = (
    *("scope", "operation", "key", "status", "mode", "attempts", "epoch", "recovery_point"),
    *("response_status", "error", "created_at", "lease_left_seconds", "expires_in_seconds"),
)


async def keys_list(
    url: str,
    *,
    status: str | None = None,
    operation: str | None = None,
    scope: str | None = None,
    rows: int = 100,
) -> list[dict[str, Any]]:
    """Keys, the longest kept first."""
    if status is not None and status not in STATUSES:
        raise ConfigurationError(f"{status!r} is no status: choose of {', '.join(STATUSES)}.")
    name, wanted = "keys_list", {"status": status, "operation": operation, "scope": scope}
    if status in ("failed", "indeterminate"):
        name = "keys_troubled"
    async with desk(url) as link:
        # What is lost is in doubt, though nobody asked; and nobody else will tell of it now.
        for lost in await link.transact(store.sweep(SWEPT_ROWS)):
            tell_doubt(lost, _LOST)
        found = await link.query(ROOM, name, **wanted, rows=rows)
    return [_told(row) for row in found]


async def keys_show(
    url: str, operation: str, key: str, *, scope: str | None = None, body: bool = False
) -> dict[str, Any]:
    """All that is known of one key. The body of its answer is somebody's private matter, so it is
    shown only when asked for."""
    told = await _one(url, operation, key, scope)
    name = {"scope": told["scope"], "operation": operation, "key": key}
    async with desk(url) as link:
        rows = await link.query(ROOM, "keys_answer", **name)
    headers, content, absent = rows[0] if rows else (None, None, None)
    told["response_headers"] = json.loads(headers) if headers else None
    told["response_bytes"] = None if content is None else len(content)
    told["body_absent"] = absent
    if body and content is not None:
        told["response_body"] = bytes(content).decode("utf-8", "backslashreplace")
    return told


async def keys_resolve(
    url: str,
    operation: str,
    key: str,
    *,
    answer: Answer | None,
    why: str,
    scope: str | None = None,
    keep_seconds: int = DAY_SECONDS,
) -> dict[str, Any]:
    """End a doubt: it was done and is answered so, or (None) it was not done and may be tried
    again. What was decided, by whom and why stands in the audit."""
    checked_reason(why)
    answer = None if answer is None else checked_answer(answer)
    told = await _one(url, operation, key, scope)
    if told["status"] == "pending":
        # Sees what no sweep has found yet: a transaction that was committed without its answer.
        left = {"scope": told["scope"], "operation": operation, "key": key, "epoch": told["epoch"]}
        async with desk(url) as link:
            if await link.query(KEYS, "lose", **left):
                tell_doubt(Name(told["scope"], operation, key), _LOST)
        told = await _one(url, operation, key, told["scope"])
    if told["status"] != "indeterminate":
        raise Refused(
            f"{operation} with key {key!r} is {told['status']}: only what is indeterminate is "
            "resolved."
        )
    name = Name(told["scope"], operation, key)
    subject = f"{operation} {key}: {'not done' if answer is None else answer.status}"

    def resolve() -> Flow[bool]:
        settled = yield from store.settle(
            name, told["epoch"], answer, why=why, keep_seconds=keep_seconds
        )
        if settled:
            yield audit.record("keys.resolve", subject, why)
        return settled

    async with desk(url) as link:
        if not await link.transact(resolve()):
            raise Refused(f"{operation} with key {key!r} has just been decided by somebody else.")
    return await _one(url, operation, key, told["scope"])


async def _one(url: str, operation: str, key: str, scope: str | None) -> dict[str, Any]:
    named = {"operation": operation, "key": key, "scope": scope}
    async with desk(url) as link:
        found = await link.query(ROOM, "keys_named", **named, rows=SCOPES + 1)
    if not found:
        whose = "" if scope is None else f" of {scope}"
        raise Refused(f"{operation} knows no key {key!r}{whose}: it never came, or was pruned.")
    if len(found) > 1:
        scopes = [_told(row)["scope"] for row in found]
        scopes[SCOPES:] = ["…"] if len(scopes) > SCOPES else []
        whose = ", ".join(scopes)
        raise ConfigurationError(f"the key {key!r} belongs to several: say --scope ({whose}).")
    return _told(found[0])


def _told(row: Any) -> dict[str, Any]:
    told = dict(zip(_COLUMNS, row, strict=True))
    for name in ("lease_left_seconds", "expires_in_seconds"):
        told[name] = None if told[name] is None else float(told[name]) / 1000
    return readable(told)
