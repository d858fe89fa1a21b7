"""Ids that callers choose: one id stands for one message.

Promise: a second message with a known id and the same content is a duplicate and writes nothing;
one with other content is refused. Ids that Postroom makes are unique, and are not claimed.

The claim of an id is a row of the dedup table. Its name begins with a control character, which no
dedup key of a caller may hold; in the place of the holder's id stands a mark of the content.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Mapping, Sequence

from postroom.errors import IdReused, PublishError
from postroom.flow import Flow, Statement
from postroom.messages import Encoded

__all__ = ["claim", "find", "mark_of", "refuse_other"]

ROOM = "postroom.outbox.writing"
TRIES = 10
_PREFIX = "\x1fid "
# The first bytes of a mark identify the content, the others the call.
_CONTENT_BYTES = 12


def mark_of(message: Encoded) -> str:
    """Return a new mark for a message: a UUID made of its content and of this call.

    Headers and times are left out: a retry has another trace context.
    """
    fields = [message.topic, message.key, message.type, message.content_type]
    fields += [message.aggregate_type, message.aggregate_id]
    digest = hashlib.sha256(json.dumps(fields).encode() + b"\x00" + message.payload).digest()
    random = os.urandom(16 - _CONTENT_BYTES)
    return str(uuid.UUID(bytes=digest[:_CONTENT_BYTES] + random))


def find(marks: Mapping[str, str]) -> Flow[set[str]]:
    """Return those of these ids that stand for the same content already; raise for other content.

    `marks` are the marks of the messages by id. Nothing is claimed, so that a refused call leaves
    nothing behind in a transaction that goes on.
    """
    return refuse_other(marks, (yield from _read("find_ids", marks)))


def claim(marks: Mapping[str, str]) -> Flow[set[str]]:
    """Claim ids; returns those that another transaction claimed first, for the same content."""
    names = sorted(marks)
    claims = _claims([_PREFIX + id for id in names], [marks[id] for id in names])
    for _ in range(TRIES):
        yield claims
        known = yield from _read("read_ids", marks)
        if len(known) == len(marks):
            return refuse_other(marks, known)
        # A row was pruned between the two statements: claim again.
    raise PublishError("ids are deleted as fast as they are claimed: try again")


def _claims(names: Sequence[str], marks: Sequence[str]) -> Statement:
    if len(names) == 1:
        # Not as many rows of one: after a cancelled executemany SQLAlchemy leaves a connection of
        # aiosqlite or asyncmy, and its locks, to the garbage collector.
        return Statement(ROOM, "claim_ids", {"dedup_key": names[0], "claim": marks[0]})
    return Statement(ROOM, "claim_ids", columns={"dedup_key": names, "claim": marks})


def _read(name: str, marks: Mapping[str, str]) -> Flow[dict[str, str]]:
    names = json.dumps([_PREFIX + id for id in sorted(marks)])
    rows = yield Statement(ROOM, name, {"names": names})
    return {str(key).removeprefix(_PREFIX): str(mark) for key, mark in rows}


def refuse_other(marks: Mapping[str, str], known: Mapping[str, str]) -> set[str]:
    """Return the ids that other calls hold for the same content; raise if one has other content."""
    held = {id: mark for id, mark in known.items() if mark != marks[id]}
    for id, mark in held.items():
        if _content(mark) != _content(marks[id]):
            raise IdReused(f"another message has the id {id}: give each message an id of its own")
    return set(held)


def _content(mark: str) -> bytes:
    return uuid.UUID(mark).bytes[:_CONTENT_BYTES]
