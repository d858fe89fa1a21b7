"""RabbitMQ from its Debian package."""

import asyncio
import os
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

from .outcome import Unavailable
from .places import account, free_port
from .server import Server

_HOW = "there is no RabbitMQ: apt-get install rabbitmq-server, or set POSTROOM_TEST_RABBITMQ_URL"
_LAUNCH = Path(__file__).with_name("launch.py")
# What Debian puts into the PATH wants to be run by root; here is what it runs in turn.
_HOMES = ("/usr/lib/rabbitmq/bin", "/usr/local/sbin", "/usr/sbin")
_HEADER = b"AMQP\x00\x00\x09\x01"


class RabbitMQServer(Server):
    """A RabbitMQ node of its own, with the account guest, password guest.

    Persistent messages survive its death. `config` is added to its own.

    `await written_down(queue)` after a quorum queue is made: before version 3.13.4 it takes the
    server about a second to put on disk that there is one, and if it dies within it the queue
    comes back empty, without a leader, or not at all.
    """

    name = "RabbitMQ"

    def __init__(self, *, config: str = "", fsync: bool = True, url: str | None = None) -> None:
        self._config = config
        super().__init__(fsync=fsync, url=url)
        if url is None:
            # For the daemon that knows where nodes are, and for talk between nodes.
            self._names_port, self._nodes_port = free_port(), free_port()

    def _find_programs(self) -> None:
        path = os.pathsep.join([*_HOMES, os.environ.get("PATH", os.defpath)])
        found = [
            shutil.which(name, path=path) for name in ("rabbitmq-server", "rabbitmqctl", "epmd")
        ]
        if None in found:
            raise Unavailable(_HOW)
        self._server, self._control, self._names = map(str, found)

    def _prepare(self) -> None:
        files = {
            "rabbitmq.conf": f"vm_memory_high_watermark.absolute = 1GB\n{self._config}\n",
            "plugins": "[].\n",
            "env": "",
        }
        for name, text in files.items():
            (self.directory / name).write_text(text)
            account().own(self.directory / name)

    @property
    def _environment(self) -> list[str]:
        here = self.directory
        return [
            f"HOME={here}",
            f"RABBITMQ_NODENAME=postroom{self.port}@localhost",
            f"RABBITMQ_NODE_PORT={self.port}",
            f"RABBITMQ_DIST_PORT={self._nodes_port}",
            "RABBITMQ_NODE_IP_ADDRESS=127.0.0.1",
            f"ERL_EPMD_PORT={self._names_port}",
            "ERL_EPMD_ADDRESS=127.0.0.1",
            f"RABBITMQ_CONF_ENV_FILE={here / 'env'}",
            f"RABBITMQ_CONFIG_FILE={here / 'rabbitmq.conf'}",
            f"RABBITMQ_ENABLED_PLUGINS_FILE={here / 'plugins'}",
            f"RABBITMQ_MNESIA_BASE={here / 'data'}",
            f"RABBITMQ_LOG_BASE={here / 'logs'}",
            "RABBITMQ_LOGS=-",
            "RUNNING_UNDER_SYSTEMD=true",  # so that the shell becomes the server
        ]

    def _command(self) -> list[str]:
        # The daemon of names would stay behind for ever: this one dies with the server.
        names = [sys.executable, "-I", "-S", str(_LAUNCH), "$$", "-1", "-1", self._names]
        port = ["-port", str(self._names_port), "-address", "127.0.0.1"]
        words = " ".join(word if word == "$$" else shlex.quote(word) for word in names + port)
        script = f"{words} >/dev/null 2>&1 & exec {shlex.quote(self._server)}"
        return ["/usr/bin/env", *self._environment, "/bin/sh", "-c", script]

    def _own_url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}"

    def wait_ready(self, timeout: float = 180.0) -> None:
        """Wait until a client gets an answer: on a busy machine it takes its time to start."""
        super().wait_ready(timeout)

    def _ask(self) -> None:
        place = urlsplit(self.url)
        with socket.create_connection((place.hostname, place.port or 5672), timeout=5) as client:
            client.sendall(_HEADER)
            if client.recv(1) != b"\x01":
                raise ConnectionError("it does not speak AMQP 0-9-1")

    async def written_down(self, *queues: str) -> None:
        """Wait until these quorum queues would be there again after a kill."""
        self.require_private()

        def all_there() -> bool:
            found = b"".join(file.read_bytes() for file in self.directory.rglob("names.dets"))
            return all(queue.encode() in found for queue in queues)

        async with asyncio.timeout(60):
            while not await asyncio.to_thread(all_there):
                await asyncio.sleep(0.05)

    def control(self, *words: str) -> str:
        """Run `rabbitmqctl` on it, and give what it says."""
        self.require_private()
        user = {"user": account().uid, "group": account().gid} if account().drop else {}
        done = subprocess.run(
            ["/usr/bin/env", *self._environment, self._control, "-q", *words],
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            **user,
        )
        if done.returncode:
            raise RuntimeError(f"rabbitmqctl {words} failed:\n{done.stdout}{done.stderr}")
        return done.stdout
