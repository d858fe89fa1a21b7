"""A receiver of webhooks, of our own making: see receiver.py for how it may misbehave."""

import base64
import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from .outcome import Unavailable
from .server import Server

_PROGRAM = Path(__file__).with_name("receiver.py")
HOST = "hooks.test"


class Received(NamedTuple):
    """A request as it came."""

    path: str
    headers: dict[str, str]
    body: bytes


class WebhookServer(Server):
    """A receiver on loopback; with `tls` it is `hooks.test` and `ca` is what to trust."""

    name = "Webhooks"
    unprivileged = False  # the interpreter may lie where only root can look

    def __init__(self, *, tls: bool = False) -> None:
        self._tls = tls
        super().__init__(fsync=False)

    @property
    def ca(self) -> Path:
        return self.directory / "certificate.pem"

    @property
    def received(self) -> list[Received]:
        """Every request it took for received, over all its starts."""
        path = self.directory / "received"
        lines = path.read_text().splitlines() if path.exists() else []
        documents = [json.loads(line) for line in lines]
        return [
            Received(each["path"], dict(each["headers"]), base64.b64decode(each["body"]))
            for each in documents
        ]

    def forget(self) -> None:
        """Empty what was received; the program appends to the same file."""
        with (self.directory / "received").open("w"):
            pass

    def _find_programs(self) -> None:
        if self._tls and shutil.which("openssl") is None:
            raise Unavailable("there is no openssl to make a certificate with")

    def _prepare(self) -> None:
        if self._tls and not self.ca.exists():
            name = ["-subj", f"/CN={HOST}", "-addext", f"subjectAltName=DNS:{HOST}"]
            keep = ["-keyout", str(self.directory / "key.pem"), "-out", str(self.ca)]
            kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
            subprocess.run(
                ["openssl", "req", "-x509", *kind, *name, *keep], check=True, capture_output=True
            )

    def _command(self) -> list[str]:
        tls = [str(self.ca), str(self.directory / "key.pem")] if self._tls else []
        where = [str(self.port), str(self.directory / "received")]
        return [sys.executable, "-I", "-S", str(_PROGRAM), *where, *tls]

    def _own_url(self) -> str:
        return f"https://{HOST}:{self.port}" if self._tls else f"http://127.0.0.1:{self.port}"

    def _ask(self) -> None:
        socket.create_connection(("127.0.0.1", self.port), timeout=5).close()
