"""Log lines leave from a thread of their own: a pipe that is not read stops no worker."""

import fcntl
import logging
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import COMMAND
from counter import draft, publish

from helpers import eventually
from postroom.ops import logs


def left(path: Path) -> int:
    with sqlite3.connect(path) as connection:
        return int(connection.execute("SELECT count(*) FROM postroom_outbox").fetchone()[0])


@pytest.mark.skipif(not hasattr(fcntl, "F_SETPIPE_SZ"), reason="needs a pipe of a known size")
def test_a_full_pipe_stops_neither_deliveries_nor_sigterm(tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    url = f"sqlite:///{path}"
    publish(url)
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
    clean = {k: v for k, v in os.environ.items() if not k.startswith("POSTROOM_")}
    process = subprocess.Popen(
        [COMMAND, "relay", "-v", "--database", url, "--broker", "stdout://"],
        cwd=tmp_path,
        env=clean,
        stdout=subprocess.DEVNULL,
        stderr=write,
    )
    try:
        for _ in range(5):
            publish(url, *(draft("note", f"k{n}") for n in range(60)))
            eventually(lambda: left(path) == 0, 60)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(write)
    # The pipe holds what fitted, and no broken line in between.
    with os.fdopen(read, "rb") as pipe:
        assert b"relay.started" in pipe.read()


class Stuck:
    """A stream that is full until its lines are read."""

    def __init__(self) -> None:
        self.read, self._write = os.pipe()
        size = fcntl.fcntl(self._write, fcntl.F_SETPIPE_SZ, 4096)
        os.write(self._write, b"\n" * size)

    def fileno(self) -> int:
        return self._write

    def lines(self) -> list[str]:
        os.set_blocking(self.read, False)
        found = b""
        while True:
            try:
                found += os.read(self.read, 65536)
            except BlockingIOError:
                return found.decode().splitlines()


@pytest.mark.skipif(not hasattr(fcntl, "F_SETPIPE_SZ"), reason="needs a pipe of a known size")
def test_lines_that_find_no_room_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "WAITING_LINES", 50)
    monkeypatch.setattr(logs, "FLUSH_SECONDS", 0.2)
    stream: Any = Stuck()
    handler = logs.BackgroundHandler(stream)
    log = logging.getLogger("postroom")
    log.addHandler(handler)
    try:
        log.warning("line 0")
        eventually(handler._lines.empty)  # the thread has it, and waits for room in the pipe
        for n in range(1, 200):
            log.warning("line %d", n)
        handler.flush()  # returns though nothing is read
        heard: list[str] = []
        eventually(lambda: heard.extend(stream.lines()) or "log.dropped" in " ".join(heard))
    finally:
        log.removeHandler(handler)
        handler.close()
    written = [line for line in heard if line.startswith("line")]
    assert written == [f"line {n}" for n in range(51)]
    assert [line for line in heard if "dropped" in line] == ["log.dropped count=149"]


EMBEDDED = """
import asyncio, sys
from postroom import Relay
from postroom.brokers import memory

async def main():
    broker = memory.broker("shop")
    broker.down = True
    async with Relay(sys.argv[1], "memory://shop") as relay:
        while not relay.sender.destinations.down():
            await asyncio.sleep(0.01)

asyncio.run(main())
"""


def test_an_embedded_relays_warnings_need_no_configuration(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'app.db'}"
    publish(url)
    done = subprocess.run(
        [sys.executable, "-c", EMBEDDED, url],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    (line,) = done.stderr.splitlines()
    assert line.startswith("destination.down destination=memory://shop error_code=unreachable")
