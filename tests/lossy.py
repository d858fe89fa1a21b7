"""A proxy that knows the protocol: it loses the reply to the n-th request of a name, or cuts the
connection just before that request."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from proxy import ChaosProxy, Direction, Link
from wires import MariaDBTalk, NatsTalk, PostgresTalk, Talk

TALKS: dict[str, type[Talk]] = {
    "postgresql": PostgresTalk,
    "mysql": MariaDBTalk,
    "nats": NatsTalk,
}


@dataclass
class Fault:
    """At the `at`-th request of this name: its reply is lost, or it never arrives itself."""

    what: str
    at: int
    lost: bool  # the server has done it, and nobody is told
    happened: bool = False

    def __str__(self) -> str:
        return f"{'reply lost' if self.lost else 'cut before'}: {self.what} #{self.at}"


class LossyProxy(ChaosProxy):
    """Counts the requests of all connections by name, and does what it was told at some of them."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._new_talk = TALKS[url.partition(":")[0]]
        self.passed: Counter[str] = Counter()
        self._faults: list[Fault] = []
        self._note: Callable[[], None] = lambda: None

    def begin(self, faults: Iterable[Fault] = (), note: Callable[[], None] = lambda: None) -> None:
        """Count anew. `note` is called at each fault, while nothing else can pass."""

        async def begin() -> None:
            self.passed = Counter()
            self._faults, self._note = list(faults), note

        self._run(begin())

    def end(self) -> None:
        """Forward everything from now on."""

        async def end() -> None:
            self._faults = []

        self._run(end())

    def meet(self, what: str) -> Fault | None:
        """Count a request; returns what shall happen to it."""
        self.passed[what] += 1
        for fault in self._faults:
            if (fault.what, fault.at) == (what, self.passed[what]) and not fault.happened:
                return fault
        return None

    def happen(self, fault: Fault) -> None:
        if not fault.happened:
            fault.happened = True
            self._note()

    def _new_link(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Link:
        shared = self._target, self._flowing, self._losses
        return _LossyLink(self, self._new_talk(), *shared, reader, writer)


class _LossyLink(Link):
    def __init__(self, proxy: LossyProxy, talk: Talk, *rest: Any) -> None:
        self._proxy = proxy
        self._talk = talk
        self._fault: Fault | None = None
        super().__init__(*rest)

    def _admit(self, data: bytes, direction: Direction) -> tuple[bytes, bool]:
        if direction == "to_client":
            return self._admit_reply(data)
        for request in self._talk.requests(data):
            fault = self._proxy.meet(request.what)
            if fault is None:
                continue
            if not fault.lost:
                self._proxy.happen(fault)
                return data[: request.start], True
            self._fault = self._fault or fault
            self._talk.expect(request)
        return data, False

    def _admit_reply(self, data: bytes) -> tuple[bytes, bool]:
        before, complete = self._talk.reply(data)
        if complete and self._fault is not None:
            self._proxy.happen(self._fault)
        return data[:before], complete
