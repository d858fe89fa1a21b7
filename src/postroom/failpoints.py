"""Named points where tests stop, fail or kill the process.

`hit("relay.send.before")` costs one look at an empty dict unless something is armed. Points are
armed in the process (`arm`) or, for child processes, by `POSTROOM_FAILPOINTS`:

    POSTROOM_FAILPOINTS="settle.commit.before=kill@2;relay.send.after=error"

An action is `kill` (SIGKILL to oneself), `stop` (SIGSTOP to oneself), `exit`, or `error`; `@n`
fires at the n-th hit only. `POSTROOM_FAILPOINTS_LOG=file` writes down every point passed, so that a
sweep can first learn the points of a scenario and then kill at each in turn.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

__all__ = ["FailpointError", "arm", "clear", "hit", "load_environment"]

Action = Callable[[], None]


class FailpointError(RuntimeError):
    """A failpoint was told to fail here."""


_armed: dict[str, tuple[Action, int]] = {}
_hits: dict[str, int] = {}
_log: str | None = None
_active = False


def hit(name: str) -> None:
    """Pass the point `name`; whatever is armed there happens now."""
    if not _active:
        return
    count = _hits[name] = _hits.get(name, 0) + 1
    if _log is not None:
        with open(_log, "a", encoding="utf-8") as log:
            log.write(f"{name}\n")
    armed = _armed.get(name)
    if armed is not None:
        action, at = armed
        if at in (0, count):
            action()


def arm(name: str, action: Action, *, at: int = 0) -> None:
    """Do `action` at the `at`-th hit of `name` (0: at every hit)."""
    global _active
    _armed[name] = (action, at)
    _active = True


def clear() -> None:
    """Disarm everything and forget all counts."""
    global _active, _log
    _armed.clear()
    _hits.clear()
    _active = False
    _log = None


def load_environment() -> None:
    """Arm what the environment asks for; called once when a process starts."""
    global _active, _log
    _log = os.environ.get("POSTROOM_FAILPOINTS_LOG")
    _active = _active or _log is not None
    for part in filter(None, os.environ.get("POSTROOM_FAILPOINTS", "").split(";")):
        name, _, what = part.partition("=")
        what, _, at = what.partition("@")
        arm(name, _ACTIONS[what], at=int(at or 0))


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop() -> None:
    # To this thread, which stops here with all others; sent to the process, it might go on a while.
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def _exit() -> None:
    os._exit(42)


def _error() -> None:
    raise FailpointError("failpoint")


_ACTIONS: dict[str, Action] = {"kill": _kill, "stop": _stop, "exit": _exit, "error": _error}

load_environment()
