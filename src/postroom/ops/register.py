"""What an operator can see of the ledger, and say of what nobody could know."""

from __future__ import annotations

import datetime as dt
import json
import uuid
from typing import Any

from postroom import audit
from postroom.dead_letters import store as letters
from postroom.errors import ConfigurationError, Refused
from postroom.flow import Flow, Statement
from postroom.ledger import store
from postroom.ledger.rules import STATES, Entry
from postroom.ops.desk import checked_reason, desk
from postroom.ops.repairs import ROOM as REPAIRS

__all__ = ["ledger_list", "ledger_show", "resolve"]


async def ledger_list(
    url: str, *, state: str | None = None, rows: int = 100
) -> list[dict[str, Any]]:
    """The last requests, newest first; or those in one state."""
    if state is not None and state not in STATES:
        raise ConfigurationError(f"a request is {', '.join(STATES)}; not {state!r}.")
    async with desk(url) as link:
        return [_told(entry) for entry in await link.transact(store.newest(state, rows))]


async def ledger_show(url: str, name: str, *, scope: str | None = None) -> dict[str, Any]:
    """Everything the ledger knows of one request, named by its key or its id."""
    async with desk(url) as link:
        entry = await link.transact(_find(name, scope))
    return {
        **_told(entry),
        "digest": entry.digest,
        "error": entry.error,
        "adapter": entry.adapter,
        "note": entry.note,
        "updated_at": _moment(entry.updated_us),
        "request": json.loads(entry.request),
        "answer": entry.answer,
    }


async def resolve(
    url: str, name: str, state: str, *, why: str, scope: str | None = None
) -> dict[str, Any]:
    """Say what became of a request that is unknown; its dead letter is discarded with it. So may
    be said of one that has no end though no message of it waits."""
    why = checked_reason(why)
    if state not in ("succeeded", "failed"):
        raise ConfigurationError("a request is resolved as succeeded or as failed.")
    async with desk(url) as link:
        return _told(await link.transact(_resolve(name, scope, state, why)))


def _resolve(name: str, scope: str | None, state: str, why: str) -> Flow[Entry]:
    id = (yield from _find(name, scope)).id
    found = yield Statement(letters.ROOM, "where_is", {"id": id, "source": letters.OUTBOX})
    waiting = [letters.Letter(id, *row) for row in found]
    # The lanes first, as a settle does: neither sees the other half-way.
    yield from letters.lock(waiting)
    yield from store.lock(id)
    entry = yield from store.find_id(id)
    assert entry is not None
    stranded = not entry.finished and not (yield Statement(REPAIRS, "waiting", {"id": id}))
    if stranded:  # settled by a relay that knew of no ledger
        yield from store.give_up(id, why, doubtful=True)
    elif entry.state != "unknown" or not entry.finished:
        if not entry.finished:
            raise Refused(
                f"request {entry.key!r} is being tried still, so there is nothing to resolve: to "
                f"end it, take it back first: `postroom messages cancel {id} --reason …`"
            )
        raise Refused(
            f"request {entry.key!r} is {entry.state} already, so there is nothing to resolve."
        )
    found = yield Statement(letters.ROOM, "where_is", {"id": id, "source": letters.OUTBOX})
    for row in found:
        letter = letters.Letter(id, *row)
        if letter.state == "dead":
            yield from letters.give_up(letter, why)
    yield from store.resolve(id, state, why)
    yield audit.record("ledger.resolve", f"{id} {state}", why)
    return entry._replace(state=state, note=why)  # type: ignore[arg-type]


def _find(name: str, scope: str | None) -> Flow[Entry]:
    """By its key, or by its id."""
    if scope is not None:
        entry = yield from store.find(scope, name)
        found = [entry] if entry else []
    else:
        found = yield from store.find_key(name)
    if not found and _is_id(name):
        entry = yield from store.find_id(str(uuid.UUID(name)))
        found = [entry] if entry else []
    if not found:
        raise Refused(f"the ledger has no request {name!r}; `postroom ledger list` shows them.")
    if len(found) > 1:
        scopes = " and ".join(entry.scope for entry in found)
        raise Refused(f"{name!r} stands in {scopes}: say which with --scope.")
    return found[0]


def _is_id(name: str) -> bool:
    try:
        uuid.UUID(name)
    except ValueError:
        return False
    return True


def _told(entry: Entry) -> dict[str, Any]:
    return {
        "id": entry.id,
        "scope": entry.scope,
        "key": entry.key,
        "state": entry.state,
        "finished": entry.finished,
        "attempts": entry.attempts,
        "error_code": entry.error_code,
        "accepted_at": _moment(entry.accepted_us),
        "finished_at": _moment(entry.finished_us),
    }


def _moment(microseconds: int | None) -> str | None:
    if microseconds is None:
        return None
    when = dt.datetime.fromtimestamp(microseconds / 1e6, dt.UTC)
    return when.isoformat(timespec="milliseconds")
