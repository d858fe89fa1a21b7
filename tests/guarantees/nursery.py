"""Real child processes, started in milliseconds: relays and writers that tests stop and kill."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

_CRADLE = Path(__file__).with_name("cradle.py")

# A child dies with the thread that started its cradle, so that thread lasts to the end.
_starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cradle-starter")


class Child:
    """A process of ours. Whatever happens to it, `code` tells how it ended: -9 means killed."""

    def __init__(self, nursery: "Nursery", pid: int, log: Path) -> None:
        self.pid = pid
        self._nursery = nursery
        self._log = log

    @property
    def log(self) -> str:
        """What it has written to stdout and stderr so far: its signals among it."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    @property
    def code(self) -> int | None:
        """Its exit code, negative for a signal; None while it lives."""
        return self._nursery.code_of(self.pid)

    def is_stopped(self) -> bool:
        """Whether it stands still (SIGSTOP)."""
        try:
            text = Path(f"/proc/{self.pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return False
        return text.rpartition(")")[2].split()[0] in "Tt"

    def stands_or_ended(self) -> bool:
        return self.is_stopped() or self.code is not None

    def send(self, number: signal.Signals) -> None:
        if self.code is None:
            with suppress(ProcessLookupError):  # it may go by itself
                os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.send(signal.SIGKILL)
        self.wait()

    def stop(self) -> None:
        self.send(signal.SIGSTOP)

    def resume(self) -> None:
        self.send(signal.SIGCONT)

    def terminate(self) -> None:
        self.send(signal.SIGTERM)

    def wrote(self, text: str, times: int = 1) -> bool:
        """Whether a text stands in its log, so many times."""
        return self.log.count(text) >= times

    @property
    def lanes_acquired(self) -> int:
        """How many lanes it has acquired so far, those that it lost again too."""
        runs = re.findall(r"lanes\.acquired lanes=(\S+)", self.log)
        ends = [run.split("-") for each in runs for run in each.split(",")]
        return sum(int(end[-1]) - int(end[0]) + 1 for end in ends)

    def wait(self, timeout: float = 120.0) -> int:
        """Wait for its end; returns the exit code."""
        return self._nursery.wait(self, timeout)


class Nursery:
    """Where children come from. Leaving it ends all of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._orders = itertools.count(1)
        self._changed = threading.Condition()
        self._born: dict[int, int] = {}
        self._gone: dict[int, int] = {}
        self._over = False
        self._cradle = _starter.submit(self._start).result()
        self._reader = threading.Thread(target=self._read, name="nursery", daemon=True)
        self._reader.start()

    def start(
        self, program: str, *, environment: Mapping[str, str] | None = None, **options: Any
    ) -> Child:
        """Start a program of `programs.PROGRAMS` with these options."""
        number = next(self._orders)
        log = self.folder / f"child-{number}.log"
        order = {
            "order": number,
            "program": program,
            "options": options,
            "environment": dict(environment or {}),
            "log": str(log),
        }
        assert self._cradle.stdin is not None
        with self._changed:
            self._cradle.stdin.write(json.dumps(order).encode() + b"\n")
            self._cradle.stdin.flush()
            if not self._changed.wait_for(lambda: number in self._born or self._over, 120):
                raise TimeoutError("the cradle bears no children")
            if self._over:
                raise RuntimeError("the cradle died, and all children with it")
            return Child(self, self._born[number], log)

    def code_of(self, pid: int) -> int | None:
        with self._changed:
            return self._gone.get(pid)

    def wait(self, child: Child, timeout: float) -> int:
        with self._changed:
            if not self._changed.wait_for(lambda: child.pid in self._gone, timeout):
                raise TimeoutError(f"child {child.pid} does not end; it wrote:\n{child.log}")
            return self._gone[child.pid]

    def close(self) -> None:
        assert self._cradle.stdin is not None
        self._cradle.stdin.close()
        self._cradle.wait(60)
        self._reader.join(10)
        assert self._cradle.stdout is not None
        self._cradle.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, str(_CRADLE), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def _read(self) -> None:
        assert self._cradle.stdout is not None
        for line in self._cradle.stdout:
            news = json.loads(line)
            with self._changed:
                if "born" in news:
                    # A number may come again; what is known of its last bearer is old.
                    self._gone.pop(news["pid"], None)
                    self._born[news["born"]] = news["pid"]
                elif "gone" in news:
                    self._gone[news["gone"]] = news["code"]
                self._changed.notify_all()
        with self._changed:
            self._over = True
            self._changed.notify_all()
