"""Frames of RabbitMQ, read so that no message can end the connection it comes over.

aiormq reads whole frames too, but ends at one it cannot understand. A publisher in another language
may give a header a name that is no UTF-8, or a time that Python has no date for: RabbitMQ takes it,
and would send it again to every connection that has ended at it. Such a message comes without its
properties; having no type, it is refused by the consumer and kept as a dead letter.
"""

from __future__ import annotations

import asyncio
import struct
from typing import Any

from postroom.brokers.invoke import describe

__all__ = ["Frames"]

_HEAD = struct.Struct(">BHI")  # its type, its channel, its size
_CONTENT = struct.Struct(">HHQ")  # class, weight, size of the body
_CONTENT_HEADER = 2


class Frames:
    """What aiormq iterates over: the size, the channel and the content of each frame."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader

    def __aiter__(self) -> Frames:
        return self

    async def __anext__(self) -> tuple[int, int, Any]:
        from aiormq.exceptions import AMQPConnectionError

        if self._reader.at_eof():
            raise StopAsyncIteration
        try:
            head = await self._reader.readexactly(_HEAD.size)
            rest = await self._reader.readexactly(_HEAD.unpack(head)[2] + 1)
        except (asyncio.IncompleteReadError, OSError) as error:
            raise AMQPConnectionError(
                f"the server ended the connection: {describe(error)}"
            ) from error
        return _read(head, rest)


def _read(head: bytes, rest: bytes) -> tuple[int, int, Any]:
    from aiormq.exceptions import InvalidFrameError
    from pamqp.frame import unmarshal
    from pamqp.header import ContentHeader

    kind, channel, size = _HEAD.unpack(head)
    try:
        found: tuple[int, int, Any] = unmarshal(head + rest)
        return found
    except Exception as error:  # pamqp's own; and of dates too far off, and tables nested too deep
        if kind != _CONTENT_HEADER or size < _CONTENT.size:
            raise InvalidFrameError(describe(error)) from error
        bare = ContentHeader()
        bare.class_id, bare.weight, bare.body_size = _CONTENT.unpack_from(rest)
        return len(head) + len(rest), channel, bare
