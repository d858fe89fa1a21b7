"""Bears the children of the nursery: cradle.py PARENT

It has everything imported once and forks a process for each order, so that a child starts in
milliseconds and still is a real process with a number of its own, to be stopped and killed.
Orders and news are lines of JSON on stdin and stdout; the end of stdin ends every child.
"""

import contextlib
import ctypes
import importlib
import json
import os
import selectors
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
sys.path[0:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]


def main() -> None:
    die_with(int(sys.argv[1]))
    import programs

    from planted import plant_chosen

    plant_chosen()
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    watch = selectors.DefaultSelector()
    watch.register(0, selectors.EVENT_READ)
    watch.register(read, selectors.EVENT_READ)
    tell({"ready": os.getpid()})
    unread = b""
    while True:
        for key, _ in watch.select():
            if key.fd == read:
                os.read(read, 4096)
                bury()
                continue
            data = os.read(0, 65536)
            if not data:
                return
            *lines, unread = (unread + data).split(b"\n")
            for line in lines:
                bear(json.loads(line), programs)


def bear(order: dict[str, Any], programs: Any) -> None:
    if (module := programs.MODULES.get(order["program"])) is not None:
        importlib.import_module(module)
    pid = os.fork()
    if pid:
        tell({"born": order["order"], "pid": pid})
        return
    status = 1
    try:
        grow_up(order)
        status = programs.PROGRAMS[order["program"]](**order["options"]) or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def grow_up(order: dict[str, Any]) -> None:
    """Be like a process that was started by itself: own signals, own output, own failpoints."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    die_with(os.getppid())
    nothing = os.open(os.devnull, os.O_RDONLY)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for source, goal in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, goal)
    os.environ.update(order["environment"])
    from postroom import failpoints

    failpoints.clear()
    failpoints.load_environment()


def bury() -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            tell({"gone": pid, "code": os.waitstatus_to_exitcode(status)})


def tell(news: dict[str, Any]) -> None:
    os.write(1, json.dumps(news).encode() + b"\n")


def die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    main()
