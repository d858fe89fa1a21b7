"""`stdout://`: one JSON document a line on standard output, for pipes, logs and demos.

Promise: what it answers `Delivered` for was taken by the operating system as a whole line, and
lines stand in the order of sending. A reader that is slow holds up sending, never the event loop.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import json
import os
import re
import select
import sys
from collections.abc import Sequence
from typing import TextIO

from postroom.brokers.base import (
    BEHIND,
    DELIVERED,
    BrokerOptions,
    Capabilities,
    Outcome,
    Permanent,
    Transient,
    Unknown,
)
from postroom.brokers.invoke import describe, in_thread
from postroom.brokers.options import split_url
from postroom.errors import ConfigurationError, Unreachable
from postroom.messages import Message, wire_headers

__all__ = ["StdoutBroker", "line_of", "open_broker"]

_JSON_CONTENT = re.compile(r"(?i)\s*(?:application/json|[^;]+\+json|text/json)\s*(?:;|$)")
# Some readers end a line at these; in JSON they can stand inside strings only.
_LINE_ENDS = re.compile("[\u0085\u2028\u2029]")


def line_of(message: Message, *, source: str, epoch: int = 0) -> bytes:
    """A message as one line of JSON, without its line end.

    A JSON payload stands as the publisher wrote it, digit for digit; any other is in
    `payload_base64`.
    """
    head = {
        "id": message.id,
        "type": message.type,
        "topic": message.topic,
        "key": message.key,
        "headers": wire_headers(message, source=source, epoch=epoch),
    }
    text = _json_text(message)
    if text is None:
        tail = f'"payload_base64":"{base64.b64encode(message.payload).decode()}"'
    else:
        tail = f'"payload":{text}'
    line = json.dumps(head, ensure_ascii=False, separators=(",", ":"))[:-1] + "," + tail + "}"
    return _LINE_ENDS.sub(lambda end: f"\\u{ord(end[0]):04x}", line).encode()


def _json_text(message: Message) -> str | None:
    if not _JSON_CONTENT.match(message.content_type):
        return None
    try:
        text = message.payload.decode()
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    # Outside strings a line end is white space, and inside them JSON allows none.
    return text.replace("\n", " ").replace("\r", " ")


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


class _Write:
    """One batch on its way out: its bytes, where each line ends, and how many bytes were taken."""

    def __init__(self, batch: Sequence[Message]) -> None:
        self.batch = list(batch)
        self.data = bytearray()
        self.ends: dict[int, int] = {}
        self.refused: dict[int, Outcome] = {}
        self.taken = 0
        self.error: Exception | None = None

    def fill(self, *, source: str, epoch: int) -> None:
        """Add a line for each message; after one that has none, nothing of its key follows."""
        stopped: set[tuple[str, str]] = set()
        for index, message in enumerate(self.batch):
            if message.order in stopped:
                self.refused[index] = BEHIND
                continue
            try:
                self.data += line_of(message, source=source, epoch=epoch) + b"\n"
            except (ValueError, TypeError) as error:
                stopped.add(message.order)
                self.refused[index] = Permanent("bad_headers", describe(error))
            else:
                self.ends[index] = len(self.data)

    def outcomes(self, otherwise: Outcome) -> list[Outcome]:
        """`otherwise` is for what was not written to its last byte."""
        return [
            self.refused.get(index)
            or (DELIVERED if self.ends.get(index, self.taken + 1) <= self.taken else otherwise)
            for index in range(len(self.batch))
        ]


class StdoutBroker:
    """Writes to `stream`, by default whatever `sys.stdout` is at that time."""

    def __init__(self, options: BrokerOptions | None = None, stream: TextIO | None = None) -> None:
        self.capabilities = Capabilities(ordered_pipeline=True)
        self._options = options or BrokerOptions()
        self._stream = stream
        self._writing: asyncio.Future[None] | None = None
        self._torn = False

    async def send(self, batch: Sequence[Message], *, epoch: int = 0) -> list[Outcome]:
        if not batch:
            return []
        deadline = asyncio.get_running_loop().time() + self._options.send_timeout_seconds
        if not await self._turn(deadline):
            busy = Transient("busy", "the reader of standard output is slow", down="broker")
            return [busy] * len(batch)
        write = _Write(batch)
        self._writing = in_thread(lambda: self._write(write, epoch))
        if not await _done(self._writing, deadline):
            slow = Unknown("timeout", "the reader of standard output is slow", down="broker")
            return write.outcomes(slow)
        if write.error is None:
            return write.outcomes(DELIVERED)
        text = f"standard output cannot be written: {describe(write.error)}"
        return write.outcomes(Transient(_code(write.error), text, down="broker"))

    async def ping(self) -> None:
        try:
            fd = _descriptor(self._target())
        except (OSError, ValueError) as error:
            raise Unreachable(f"standard output cannot be written: {error}") from error
        if fd is not None and hasattr(select, "poll"):
            look = select.poll()
            look.register(fd, select.POLLOUT)
            if any(what & (select.POLLERR | select.POLLNVAL) for _, what in look.poll(0)):
                raise Unreachable("nobody reads standard output any more")

    async def close(self) -> None:
        """Wait, within the send timeout, until what was begun is written."""
        await self._turn(asyncio.get_running_loop().time() + self._options.send_timeout_seconds)

    async def _turn(self, deadline: float) -> bool:
        """Wait until nothing is being written: a later batch must not mix with an earlier one."""
        while self._writing is not None and not self._writing.done():
            if self._writing.get_loop() is not asyncio.get_running_loop():
                break  # left behind by a loop that ended
            if not await _done(self._writing, deadline):
                return False
        return True

    def _target(self) -> TextIO:
        stream = self._stream or sys.stdout
        if stream is None or stream.closed:
            raise ValueError("it is closed")
        return stream

    def _write(self, write: _Write, epoch: int) -> None:
        try:
            if self._torn:  # the last batch broke off within a line
                write.data += b"\n"
            write.fill(source=self._options.source, epoch=epoch)
            stream = self._target()
            stream.flush()  # what others printed before comes before
            fd = _descriptor(stream)
            if fd is None:
                stream.write(write.data.decode())
                stream.flush()
                write.taken = len(write.data)
            else:
                _write_all(fd, write)
        except Exception as error:
            write.error = error
        if write.taken:
            self._torn = write.data[write.taken - 1] != ord("\n")


def _write_all(fd: int, write: _Write) -> None:
    data = memoryview(write.data)
    while write.taken < len(data):
        try:
            write.taken += os.write(fd, data[write.taken :])
        except BlockingIOError:  # somebody made it non-blocking
            select.select([], [fd], [], 1.0)


def _descriptor(stream: TextIO) -> int | None:
    try:
        return stream.fileno()
    except OSError:  # a stream that is no file, as in a notebook or under a test runner
        return None


def _code(error: Exception) -> str:
    if isinstance(error, BrokenPipeError):
        return "broken_pipe"
    if isinstance(error, OSError) and error.errno is not None:
        return errno.errorcode.get(error.errno, "os_error").lower()
    return "closed" if isinstance(error, ValueError) else type(error).__name__


async def _done(future: asyncio.Future[None], deadline: float) -> bool:
    remaining = deadline - asyncio.get_running_loop().time()
    await asyncio.wait({future}, timeout=max(remaining, 0))
    return future.done()


def open_broker(url: str, options: BrokerOptions) -> StdoutBroker:
    """The broker for `stdout://`."""
    url, _ = split_url(url, options, ())
    if url.partition(":")[2].strip("/"):
        raise ConfigurationError(f"{url!r}: standard output has no address, write stdout://")
    return StdoutBroker(options)
