"""Reading what comes most from the bytes of a connection, and leaving all else to nats-py.

nats-py would make an object of each message and cut it from the front of its buffer, at several
times the cost.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable

from nats.protocol.parser import AWAITING_CONTROL_LINE, MAX_CONTROL_LINE_SIZE, Parser

from postroom.brokers.nats_wire import Arrived, message_headers

__all__ = ["AnswerReader", "MessageReader"]

# What is longer comes in many pieces, which nats-py puts together without copying each again.
LONG_BYTES = 128 * 1024
_HEAD = b"NATS/1.0\r\n"
_END = b"\r\n"


class _Reader(Parser, ABC):
    """nats-py's parser, which is given what does not begin with something of ours."""

    _start: bytes  # of something of ours

    def __init__(self, before: Parser) -> None:
        super().__init__(before.nc)
        self.__dict__.update(before.__dict__)  # whatever it has of a message

    async def parse(self, data: bytes = b"") -> None:
        """nats-py is given one thing at a time, since whatever follows may be ours again."""
        if self.buf and self.state == AWAITING_CONTROL_LINE:
            data = bytes(self.buf) + data
            self.buf.clear()
        while data:
            if self.state == AWAITING_CONTROL_LINE:
                begin, whole = self._take_ours(data)
                data = data[begin:]
                if not whole:
                    self.buf.extend(data)
                    return
                end = data.find(_END)
                size = len(data) if end < 0 else end + len(_END)
            else:
                size = self.needed + len(_END) - len(self.buf)
            await super().parse(data[:size])
            data = data[size:]

    @abstractmethod
    def _take_ours(self, data: bytes) -> tuple[int, bool]:
        """Take what `data` begins with; returns where it goes on, and whether what comes then is
        for nats-py, if anything does."""

    def _is_other(self, data: bytes, place: int) -> bool:
        """Whether what comes here is not the beginning of something of ours."""
        rest = data[place : place + MAX_CONTROL_LINE_SIZE]
        return _END in rest or not _begins_alike(rest, self._start)


class AnswerReader(_Reader):
    """Takes the answers to our own messages."""

    def __init__(self, before: Parser, prefix: bytes, take: Callable[[bytes, bytes], None]) -> None:
        super().__init__(before)
        self._take = take
        self._line = re.compile(rb"MSG %b(\S+) \d+ (\d+)\r\n" % re.escape(prefix))
        self._start = b"MSG " + prefix

    def _take_ours(self, data: bytes) -> tuple[int, bool]:
        match, take, place = self._line.match, self._take, 0
        while line := match(data, place):
            begin = line.end()
            end = begin + int(line[2])
            if end + 2 > len(data):
                return place, False
            take(line[1], data[begin:end])
            place = end + 2
        return place, self._is_other(data, place)


class MessageReader(_Reader):
    """Takes the messages of streams, all that came at once together."""

    _start = b"HMSG "
    _line = re.compile(rb"HMSG (\S+) (\d+) (\$JS\.ACK\.\S+) (\d+) (\d+)\r\n")

    def __init__(self, before: Parser, sid: int, take: Callable[[list[Arrived]], None]) -> None:
        super().__init__(before)
        self._sid = b"%d" % sid
        self._take = take

    def _take_ours(self, data: bytes) -> tuple[int, bool]:
        found: list[Arrived] = []
        place, whole = self._find(data, found)
        if found:
            self._take(found)
        return place, whole

    def _find(self, data: bytes, found: list[Arrived]) -> tuple[int, bool]:
        match, size, place = self._line.match, len(data), 0
        while line := match(data, place):
            subject, sid, reply, head_bytes, all_bytes = line.groups()
            begin = line.end()
            middle, end = begin + int(head_bytes), begin + int(all_bytes)
            if end + 2 > size:
                return place, end - place > LONG_BYTES
            if sid != self._sid or not data.startswith(_HEAD, begin):
                return place, True
            headers = message_headers(data[begin + len(_HEAD) : middle])
            found.append(Arrived(subject.decode(), reply.decode(), headers, data[middle:end]))
            place = end + 2
        return place, self._is_other(data, place)


def _begins_alike(one: bytes, other: bytes) -> bool:
    return one.startswith(other) or other.startswith(one)
