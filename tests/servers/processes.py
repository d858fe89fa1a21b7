"""Starting, stopping and watching operating-system processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

from .places import account

# Linux sends the parent-death signal when the starting *thread* ends. A test may start a server
# from a thread of its own, so all servers are started by one thread that lasts to the end.
_starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="server-starter")

_LAUNCH = Path(__file__).with_name("launch.py")


def spawn(argv: list[str], log: IO[bytes], *, unprivileged: bool) -> subprocess.Popen[bytes]:
    """Start a server in a session of its own, out of reach of the terminal's Ctrl-C."""
    uid, gid = (account().uid, account().gid) if unprivileged and account().drop else (-1, -1)
    launch = [sys.executable, "-I", "-S", str(_LAUNCH), str(os.getpid()), str(uid), str(gid)]

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            launch + argv,
            cwd="/",
            env={**os.environ, "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    return _starter.submit(start).result()


class Process(NamedTuple):
    """A process and when it started, which tells it from a later one of the same number."""

    pid: int
    started: int

    def state(self) -> str | None:
        """The kernel's letter for its state, `T` for stopped; None when it is gone."""
        found = _look(self.pid)
        # A zombie holds nothing any more, and in a container may find nobody to bury it.
        if found is None or found[2] != self.started or found[0] in "ZX":
            return None
        return found[0]

    def send(self, number: signal.Signals) -> None:
        if self.state() is not None:
            with suppress(ProcessLookupError):  # it may go by itself
                os.kill(self.pid, number)


def _look(pid: int) -> tuple[str, int, int] | None:
    """State, parent and start time."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name before the last parenthesis may itself hold spaces and parentheses.
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[1]), int(fields[19])


def family(pid: int) -> list[Process]:
    """A process and all its descendants, the eldest first."""
    known: dict[int, list[Process]] = {}
    eldest: list[Process] = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (found := _look(int(entry))) is not None:
            process = Process(int(entry), found[2])
            known.setdefault(found[1], []).append(process)
            if process.pid == pid:
                eldest.append(process)
    members = eldest
    for member in members:
        members.extend(known.get(member.pid, []))
    return members


def halt(pid: int) -> list[Process]:
    """Stop a process and all its descendants; answer once none of them runs."""
    members: list[Process] = []

    def halted() -> bool:
        nonlocal members
        # Looked for anew each time, the eldest first: only a halted parent has no more children.
        members = family(pid)
        running = [member for member in members if member.state() not in ("T", "t", None)]
        for member in running:
            member.send(signal.SIGSTOP)
        return not running

    wait_until(halted, 10, f"process {pid} to halt")
    return members


def end_with_us(members: Iterable[Process]) -> subprocess.Popen[bytes]:
    """Start a guard that kills these halted processes if our process dies.

    A server's own children leave when they see it die, but a halted one sees nothing. The guard
    learns of our death from the end of its input.
    """
    pids = [str(member.pid) for member in members]
    return subprocess.Popen(
        ["/bin/sh", "-c", 'read -r _; kill -KILL "$@"', "guard", *pids],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def wait_until(check: Callable[[], bool], timeout: float, what: str) -> None:
    # perf_counter, because a test may have frozen the other clocks.
    deadline = time.perf_counter() + timeout
    while not check():
        if time.perf_counter() > deadline:
            raise TimeoutError(f"waited {timeout} s for {what}")
        time.sleep(0.005)
