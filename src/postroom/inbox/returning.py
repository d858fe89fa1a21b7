"""How a consumer takes its dead letters back: into its own waiting messages, and nowhere else.

The row of a letter has stayed there, blocked, so it keeps its place. One that was set aside, since
its key went on without it, comes back in its old place among what waits by now.
"""

from __future__ import annotations

from collections.abc import Sequence

from postroom.dead_letters.store import Letter
from postroom.errors import Refused
from postroom.flow import Flow, Statement, Value

__all__ = ["Consumers"]

ROOM = __package__ or "postroom.inbox"


class Consumers:
    """Every consumer, by the name in a letter's source (see dead_letters.store.Returns)."""

    def lock(self, waiting: Sequence[Letter]) -> Flow[None]:
        """Lock what waits of their keys, in one order for everybody."""
        for letter in _one_of_each_key(waiting):
            yield from _lock(letter)

    def send_again(self, waiting: Sequence[Letter]) -> Flow[int]:
        """Make them due: the first of each key now, the others behind it."""
        kept = 0
        for letter in waiting:
            rows = yield _query("lock_one", letter, position=letter.position)
            if not rows or not rows[0][1]:
                raise Refused(
                    f"message {letter.id} does not wait in {letter.source} any more; nothing was "
                    "changed."
                )
            kept += not rows[0][2]
            yield _query("unblock", letter, position=letter.position)
        for letter in _one_of_each_key(waiting):
            if letter.key is not None:
                key: dict[str, Value] = {"topic": letter.topic, "key": letter.key}
                yield _query("disarm", letter, **key)
                yield from _arm(letter)
        return kept

    def give_up(self, letter: Letter) -> Flow[None]:
        """Its row goes; the next of its key gets its turn."""
        yield _query("drop_parked", letter, positions=[letter.position])
        yield from _arm(letter)


def _one_of_each_key(waiting: Sequence[Letter]) -> list[Letter]:
    found = {
        (one.source, one.topic, one.key if one.key is not None else one.position): one
        for one in waiting
    }
    return sorted(found.values(), key=lambda one: (one.source, one.topic, one.key or "", one.id))


def _arm(letter: Letter) -> Flow[None]:
    if letter.key is not None:
        rows = yield _query("head", letter, topic=letter.topic, key=letter.key)
        if rows:
            yield _query("arm", letter, position=rows[0][0])


def _lock(letter: Letter) -> Flow[None]:
    if letter.key is None:
        yield _query("lock_one", letter, position=letter.position)
    else:
        yield _query("lock_key", letter, topic=letter.topic, key=letter.key)


def _query(name: str, letter: Letter, **values: Value) -> Statement:
    return Statement(ROOM, name, {"consumer": letter.source.partition(":")[2], **values})
