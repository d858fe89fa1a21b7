"""An application behind a real socket, on a loop in a thread of its own."""

import asyncio
import threading
from typing import Any

from postroom.gateway.serving import listening, serving

PATIENCE_SECONDS = 120  # however slow the machine is


class Served:
    """An application behind a socket, on a loop in a thread, until `stop`."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._ready, self._error = threading.Event(), None
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        ready = self._ready.wait(PATIENCE_SECONDS)
        if self._error is not None:
            raise self._error
        assert ready

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            self._error = error  # type: ignore[assignment]
            self._ready.set()

    async def _serve(self) -> None:
        async with serving(self.app, listening("127.0.0.1", 0)) as self.url:
            self._ready.set()
            await self._stopping.wait()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive()
        self._loop.close()
