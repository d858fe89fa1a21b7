"""A way to a server that remembers which messages went over it, and can hold back all answers."""

import asyncio
import struct
from collections.abc import Iterable
from typing import Any

from postroom.messages import Message
from proxy import ChaosProxy, Direction, Link

_HOST = b"127.0.0.1"


class Detour(ChaosProxy):
    """With `instead_of`, a port, it stands for that server in its answers too: Kafka tells its
    clients where to go, and they would leave the detour."""

    def __init__(self, url: str, *, instead_of: int | None = None) -> None:
        super().__init__(url)
        self.gone_out = bytearray()
        self.renamed = (_place(instead_of), _place(self.port)) if instead_of else None

    def passed(self, batch: Iterable[Message]) -> int:
        """How many of these messages went over it, answered or not."""
        seen = bytes(self.gone_out)
        return sum(message.id.encode() in seen for message in batch)

    def _new_link(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Link:
        shared = self._target, self._flowing, self._losses
        return _DetourLink(self, *shared, reader, writer)


class _DetourLink(Link):
    def __init__(self, detour: Detour, *rest: Any) -> None:
        self._detour = detour
        super().__init__(*rest)

    def _admit(self, data: bytes, direction: Direction) -> tuple[bytes, bool]:
        if direction == "to_server":
            self._detour.gone_out += data
        elif self._detour.renamed:
            data = data.replace(*self._detour.renamed)
        return super()._admit(data, direction)


def _place(port: int) -> bytes:
    """A host and its port as Kafka writes them in its answers."""
    return _HOST + struct.pack(">i", port)
