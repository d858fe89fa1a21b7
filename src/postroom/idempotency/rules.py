"""What a key, a record and an answer mean. Pure: nothing is read or written here.

a request with a key ──► the record of that key ──► what to do
no record, or one that may be taken over             Mine: carry it out
a record of another request                          Other: refuse; compared before all else
completed                                            Replay: answer again from memory
pending, and its owner alive                         Running: ask again later
indeterminate, or pending with its owner lost        Doubtful: never carried out again by itself

pending → completed | failed → pending (another epoch) | indeterminate → completed | failed
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias
from urllib.parse import unquote, urlsplit

from postroom.derivation import KEY_CHARACTERS, Part, derive_key
from postroom.errors import BadKey, ConfigurationError

__all__ = [
    "Answer",
    "BadKey",
    "Claim",
    "Doubtful",
    "Mine",
    "Mode",
    "Name",
    "Other",
    "Record",
    "Replay",
    "Running",
    "Verdict",
    "bodiless",
    "checked_answer",
    "is_nobody",
    "judge",
    "kept_headers",
    "owned",
    "parse_key",
    "scope_name",
    "sent_elsewhere",
    "storable",
]

Mode: TypeAlias = Literal["same_transaction", "resume", "external"]
# As they stand in the database.
MODES: dict[Mode, str] = {"same_transaction": "same", "resume": "resume", "external": "external"}
KEPT_HEADERS = frozenset(
    (
        *("content-type", "content-language", "content-encoding", "content-disposition"),
        *("content-location", "location", "etag", "last-modified", "link", "cache-control", "vary"),
    )
)
# How often a claim gives way. At each conflict somebody else has gone on, so that of many who send
# one key at once nobody needs many more tries than there are others.
TRIES = 100
# A later try of the same request may be answered differently, so these are not said from memory.
_PASSING = frozenset((401, 403, 407, 408, 409, 421, 423, 424, 425, 426, 428, 429, 431, 499))
# What routers and proxies say of a request that came without a slash, or without TLS. (302 and 303
# are what views say when they are done.)
_ELSEWHERE = frozenset((301, 307, 308))
# A structured-field item (RFC 9651): a string, and parameters that mean nothing here.
_STRING = r'"((?:[\x20-\x21\x23-\x5b\x5d-\x7e]|\\["\\])*)"'
_VALUES = (
    r"-?\d{1,15}", r"-?\d{1,12}\.\d{1,3}", _STRING.replace("((", "(?:(", 1),
    r"[A-Za-z*][!#$%&'*+.^_`|~0-9A-Za-z:/-]*", r":[A-Za-z0-9+/=]*:", r"\?[01]", r"@-?\d{1,15}",
    r'%"(?:[\x20-\x21\x23-\x24\x26-\x7e]|%[0-9a-f]{2})*"',
)  # fmt: skip
_PARAMETER = rf"; *[a-z*][a-z0-9_.*-]*(?:=(?:{'|'.join(_VALUES)}))?"
_QUOTED = re.compile(f"{_STRING}(?:{_PARAMETER})*")
_BARE = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?")
_ESCAPE = re.compile(r'\\(["\\])')
# As servers send them (RFC 9110): a token, and text in Latin-1 without line breaks.
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(r"(?:[\x21-\x7e\x80-\xff](?:[\t\x20-\x7e\x80-\xff]*[\x21-\x7e\x80-\xff])?)?")


def parse_key(values: Sequence[str]) -> str | None:
    """The key in the values of its header: a quoted string (RFC 9651), whose parameters are
    ignored, or bare; None without one."""
    if not values:
        return None
    if len(values) > 1:
        raise BadKey("the header was sent more than once")
    text = values[0].strip(" \t")
    match = _QUOTED.fullmatch(text)
    if match is None and "," in text:
        # WSGI servers join such headers, and nobody could tell which of them was meant.
        raise BadKey(
            "the header was sent more than once, or holds a comma: send one key, and put one that "
            "has a comma in quotation marks"
        )
    if text.startswith('"'):
        if match is None:
            raise BadKey("the quoted string does not end, or holds what it must not")
        text = _ESCAPE.sub(r"\1", match[1])
    elif not _BARE.fullmatch(text):
        raise BadKey("it must have 1 to 255 printable ASCII characters")
    return checked_key(text)


def checked_key(text: object) -> str:
    """A key from wherever it came: 1 to 255 characters, none of them a control character."""
    if not isinstance(text, str) or not 1 <= len(text) <= KEY_CHARACTERS:
        raise BadKey("it must be text of 1 to 255 characters")
    if not text.isprintable():
        raise BadKey("it must hold no control characters")
    return text


def scope_name(scope: object) -> str:
    """Who a key belongs to, as one text: a name, or tenant and principal."""
    parts: Iterable[Part] = scope if isinstance(scope, tuple | list) else (scope,)
    return derive_key(*parts)


def is_nobody(scope: object) -> bool:
    """Whether it names no one, or a tenant without a principal."""
    parts = scope if isinstance(scope, tuple | list) else (scope,)
    return not parts or any(part is None or part == "" for part in parts)


class Name(NamedTuple):
    """What a record is found by: whose it is, what it is about, and the client's name for it."""

    scope: str
    operation: str
    key: str

    def derive(self, *steps: Part) -> str:
        """A key for something done on behalf of this request, such as a call to another system."""
        return derive_key(self.scope, self.operation, self.key, *steps)


def owned(name: Name) -> Name:
    """A name that says whose it is: one without would be everybody's."""
    if not name.scope:
        raise ConfigurationError(
            "nobody has said whose key it is: keyed_session(engine, scope=Depends(user)), or "
            "turn.belongs_to(user) before the claim"
        )
    return name


class Record(NamedTuple):
    """A row as it stands, in the order of the columns of `claim` and `look`."""

    owner: str
    epoch: int
    status: str
    mode: str
    fingerprint: str
    attempts: int
    lease_left_us: int | None
    recovery_point: str | None
    progress: str | None
    request: bytes | None
    response_status: int | None
    response_headers: str | None
    response_body: bytes | None
    body_absent: str | None


class Claim(NamedTuple):
    """The right to carry a request out and to write down its answer, once."""

    name: Name
    owner: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request was answered. `absent` says why the body was not kept."""

    status: int
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    absent: str | None = None

    def without_body(self, why: str) -> Answer:
        """A tombstone: that it was answered is known, the body is not."""
        return Answer(self.status, self.headers, b"", why)

    def headers_json(self) -> str:
        return json.dumps([list(pair) for pair in self.headers])


@dataclass(frozen=True, slots=True)
class Mine:
    """Carry it out, from `recovery_point` on."""

    claim: Claim
    attempts: int = 1
    recovery_point: str | None = None
    progress: str | None = None


@dataclass(frozen=True, slots=True)
class Replay:
    """It was carried out: answer this."""

    answer: Answer


@dataclass(frozen=True, slots=True)
class Running:
    """Somebody is at it; ask again when their lease could have ended."""

    retry_after_seconds: float


@dataclass(frozen=True, slots=True)
class Other:
    """The key was used for another request."""


@dataclass(frozen=True, slots=True)
class Doubtful:
    """Whether it was carried out is not known; `lost`: its record does not say so yet."""

    epoch: int
    lost: bool = False


Verdict: TypeAlias = Mine | Replay | Running | Other | Doubtful


def judge(record: Record, name: Name, fingerprint: str, owner: str) -> Verdict:
    """What a record means for a request with this fingerprint, claimed by `owner`."""
    if record.owner == owner and record.status == "pending":
        claim = Claim(name, owner, record.epoch)
        return Mine(claim, record.attempts, record.recovery_point, record.progress)
    if record.fingerprint != fingerprint:
        return Other()
    if record.status == "completed":
        return Replay(answer_of(record))
    if record.status == "indeterminate":
        return Doubtful(record.epoch)
    left = record.lease_left_us
    if record.status == "pending" and left is None:
        # A transaction that was to hold everything was committed without its answer.
        return Doubtful(record.epoch, lost=True)
    if record.status == "pending" and record.mode == "external" and left is not None and left <= 0:
        return Doubtful(record.epoch, lost=True)
    return Running(max(0.0, (left or 0) / 1e6))


def answer_of(record: Record) -> Answer:
    """The answer a completed record holds."""
    headers = json.loads(record.response_headers or "[]")
    return Answer(
        status=record.response_status or 200,
        headers=tuple((str(name), str(value)) for name, value in headers),
        body=bytes(record.response_body or b""),
        absent=record.body_absent,
    )


def bodiless(status: int) -> bool:
    """Whether an answer of this status has no body, nor says how long one is."""
    return status < 200 or status in (204, 304)


def checked_answer(answer: Answer) -> Answer:
    """An answer that somebody has written, as it can be sent; else what is wrong with it."""
    status = answer.status
    if not isinstance(status, int) or isinstance(status, bool) or not 200 <= status <= 599:
        raise ConfigurationError("the status of an Answer is a number from 200 to 599.")
    if not isinstance(answer.body, bytes | bytearray):
        raise ConfigurationError("the body of an Answer is no bytes.")
    if answer.body and bodiless(status):
        raise ConfigurationError(f"an answer with status {status} has no body.")
    try:
        headers = tuple((name, value) for name, value in answer.headers)
    except (TypeError, ValueError):
        raise ConfigurationError("the headers of an Answer are no pairs.") from None
    for name, value in headers:
        if not isinstance(name, str) or not isinstance(value, str):
            raise ConfigurationError("the headers of an Answer are no text.")
        if not _HEADER.fullmatch(name):
            raise ConfigurationError(f"{name!r} is no name of a header.")
        if not _VALUE.fullmatch(value):
            raise ConfigurationError(
                f"the header {name!r} holds what cannot be sent: line breaks, spaces around it, "
                "or letters that Latin-1 has not."
            )
    return Answer(status, headers, bytes(answer.body), answer.absent)


def storable(status: int) -> bool:
    """Whether an answer of this status is the answer to the same request for ever."""
    return 200 <= status < 400 or (400 <= status < 500 and status not in _PASSING)


def sent_elsewhere(answer: Answer, path: str) -> bool:
    """Whether the request itself is to be sent again, to the same path in another spelling. Nobody
    has carried it out then; any other redirect is a view's answer."""
    if answer.status not in _ELSEWHERE:
        return False
    places = [value for name, value in answer.headers if name.lower() == "location"]
    try:
        there = [unquote(urlsplit(place).path).rstrip("/") for place in places]
    except ValueError:
        return False
    return there == [path.rstrip("/")]


def kept_headers(
    headers: Iterable[tuple[str, str]], more: Iterable[str] = ()
) -> tuple[tuple[str, str], ...]:
    """Those that may be said again to anybody who knows the key: never a cookie."""
    wanted = KEPT_HEADERS | {name.lower() for name in more} - {"set-cookie"}
    return tuple((name.lower(), value) for name, value in headers if name.lower() in wanted)
