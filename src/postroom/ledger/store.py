"""The ledger's database work, as flows, in the transaction of whoever has something to say.

A publisher enters a request, a relay writes notes of it with its settle, a person resolves what
nobody can know.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from postroom.flow import Flow, Rows, Statement, Value
from postroom.ledger.rules import Entry, Note

__all__ = [
    "ROOM",
    "Wish",
    "enter",
    "entries",
    "find",
    "find_id",
    "find_key",
    "give_up",
    "known",
    "lock",
    "look",
    "newest",
    "reopen",
    "resolve",
    "write",
]

ROOM = __package__ or "postroom.ledger"


@dataclass(frozen=True, slots=True)
class Wish:
    """A request to be entered: under which key, what it is, and which message carries it."""

    id: str
    scope: str
    key: str
    digest: str
    request: bytes


def enter(wish: Wish) -> Flow[bool]:
    """Enter a request; returns whether its key was free. If not, nothing is written."""
    rows = yield _query(
        "enter",
        id=wish.id,
        scope=wish.scope,
        key=wish.key,
        digest=wish.digest,
        request=wish.request,
    )
    return bool(rows and rows[0][0])


def look(scope: str, key: str) -> Statement:
    """The question what stands under a key; its answer is for `entries`."""
    return _query("find", scope=scope, key=key)


def find(scope: str, key: str) -> Flow[Entry | None]:
    """What stands under a key."""
    rows = yield look(scope, key)
    return next(iter(entries(rows)), None)


def known(scope: str, key: str) -> Flow[Entry]:
    """What stands under a key that is taken, whatever this transaction saw before."""
    rows = yield _query("known", scope=scope, key=key)
    return entries(rows)[0]  # nothing is ever taken out of the ledger


def find_id(id: str) -> Flow[Entry | None]:
    """What stands under the id of a message."""
    rows = yield _query("find_id", id=id)
    return next(iter(entries(rows)), None)


def find_key(key: str) -> Flow[list[Entry]]:
    """What stands under a key in whatever scope: at most two, to know whether it is one."""
    return entries((yield _query("find_key", key=key)))


def newest(state: str | None, rows: int) -> Flow[list[Entry]]:
    """The last requests, newest first, or those in one state."""
    if state is None:
        return entries((yield _query("newest", rows=rows)))
    return entries((yield _query("newest_of", state=state, rows=rows)))


def write(notes: Iterable[Note]) -> Flow[None]:
    """What a relay has to say, with its settle. What is finished stays as it is."""
    said = list(notes)
    for name, ends in (("finish", True), ("progress", False)):
        many = [_values(note) for note in said if note.ends is ends]
        if len(many) == 1:
            yield Statement(ROOM, name, many[0])
        elif many:
            yield Statement(ROOM, name, many=many)


def reopen(ids: Iterable[str]) -> Flow[None]:
    """The messages of these are sent again; those that have no row here are none of ours."""
    if many := [{"id": id} for id in ids]:
        yield Statement(ROOM, "reopen", many=many)


def give_up(id: str, why: str, *, doubtful: bool) -> Flow[None]:
    """The message of a request was taken back; `doubtful`: it may have arrived all the same. An
    error is shown to the client: why it was taken back stands in the note, for operators."""
    error = "an operator took it back"
    yield _query("give_up", id=id, error=error, note=why, doubtful=int(doubtful))


def lock(id: str) -> Flow[None]:
    """Keep everybody else from writing about a request until we commit."""
    yield _query("lock", id=id)


def resolve(id: str, state: str, note: str) -> Flow[None]:
    """A person says what became of a request that nobody knew of."""
    yield _query("resolve", id=id, state=state, note=note)


def _values(note: Note) -> dict[str, Value]:
    return {
        "id": note.id,
        "state": note.state,
        "attempts": note.attempts,
        "answer": note.answer,
        "error_code": note.code,
        "error": note.text,
        "adapter": note.adapter,
    }


def entries(rows: Rows) -> list[Entry]:
    """Rows of the ledger as what they are."""
    return [Entry._make((*row[:5], bytes(row[5]), *row[6:])) for row in rows]


def _query(name: str, **values: Value) -> Statement:
    return Statement(ROOM, name, values)
