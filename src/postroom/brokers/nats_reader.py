"""Reading the answers of JetStream from the bytes of a connection."""

from __future__ import annotations

import re
from collections.abc import Callable

from nats.protocol.parser import AWAITING_CONTROL_LINE, MAX_CONTROL_LINE_SIZE, Parser

__all__ = ["Reader"]


class Reader(Parser):
    """nats-py's parser, which leaves to us what answers to our own messages say: it would make an
    object of each and cut it from the front of its buffer, at three times the cost."""

    def __init__(self, before: Parser, prefix: bytes, take: Callable[[bytes, bytes], None]) -> None:
        super().__init__(before.nc)
        self.__dict__.update(before.__dict__)  # whatever it has of a message
        self._take = take
        self._line = re.compile(rb"MSG %b(\S+) \d+ (\d+)\r\n" % re.escape(prefix))
        self._start = b"MSG " + prefix

    async def parse(self, data: bytes = b"") -> None:
        if self.state == AWAITING_CONTROL_LINE:
            if self.buf:
                data = bytes(self.buf) + data
                self.buf.clear()
            begin, whole = self._take_answers(data)
            if not whole:
                self.buf.extend(data[begin:])
                return
            data = data[begin:]
        await super().parse(data)

    def _take_answers(self, data: bytes) -> tuple[int, bool]:
        """Take the answers that `data` begins with; returns where it goes on, and whether what
        comes then is not the beginning of another."""
        match, take, place = self._line.match, self._take, 0
        while line := match(data, place):
            begin = line.end()
            end = begin + int(line[2])
            if end + 2 > len(data):
                return place, False
            take(line[1], data[begin:end])
            place = end + 2
        rest = data[place : place + MAX_CONTROL_LINE_SIZE]
        return place, not (b"\r\n" not in rest and _begins_alike(rest, self._start))


def _begins_alike(one: bytes, other: bytes) -> bool:
    return one.startswith(other) or other.startswith(one)
