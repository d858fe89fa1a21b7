"""What all servers have in common: starting, stopping, killing, pausing."""

import shutil
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, Self

from .outcome import Unavailable, leave_out
from .places import free_port, new_directory, port_is_free
from .processes import end_with_us, family, halt, spawn, wait_until


class Server(ABC):
    """A server of our own, or (with `url`) somebody else's that tests may use but not harm."""

    name: ClassVar[str]
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM
    unprivileged: ClassVar[bool] = True

    def __init__(self, *, fsync: bool = True, url: str | None = None) -> None:
        self._given_url = url
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        if url is None:
            if sys.platform == "win32":
                raise Unavailable(f"a private {self.name} needs Linux or macOS")
            self._find_programs()
            self.port = free_port()
            self.directory = new_directory(self.name.lower(), lasting=fsync)

    # What each kind of server says about itself.

    @abstractmethod
    def _find_programs(self) -> None:
        """Find the server's programs, or raise Unavailable."""

    @abstractmethod
    def _prepare(self) -> None:
        """Initialise the data directory unless it is there."""

    @abstractmethod
    def _command(self) -> list[str]:
        """The command line of the server in the foreground."""

    @abstractmethod
    def _own_url(self) -> str:
        """The URL of the private instance."""

    @abstractmethod
    def _ask(self) -> None:
        """Connect and get an answer, or raise."""

    # What tests use.

    @property
    def url(self) -> str:
        return self._given_url or self._own_url()

    @property
    def private(self) -> bool:
        """Whether it is ours to kill."""
        return self._given_url is None

    def require_private(self) -> None:
        """Leave the running test out unless the server may be killed and paused."""
        if not self.private:
            leave_out(f"{self.name} is somebody else's (given by URL): it cannot be killed")
        if sys.platform != "linux":
            leave_out(f"killing and pausing {self.name} needs Linux")

    @property
    def pid(self) -> int:
        return self._running().pid

    @property
    def log(self) -> str:
        """What the private server has written so far, over all its starts."""
        try:
            return self._log_path.read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def start(self) -> None:
        """Start and wait until it answers; after `stop` or `kill` on the same port and data."""
        if not self.private:
            return self.wait_ready()
        if self._process is not None:
            if self._process.poll() is None:
                raise RuntimeError(f"{self.name} is running already")
            self._bury()
        self._prepare()
        with self._log_path.open("ab") as log:
            self._process = spawn(self._command(), log, unprivileged=self.unprivileged)
        try:
            self.wait_ready()
        except BaseException:
            self.kill()
            raise
        return None

    def wait_ready(self, timeout: float = 60.0) -> None:
        """Wait until a client gets an answer."""
        deadline = time.perf_counter() + timeout
        while True:
            if self._process is not None and self._process.poll() is not None:
                raise RuntimeError(f"{self.name} died at its start:\n{self.log_tail}")
            try:
                return self._ask()
            except Exception as error:
                if time.perf_counter() > deadline:
                    raise TimeoutError(
                        f"{self.name} gives no answer: {error}\n{self.log_tail}"
                    ) from error
                time.sleep(0.01)

    def stop(self, timeout: float = 30.0) -> None:
        """Shut down in good order, or kill it when that takes too long."""
        if not self.private or self._process is None:
            return
        self.resume()
        self._process.send_signal(self.stop_signal)
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
        else:
            self._bury()

    def kill(self) -> None:
        """SIGKILL the server and its children at one moment, as a power cut would."""
        process = self._running()
        # Halted first, so that no child is born between the look and the blow.
        members = halt(process.pid) if sys.platform == "linux" else []
        process.kill()
        for member in members:
            member.send(signal.SIGKILL)
        process.wait()
        wait_until(lambda: all(m.state() is None for m in members), 10, "its children to end")
        self._dismiss_guard()
        self._bury()

    def pause(self) -> None:
        """Halt it: connections stay open and nothing answers. No harm when halted already."""
        if self._guard is None:
            self._guard = end_with_us(halt(self._running().pid))

    def resume(self) -> None:
        """Let it go on. No harm when it was not paused."""
        if self._guard is not None:
            self._dismiss_guard()
            for member in family(self._running().pid):
                member.send(signal.SIGCONT)

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def mend(self) -> None:
        """Undo what a test did to it: resume it, or start it again."""
        if self.private:
            if self._process is None or self._process.poll() is not None:
                self._dismiss_guard()
                self.start()
            else:
                self.resume()

    def close(self) -> None:
        """Stop it for good and remove its data."""
        self.stop()
        if self.private:
            shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{self.name} at {self.url}>"

    # Inside.

    @property
    def log_tail(self) -> str:
        return self.log[-4000:] if self.private else ""

    @property
    def _log_path(self) -> Path:
        return self.directory / "log"

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError(f"{self.name} is not a running server of ours")
        return self._process

    def _bury(self) -> None:
        self._process = None
        wait_until(lambda: port_is_free(self.port), 10, f"port {self.port} to be free")

    def _dismiss_guard(self) -> None:
        if self._guard is not None:
            self._guard.kill()
            self._guard.wait()
            if self._guard.stdin is not None:
                self._guard.stdin.close()
            self._guard = None
