"""What passes over a wire, cut into requests: enough of each protocol to name and to count them.

A request is whatever the server answers: in PostgreSQL's protocol all up to a Sync, Flush or simple
Query; in MariaDB's one command; in NATS' one publish that wants to be acknowledged.
"""

import re
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

_VALUES = re.compile(r"_binary\s*'(?:[^'\\]|\\.)*'|'(?:[^'\\]|\\.)*'|\b\d+\b|\bNULL\b")
_LISTS = re.compile(r"\?(?:\s*,\s*\?)+")
_SPACES = re.compile(r"\s+")
LONGEST_NAME = 100


@dataclass(frozen=True)
class Request:
    """One request: its name, and where it begins and ends in the data that completed it."""

    what: str
    start: int
    end: int
    reply_to: bytes = b""


class Talk(ABC):
    """One connection as it is heard from between its two ends."""

    def __init__(self) -> None:
        self._unread = b""
        self._expected: set[bytes] = set()

    def requests(self, data: bytes) -> Iterator[Request]:
        """The requests that are complete with this data from the client."""
        self._unread += data
        offset, start = len(data) - len(self._unread), 0
        while (size := self._size(self._unread)) is not None and len(self._unread) >= size:
            message, self._unread = self._unread[:size], self._unread[size:]
            offset += size
            found = self._take(message)
            if found is not None:
                what, reply_to = found
                yield Request(what, start, offset, reply_to)
                start = offset

    def expect(self, request: Request) -> None:
        """From now on tell of the reply to this request."""
        self._expected.add(request.reply_to)

    @abstractmethod
    def reply(self, data: bytes) -> tuple[int, bool]:
        """How much of the server's data comes before the expected reply, and whether all of that
        reply is there: then the server has done what it was asked."""

    @abstractmethod
    def _size(self, data: bytes) -> int | None:
        """The length of the client's message at the beginning; None while it cannot be known."""

    @abstractmethod
    def _take(self, message: bytes) -> tuple[str, bytes] | None:
        """The name of the request that this message ends, and where its reply goes."""


class PostgresTalk(Talk):
    """PostgreSQL's protocol 3: https://www.postgresql.org/docs/current/protocol-flow.html"""

    NOT_YET = (80877103, 80877104)  # it asks for encryption first, and is refused with one byte

    def __init__(self) -> None:
        super().__init__()
        self._greeted = False
        self._texts: dict[bytes, str] = {}
        self._what = ""
        self._answer = b""

    def _size(self, data: bytes) -> int | None:
        tag = 1 if self._greeted else 0
        if len(data) < tag + 4:
            return None
        return tag + int(struct.unpack_from("!i", data, tag)[0])

    def _take(self, message: bytes) -> tuple[str, bytes] | None:
        if not self._greeted:
            (code,) = struct.unpack_from("!i", message, 4)
            self._greeted = code not in self.NOT_YET
            return "greeting", b""
        tag, body = message[:1], message[5:]
        if tag == b"P":
            name, text = body.split(b"\0")[:2]
            self._texts[name] = shortened(text)
            self._what = f"prepare {self._texts[name]}"
        elif tag == b"B":
            self._what = self._texts.get(body.split(b"\0")[1], "?")
        elif tag in b"SH":
            return self._what, tag
        elif tag == b"Q":
            return shortened(body.rstrip(b"\0")), tag
        elif tag == b"p":
            return "password", b""
        return None

    def reply(self, data: bytes) -> tuple[int, bool]:
        if not self._expected & {b"S", b"Q"}:
            return (0, True) if self._expected else (len(data), False)
        # What a statement did is committed before the server says that it is ready again.
        self._answer += data
        while len(self._answer) >= 5:
            size = 1 + int(struct.unpack_from("!i", self._answer, 1)[0])
            if len(self._answer) < size:
                break
            if self._answer[:1] == b"Z":
                return 0, True
            self._answer = self._answer[size:]
        return 0, False


class MariaDBTalk(Talk):
    """MySQL's protocol: a packet is its length in three bytes, its number, and what it says."""

    QUIT, QUERY = 1, 3

    def _size(self, data: bytes) -> int | None:
        return 4 + int.from_bytes(data[:3], "little") if len(data) >= 4 else None

    def _take(self, message: bytes) -> tuple[str, bytes] | None:
        if message[3]:
            return "login", b""  # the server speaks first there, so it has another number than 0
        if message[4] == self.QUIT:
            return None
        if message[4] == self.QUERY:
            return shortened(message[5:]), b""
        return f"command {message[4]}", b""

    def reply(self, data: bytes) -> tuple[int, bool]:
        # A change is committed before the first byte of its reply.
        return (0, True) if self._expected else (len(data), False)


class NatsTalk(Talk):
    """NATS: lines, some of them followed by as many bytes as they say."""

    def __init__(self) -> None:
        super().__init__()
        self._heard = b""

    def _size(self, data: bytes) -> int | None:
        line, end, _ = data.partition(b"\r\n")
        if not end:
            return None
        words = line.split()
        if words and words[0].upper() in (b"PUB", b"HPUB", b"MSG", b"HMSG"):
            return len(line) + 2 + int(words[-1]) + 2
        return len(line) + 2

    def _take(self, message: bytes) -> tuple[str, bytes] | None:
        words = message.partition(b"\r\n")[0].split()
        kind = words[0].upper() if words else b""
        if kind not in (b"PUB", b"HPUB") or len(words) < (4 if kind == b"PUB" else 5):
            return None
        return "publish", words[2]

    def reply(self, data: bytes) -> tuple[int, bool]:
        self._heard += data
        offset = len(data) - len(self._heard)
        while (size := self._size(self._heard)) is not None and len(self._heard) >= size:
            message, self._heard = self._heard[:size], self._heard[size:]
            words = message.partition(b"\r\n")[0].split()
            if len(words) > 1 and words[0] in (b"MSG", b"HMSG") and words[1] in self._expected:
                return max(0, offset), True
            offset += size
        return len(data), False


def shortened(text: bytes) -> str:
    """A statement without its values, so that it has the same name each time."""
    bare = _VALUES.sub("?", text.decode(errors="replace"))
    return _SPACES.sub(" ", _LISTS.sub("?", bare)).strip()[:LONGEST_NAME]
