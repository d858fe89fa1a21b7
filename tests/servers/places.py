"""Where a private server lives: its port, its directory, and the account it runs under."""

import atexit
import os
import random
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

_PREFIX = "postroom-servers-"

# Below every system's ephemeral range. A port inside it could be taken by any outgoing connection
# while its server is down; a client that keeps dialling a dead server can even connect to itself.
_PORTS = range(20_000, 32_000)

# Tests may seed the shared generator, and two runs would then fight over the same ports.
_random = random.SystemRandom()


def port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As servers do: connections lingering in TIME_WAIT do not occupy the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """A loopback port that stays ours: nothing but a server would take it."""
    return next(port for port in _random.sample(_PORTS, len(_PORTS)) if port_is_free(port))


class Account:
    """The user a server runs as: ourselves, or `nobody` when we are root.

    Database servers refuse to run as root.
    """

    def __init__(self) -> None:
        self.uid, self.gid = os.getuid(), os.getgid()
        self.drop = self.uid == 0
        if self.drop:
            import pwd  # not on Windows, where this module is only imported

            nobody = pwd.getpwnam("nobody")
            self.uid, self.gid = nobody.pw_uid, nobody.pw_gid

    def own(self, path: Path) -> None:
        if self.drop:
            os.chown(path, self.uid, self.gid)

    def run(self, *argv: str | Path) -> None:
        """Run a program to its end; its output is shown when it fails."""
        who: dict[str, Any] = {}
        if self.drop:
            who = {"user": self.uid, "group": self.gid, "extra_groups": []}
        done = subprocess.run(
            argv,
            cwd="/",
            env={**os.environ, "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
            **who,
        )
        if done.returncode:
            raise RuntimeError(f"{argv[0]} ended with {done.returncode}:\n{done.stdout}")


@cache
def account() -> Account:
    return Account()


def memory() -> Path | None:
    """A roomy directory in memory, if the machine has one.

    Much faster than a disk at making files, and so at making databases. What is in it survives
    the death of a process, which is all that a server without fsync promises.
    """
    path = Path("/dev/shm")
    if os.access(path, os.W_OK) and shutil.disk_usage(path).free >= 4 << 30:
        return path
    return None


@cache
def root(base: Path) -> Path:
    """The directory of this process's servers, removed at exit.

    A lock marks it as in use, so that a later run can remove what a killed one left behind.
    """
    import fcntl  # not on Windows

    _sweep(base)
    # It gets the name that others sweep only once it is locked.
    young = Path(tempfile.mkdtemp(prefix="postroom-young-", dir=base))
    young.chmod(0o711)
    lock = os.open(young / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    path = young.rename(young.with_name(young.name.replace("postroom-young-", _PREFIX)))
    owner = os.getpid()

    def remove() -> None:
        # A forked child inherits this hook, but not the directory.
        if os.getpid() == owner:
            shutil.rmtree(path, ignore_errors=True)

    atexit.register(remove)
    return path


def _sweep(base: Path) -> None:
    import fcntl

    for path in base.glob(f"{_PREFIX}*"):
        try:
            lock = os.open(path / "lock", os.O_RDWR)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except OSError:
            pass  # its owner lives
        finally:
            os.close(lock)


def disk() -> Path:
    return Path(tempfile.gettempdir())


def new_directory(name: str, *, lasting: bool = True) -> Path:
    """A directory that the server's account owns: on disk if `lasting`, else perhaps in memory."""
    base = disk() if lasting else memory() or disk()
    path = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=root(base)))
    account().own(path)
    return path


_templates: dict[tuple[Path, str], Path] = {}


def copy_of_template(name: str, into: Path, build: Callable[[Path], None]) -> None:
    """Copy a freshly initialised data directory, which is built once in a process."""
    home = into.parents[1]  # with all servers of this process on the same file system
    if (home, name) not in _templates:
        template = Path(tempfile.mkdtemp(prefix=f"template-{name}-", dir=home))
        account().own(template)
        build(template / "data")
        _templates[home, name] = template / "data"
    account().run("cp", "-R", _templates[home, name], into)
