"""Processes of a gateway that may be killed: each is started again, and its deaths are counted."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["Child"]

RESTART_SECONDS = 0.1


class Child:
    """A program that is started again whenever it dies, until `stop`."""

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
        self._arguments = list(arguments)
        self._environment = {**os.environ, **(environment or {})}
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._stopping = False

    async def __aenter__(self) -> Child:
        self._task = asyncio.create_task(self._keep())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._stopping = True
        self._signal(signal.SIGTERM)
        assert self._task is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(15):
                await asyncio.shield(self._task)
            return
        self._signal(signal.SIGKILL)
        await self._task

    def kill(self) -> bool:
        """kill -9; returns whether there was anything to kill."""
        return self._signal(signal.SIGKILL)

    async def _keep(self) -> None:
        while not self._stopping:
            with self._log.open("ab") as log:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    *self._arguments,
                    env=self._environment,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            await self._process.wait()
            if not self._stopping:
                self.deaths += 1
                await asyncio.sleep(RESTART_SECONDS)

    def _signal(self, number: signal.Signals) -> bool:
        process = self._process
        if process is None or process.returncode is not None:
            return False
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
            return True
        return False
