"""Writing messages: the flows that run inside the caller's own transaction.

Promise: either every message of a call is written, in the order of the call, or the flow raises and
the caller's rollback takes all of it along. A taken dedup key is a value, never an error; so is a
taken id, unless it stands for other content.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

from postroom.databases.trouble import note_remedy
from postroom.errors import CommitUnknown, PublishError, WrongCall
from postroom.flow import Flow, Statement, Value
from postroom.messages import Encoded
from postroom.outbox.writing import ids

__all__ = ["Item", "Published", "is_committed", "item", "watch", "write"]

ROOM = "postroom.outbox.writing"
_CLAIM_TRIES = 10
_EPOCH = dt.datetime(1970, 1, 1)

_watchers: list[Callable[[str], None]] = []


def watch(watcher: Callable[[str], None]) -> Callable[[], None]:
    """Call `watcher(id)` for every message written in this process, committed or not; returns a
    function that ends it. For tests, which ask what they themselves have published."""
    _watchers.append(watcher)
    return lambda: _watchers.remove(watcher) if watcher in _watchers else None


class Published:
    """What `publish` returns: the message's id, known at once, and whether it was a duplicate.

    Awaiting it returns it, so that `await outbox.publish(session, ...)` is no mistake.
    """

    __slots__ = ("_duplicate", "_id")

    def __init__(self, id: str, duplicate: bool | None = False) -> None:
        self._id = id
        self._duplicate = duplicate

    @property
    def id(self) -> str:
        """The id of the message; of the one that holds the dedup key if this is a duplicate."""
        return self._id

    @property
    def duplicate(self) -> bool:
        """Whether the dedup key or the chosen id was taken, so that nothing was written."""
        if self._duplicate is None:
            raise WrongCall(
                "whether this is a duplicate is not known before the session writes it at its "
                "commit: use `await outbox.publish_async(session, ...)` to know it now"
            )
        return self._duplicate

    def __await__(self) -> Generator[None, None, Published]:
        return self
        yield

    def __repr__(self) -> str:
        state = {True: ", duplicate=True", False: "", None: ", queued"}[self._duplicate]
        return f"Published(id={self._id!r}{state})"


class Item(NamedTuple):
    """A message to be written and how.

    `claim` is the name under which its dedup key is claimed. It is unique to this call: an id that
    the caller chose may be held by an earlier call with the same id, which is a duplicate too.
    """

    message: Encoded
    serialize_key: bool
    claim: str
    chosen_id: bool
    published: Published

    @property
    def plain(self) -> bool:
        """Whether nothing is to be done for it but to write it, now, among the others."""
        return not self.serialize_key and not self.claims and self.message.deliver_us is None

    @property
    def claims(self) -> bool:
        """Whether it may turn out to be a duplicate."""
        return self.chosen_id or self.message.dedup_key is not None

    def tell(self, *, holder: str | None) -> None:
        """Tell the caller that it is written, or that `holder` has its dedup key."""
        self.published._id = holder or self.message.id
        self.published._duplicate = holder is not None

    def untell(self) -> None:
        """It is not written any more: a savepoint around the write was rolled back."""
        self.published._id = self.message.id
        self.published._duplicate = None if self.claims else False


def item(message: Encoded, *, serialize_key: bool, chosen_id: bool) -> Item:
    """A message to be written; `chosen_id` says that the caller gave its id."""
    claim = ids.mark_of(message) if chosen_id else message.id
    known = None if chosen_id or message.dedup_key is not None else False
    return Item(message, serialize_key, claim, chosen_id, Published(message.id, known))


def write(items: Sequence[Item]) -> Flow[None]:
    """Write messages in call order, and tell each `Published` what became of it.

    Locks are taken in sorted order, so that two calls with the same keys never deadlock.
    """
    try:
        if items and all(item.plain for item in items):
            messages = [item.message for item in items]
            yield _insert("insert_outbox", messages)
        else:
            messages = yield from _write_in_parts(items)
    except Exception as error:
        note_remedy(error)
        raise
    for watcher in _watchers:
        for message in messages:
            watcher(message.id)


def _write_in_parts(items: Sequence[Item]) -> Flow[list[Encoded]]:
    """Write what needs more than one statement; returns what was written."""
    holders = yield from _claim(items)
    wanted = [item for item in items if item.claim not in holders] if holders else items
    locked = {(i.message.topic, i.message.key) for i in wanted if i.serialize_key}
    for topic, key in sorted(locked, key=str):
        yield Statement(ROOM, "lock_key", {"topic": topic, "key": key})
    messages = [item.message for item in wanted]
    delayed = [m for m in messages if m.deliver_us is not None]
    hot = [m for m in messages if m.deliver_us is None] if delayed else messages
    if hot:
        yield _insert("insert_outbox", hot)
    if delayed:
        yield _insert("insert_delayed", delayed)
    for item in items:
        item.tell(holder=holders.get(item.claim))
    return messages


def _claim(items: Sequence[Item]) -> Flow[dict[str, str]]:
    """Claim chosen ids and dedup keys; returns the holder for each claim that came too late."""
    holders: dict[str, str] = {}
    chosen = _chosen(items, holders)
    if chosen:
        for id in (yield from ids.find(chosen)):
            holders[chosen.pop(id)] = id
    keyed = [i for i in items if i.message.dedup_key is not None and i.claim not in holders]
    for item in sorted(keyed, key=lambda item: item.message.dedup_key or ""):
        dedup_key = item.message.dedup_key
        holder = yield from _claim_one(dedup_key, item.claim)
        if holder != item.claim:
            holders[item.claim] = holder
            chosen.pop(item.message.id, None)
        elif item.claim != item.message.id:
            named: dict[str, Value] = {"dedup_key": dedup_key, "id": item.message.id}
            yield Statement(ROOM, "name_dedup_holder", named)
    if chosen:
        for id in (yield from ids.claim(chosen)):
            holders[chosen[id]] = id
    return holders


def _chosen(items: Sequence[Item], holders: dict[str, str]) -> dict[str, str]:
    """The claims of chosen ids; what repeats an id of the same call goes to `holders`."""
    chosen: dict[str, str] = {}
    for item in items:
        if item.chosen_id:
            first = chosen.setdefault(item.message.id, item.claim)
            if first != item.claim:
                ids.refuse_other({item.message.id: first}, {item.message.id: item.claim})
                holders[item.claim] = item.message.id
    return chosen


def _claim_one(dedup_key: str | None, claim: str) -> Flow[str]:
    for _ in range(_CLAIM_TRIES):
        yield Statement(ROOM, "claim_dedup_key", {"dedup_key": dedup_key, "claim": claim})
        rows = yield Statement(ROOM, "read_dedup_key", {"dedup_key": dedup_key})
        if rows:
            return str(rows[0][0])
        # It was pruned between the two statements: claim it again.
    raise PublishError(
        f"the dedup key {dedup_key!r} is deleted as fast as it is claimed: try again"
    )


def _insert(name: str, messages: Sequence[Encoded]) -> Statement:
    if len(messages) == 1:
        values: dict[str, Value] = messages[0]._asdict()
        values["expires_utc"] = _utc(messages[0].expires_us)
        values["deliver_utc"] = _utc(messages[0].deliver_us)
        return Statement(ROOM, name, values)
    columns: dict[str, Sequence[Value]] = dict(
        zip(Encoded._fields, zip(*messages, strict=True), strict=True)
    )
    columns["expires_utc"] = [_utc(message.expires_us) for message in messages]
    columns["deliver_utc"] = [_utc(message.deliver_us) for message in messages]
    return Statement(ROOM, name, columns=columns)


def _utc(microseconds: int | None) -> str | None:
    """A time as a database without time zones takes it."""
    if microseconds is None:
        return None
    moment = _EPOCH + dt.timedelta(microseconds=microseconds)
    return moment.isoformat(sep=" ", timespec="microseconds")


def is_committed(id: str) -> Flow[bool]:
    """Whether a message is anywhere; an error if delivered messages leave no trace."""
    ((found, keep_delivered_seconds),) = yield Statement(ROOM, "find_message", {"id": id})
    if not found and keep_delivered_seconds == "0":
        raise CommitUnknown
    return bool(found)
