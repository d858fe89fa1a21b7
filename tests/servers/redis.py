"""Redis from its Debian package."""

import shutil
from collections.abc import Mapping

import redis

from .outcome import Unavailable
from .server import Server

_HOW = "there is no Redis: apt-get install redis-server, or set POSTROOM_TEST_REDIS_URL"


class RedisServer(Server):
    """A Redis server that writes every command to its file before it answers.

    With `fsync=False` it leaves it to the operating system when the file reaches the disk: what
    was answered survives a kill of the server still, which it does not with the usual `everysec`.
    """

    name = "Redis"

    def __init__(
        self,
        *,
        fsync: bool = True,
        settings: Mapping[str, str] | None = None,
        url: str | None = None,
    ) -> None:
        self.settings = {
            "appendonly": "yes",
            "appendfsync": "always" if fsync else "no",
            "save": "",
            "bind": "127.0.0.1",
        } | dict(settings or {})
        super().__init__(fsync=fsync, url=url)

    def _find_programs(self) -> None:
        found = shutil.which("redis-server")
        if found is None:
            raise Unavailable(_HOW)
        self._server = found

    def _prepare(self) -> None:
        pass

    def _command(self) -> list[str]:
        settings = {"port": str(self.port), "dir": str(self.directory)} | self.settings
        words = [word for name, value in settings.items() for word in (f"--{name}", value)]
        return [self._server, *words]

    def _own_url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def _ask(self) -> None:
        with self.client() as client:
            client.ping()

    def client(self) -> redis.Redis:
        """A client of the plain kind, for the far end of a test."""
        return redis.Redis.from_url(self.url, socket_timeout=30, socket_connect_timeout=5)
