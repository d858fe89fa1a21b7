"""The consumer's decisions. Pure: time and randomness are arguments, nothing is read or written.

what a handler did ──► verdict
returned               nothing to decide: the transaction commits
raised                 Retry(delay), or Bury when the attempts are spent
raised `Rejected`      Bury: another try would end the same
"""

from __future__ import annotations

import hashlib
import json
import traceback
import uuid
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import dropwhile
from typing import NamedTuple, TypeAlias, TypeVar

from postroom.brokers.receiving import Delivery
from postroom.dead_letters.rules import CODE_CHARACTERS, ERROR_CHARACTERS, storable
from postroom.errors import Rejected
from postroom.messages import LANES
from postroom.retry import RetryPolicy
from postroom.signals import redact

__all__ = [
    "Bury",
    "Letter",
    "Parked",
    "Retry",
    "Verdict",
    "chunks",
    "first_line",
    "letter_of",
    "parked",
    "places",
    "verdict",
    "worker_of",
]

NAME_CHARACTERS = 255
HEADERS_CHARACTERS = 4 * 1024 * 1024
DROPPED = "postroom-dropped-headers"
DIGEST_CHARACTERS = 16
RELAYED = "postroom-position"  # a header that every relay sends
SUSPECT_AFTER = 3
LOST_TRIES = 3
PLACES = 5  # of a traceback, kept with an attempt
_NAMESPACE = uuid.UUID("6f0b7f0e-7d52-4ff0-9f0e-1d8a3c2b5e47")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Retry:
    """Try again after `delay_seconds`; whatever of its key comes later waits behind it."""

    delay_seconds: float
    code: str
    text: str


@dataclass(frozen=True, slots=True)
class Bury:
    """A dead letter."""

    code: str
    text: str


Verdict: TypeAlias = Retry | Bury


def verdict(
    error: BaseException, attempt: int, policy: RetryPolicy, random: Callable[[], float]
) -> Verdict:
    """What the error of a handler means for its message; `attempt` counts from 1."""
    # Redacted before it is cut: half a URL would not be known for one.
    text = storable(redact(str(error)[: 4 * ERROR_CHARACTERS])) or type(error).__name__
    code = error.code if isinstance(error, Rejected) else type(error).__name__
    code = storable(code, CODE_CHARACTERS)
    if isinstance(error, Rejected):
        return Bury(code, text)
    delay = policy.delay_after(attempt, random=random)
    return Bury(code, text) if delay is None else Retry(delay, code, text)


def places(error: BaseException) -> list[str]:
    """Return where an error of a handler was raised, as "file:line function", outermost first: the
    handler's own frame and the last ones. Frames of this package around the handler are left out.
    """
    found = [
        (frame.f_globals.get("__name__", ""), f"{frame.f_code.co_filename}:{line}", frame)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    theirs = list(dropwhile(lambda each: each[0].startswith("postroom."), found))
    told = [f"{storable(place, CODE_CHARACTERS)} {at.f_code.co_name}" for _, place, at in theirs]
    return told if len(told) <= PLACES else [told[0], *told[1 - PLACES :]]


def first_line(error: BaseException) -> str:
    """Return the error's class and the first line of its message, for the log. The lines below may
    hold the values of a statement, and so parts of the message."""
    line = redact(str(error)[: 4 * ERROR_CHARACTERS].partition("\n")[0])
    return storable(f"{type(error).__name__}: {line}".removesuffix(": "), CODE_CHARACTERS)


class Letter(NamedTuple):
    """A message as a consumer works on it, from the broker or from what waits to be tried again.

    `record` is its name in the inbox: the id, or what stands for one that no database would take.
    `position` is its place among what waits; None: it came from the broker just now. `epoch` is
    that of the seat it was received under: one taken anew since is no excuse for what came before.
    """

    id: str
    record: str
    digest: str
    topic: str
    key: str | None
    type: str
    content_type: str
    headers: dict[str, str]
    payload: bytes
    position: int | None = None
    attempts: int = 0
    history: str | None = None
    redrives: int = 0
    delivery: Delivery | None = None
    epoch: int = 0

    @property
    def order(self) -> tuple[str, str] | None:
        """What keeps its order: topic and key. Without a key it is ordered with no other."""
        return None if self.key is None else (self.topic, self.key)

    @property
    def whole_key(self) -> str | None:
        """The key as its publisher gave it, however long."""
        if self.delivery is not None:
            return self.delivery.key
        return self.headers.get("ce-partitionkey", self.key)

    @property
    def size(self) -> int:
        return len(self.payload)

    def is_copy_of(self, known: str | None) -> bool:
        """Whether it is what was taken on under its id. `once` knows the content alone, or not even
        that; who goes over from it to a consumer of the same name has its digests."""
        if known is None or known == self.digest:
            return True
        return known == hashlib.sha256(self.payload).hexdigest()

    @property
    def letter_id(self) -> str:
        """The id of its dead letter, which must be a UUID."""
        try:
            return str(uuid.UUID(self.record))
        except ValueError:
            return str(uuid.uuid5(_NAMESPACE, self.record))

    @property
    def lane(self) -> int:
        return zlib.crc32(f"{self.topic}\x00{self.key or self.record}".encode()) % LANES

    def changed(self) -> Letter:
        """The same id with other content is another message, named after its content."""
        name = f"{self.record[: NAME_CHARACTERS - DIGEST_CHARACTERS - 1]}~"
        return self._replace(record=name + self.digest[:DIGEST_CHARACTERS])

    def headers_json(self) -> str:
        """The headers as they are stored: with what the columns could not hold."""
        headers = {"ce-id": self.id, **self.headers}
        if self.delivery is not None and self.delivery.key is not None:
            headers.setdefault("ce-partitionkey", self.delivery.key)
        return _fitting(headers)


def letter_of(delivery: Delivery, epoch: int = 0) -> Letter:
    """A delivery as a consumer works on it, received under this epoch of its seat."""
    id, type, topic, key, content_type, headers, payload, *_ = delivery
    type = storable(type, NAME_CHARACTERS)
    return Letter(
        id=id,
        record=_name(id),
        digest=_digest(type, headers, payload),
        topic=_name(topic),
        key=None if key is None else _name(key),
        type=type,
        content_type=storable(content_type, NAME_CHARACTERS),
        headers=headers,
        payload=payload,
        delivery=delivery,
        epoch=epoch,
    )


class Parked(NamedTuple):
    """A row of what waits to be tried again, in the order of the columns of `due` and `behind`."""

    position: int
    message_id: str
    topic: str
    key: str | None
    type: str
    content_type: str
    headers_json: str | None
    payload: bytes
    attempts: int
    history: str | None
    redrives: int


def parked(row: Sequence[object]) -> Letter:
    """A row of what waits, as a consumer works on it."""
    one = Parked._make(row)
    headers = _headers(one.headers_json)
    payload = bytes(one.payload)
    return Letter(
        id=headers.get("ce-id", one.message_id),
        record=one.message_id,
        digest=_digest(one.type, headers, payload),
        topic=one.topic,
        key=one.key,
        type=one.type,
        content_type=one.content_type,
        headers=headers,
        payload=payload,
        position=one.position,
        attempts=one.attempts,
        history=one.history,
        redrives=one.redrives,
    )


def _fitting(headers: dict[str, str]) -> str:
    """Headers as JSON that every database takes. Of too many the largest are left out whole, and
    named: half a document could never be read again."""
    text = json.dumps(headers)
    if len(text) <= HEADERS_CHARACTERS:
        return text
    sizes = {name: len(json.dumps({name: value})) for name, value in headers.items()}
    left, kept, dropped = sum(sizes.values()), dict(headers), list[str]()
    for name in sorted(sizes, key=lambda name: sizes[name], reverse=True):
        if left <= HEADERS_CHARACTERS - 10 * NAME_CHARACTERS:
            break
        left -= sizes[name]
        del kept[name]
        dropped.append(storable(name, NAME_CHARACTERS))
    return json.dumps({**kept, DROPPED: ", ".join(dropped)[:NAME_CHARACTERS]})


def _headers(text: str | None) -> dict[str, str]:
    """Headers as they were kept; what cannot be read is none, since the message waits for them."""
    try:
        found = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {name: value for name, value in found.items() if isinstance(value, str)}


def _digest(type: str, headers: dict[str, str], payload: bytes) -> str:
    """What must be the same for two to be one message: type, CloudEvents source and payload, as
    they arrived. An id is unique within its source only; those of a relay are unique everywhere,
    whatever it calls itself."""
    source = "" if RELAYED in headers else headers.get("ce-source", "")
    whose = f"{len(type)} {type} {len(source)} {source} "
    return hashlib.sha256(whose.encode("utf-8", "replace") + payload).hexdigest()


def _name(text: str) -> str:
    """A name of somebody else's as every database takes it; a long one by its hash."""
    short = storable(text, NAME_CHARACTERS + 1)
    if 0 < len(short) <= NAME_CHARACTERS:
        return short
    return f"sha256:{hashlib.sha256(text.encode('utf-8', 'replace')).hexdigest()}"


def worker_of(letter: Letter, workers: int) -> int:
    """Which of so many workers handles a message: all of a key go to one."""
    name = letter.record if letter.key is None else f"{letter.topic}\x00{letter.key}"
    return zlib.crc32(name.encode()) % workers


def chunks(
    letters: Iterable[Letter], *, rows: int, size: int, apart: Callable[[Letter], object]
) -> list[list[Letter]]:
    """Cut in order, by number and bytes, and where `apart` differs: those share no transaction."""
    cut: list[list[Letter]] = []
    held, kind = 0, object()
    for letter in letters:
        mine = apart(letter)
        if not cut or len(cut[-1]) >= rows or held + letter.size > size or mine != kind:
            cut.append([])
            held, kind = 0, mine
        cut[-1].append(letter)
        held += letter.size
    return cut
