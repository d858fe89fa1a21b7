"""Processes of a gateway that may be killed: each is started again, and its deaths are counted.

Promise: none of them reads settings of whoever started it, neither POSTROOM_* nor a postroom.toml
in the working directory, so that what is played never reaches a real exchange.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from postroom.worker.apart import environment_apart

__all__ = ["Child"]

RESTART_SECONDS = 0.1


class Child:
    """A Python program that is started again whenever it dies, until the block ends.

    Of Postroom's settings it has those of `environment` alone, and it works where its log lies.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        log: Path,
    ) -> None:
        self.name = name
        self.deaths = 0
        self.failures = 0  # deaths that nobody wanted: it ended by itself, with an error
        self._arguments = list(arguments)
        self._environment = environment_apart() | dict(environment or {})
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        self._broken_off = False

    async def __aenter__(self) -> Child:
        self._task = asyncio.create_task(self._keep())
        return self

    async def __aexit__(self, *exc: object) -> None:
        """It may finish what it does; not if the block was broken off, when nobody waits for it."""
        self._stopping = True
        self._broken_off = exc[0] is not None
        assert self._task is not None
        if not self._broken_off:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(15):
                    await asyncio.shield(self._task)
                return
        self._signal(signal.SIGKILL)
        await self._task

    def kill(self) -> bool:
        """kill -9; returns whether there was anything to kill."""
        return self._signal(signal.SIGKILL)

    def last_words(self) -> str:
        """The last line of its log; empty if it has said nothing."""
        with contextlib.suppress(FileNotFoundError):
            lines = self._log.read_text("utf-8", "replace").split("\n")
            return next((line.strip() for line in reversed(lines) if line.strip()), "")
        return ""

    async def _keep(self) -> None:
        while not self._stopping:
            with self._log.open("ab") as log:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    *self._arguments,
                    cwd=self._log.parent,
                    env=self._environment,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            if self._broken_off:
                self.kill()  # it was just being started
            code = await self._process.wait()
            if not self._stopping:
                self.deaths += 1
                self.failures += code > 0  # below 0 is a signal: it was killed
                await asyncio.sleep(RESTART_SECONDS)

    def _signal(self, number: signal.Signals) -> bool:
        process = self._process
        if process is None or process.returncode is not None:
            return False
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
            return True
        return False
