"""An event loop whose time jumps to the next timer, shared by processes that take turns by dice.

Promise: one seed gives one order of events. Within a process callbacks run in the order asyncio
gives them; which process has the next turn is drawn. A process can stand still while time goes on
for the others, and can end between any two of its callbacks.
"""

import asyncio
import contextvars
import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from random import Random
from types import SimpleNamespace
from typing import Any

EPOCH_SECONDS = 1_700_000_000.0
MOST_KNOWN = 200  # tasks of a process, until those that are done are forgotten


@dataclass(eq=False)
class Process:
    """One process of the simulated world: its callbacks, and its idea of the time."""

    name: str
    skew_seconds: float = 0.0  # how far its wall clock is ahead of the true time
    booted_seconds: float = 0.0  # where its monotonic clock began
    frozen: bool = False
    dead: bool = False
    owner: str = ""  # the incarnation of its relay
    ready: deque["Handle"] = field(default_factory=deque)
    waiting: bool = False  # it stands among those that may have the next turn
    known: list["Task"] = field(default_factory=list)
    fuse: int | None = None  # so many callbacks until `blow`
    blow: Callable[[], None] = lambda: None
    waits_for_send: bool = False  # `blow` comes when its next send is under way

    def tasks(self) -> list["Task"]:
        """Those that are not done."""
        return [task for task in self.known if not task.done()]


OUTSIDE = Process("outside")
_process = contextvars.ContextVar("process", default=OUTSIDE)
_numbers = count()


def current() -> Process:
    """The process whose code runs now."""
    return _process.get()


class Handle:
    """A callback that will run; as asyncio's own, and much cheaper to make."""

    __slots__ = ("args", "callback", "context", "is_cancelled", "time")

    def __init__(
        self, callback: Any, args: tuple[Any, ...], context: contextvars.Context, time: float
    ) -> None:
        self.callback = callback
        self.args = args
        self.context = context
        self.time = time
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True
        self.callback = self.args = None  # as asyncio does it: what they hold may go

    def cancelled(self) -> bool:
        return self.is_cancelled

    def when(self) -> float:
        return self.time


class Future(asyncio.Future[Any]):
    """Futures stand in sets; addresses must not decide in which order they are woken. Most never
    do, so the number is drawn when it is asked for."""

    _number = -1

    def __hash__(self) -> int:
        if self._number < 0:
            self._number = next(_numbers)
        return self._number


class Task(asyncio.Task[Any]):
    """As `Future`."""

    _number = -1

    def __hash__(self) -> int:
        if self._number < 0:
            self._number = next(_numbers)
        return self._number


class Loop(asyncio.AbstractEventLoop):
    """Runs callbacks of many processes on one thread, in an order drawn from `random`."""

    def __init__(self, random: Random) -> None:
        global _numbers
        _numbers = count()
        OUTSIDE.ready.clear()
        OUTSIDE.waiting = False
        self.random = random
        self.now = 0.0
        self.turns = 0
        self.errors: list[str] = []  # callbacks that failed
        self._timers: list[tuple[float, int, Handle]] = []
        self._sequence = count()
        self._processes: list[Process] = []

    # ── what asyncio asks of a loop ────────────────────────────────────────────────────────────

    def time(self) -> float:
        return self.now

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def create_future(self) -> Future:
        return Future(loop=self)

    def create_task(self, coro: Any, **how: Any) -> Task:  # type: ignore[override]
        task = Task(coro, loop=self, **how)
        process = current()
        if len(process.known) > MOST_KNOWN:
            process.known = process.tasks()
        process.known.append(task)
        return task

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:
        if context is None:
            context = contextvars.copy_context()
        handle = Handle(callback, args, context, self.now)
        process = context.get(_process, OUTSIDE)
        process.ready.append(handle)
        if not process.waiting:
            process.waiting = True
            self._processes.append(process)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> Any:
        when = self.now + delay
        handle = Handle(callback, args, context or contextvars.copy_context(), when)
        heapq.heappush(self._timers, (when, next(self._sequence), handle))
        return handle

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:
        handle = Handle(callback, args, context or contextvars.copy_context(), when)
        heapq.heappush(self._timers, (when, next(self._sequence), handle))
        return handle

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Future:  # type: ignore[override]
        future = self.create_future()
        future.set_result(func(*args))
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Exceptions that nobody asked for: when they are noticed is up to the garbage collector,
        so they are not part of the story."""

    # ── processes ──────────────────────────────────────────────────────────────────────────────

    def spawn(self, process: Process, function: Callable[..., Any], *args: Any) -> Task:
        """Run a coroutine function as a task of the process."""
        context = contextvars.copy_context()
        context.run(_process.set, process)
        task: Task = context.run(lambda: self.create_task(function(*args)))
        return task

    def inside(self, process: Process) -> contextvars.Context:
        """The context for callbacks of the process."""
        context = contextvars.copy_context()
        context.run(_process.set, process)
        return context

    # ── turning ────────────────────────────────────────────────────────────────────────────────

    def run_until(self, task: Task) -> None:
        """Turn until the task is done; raise what it raised."""
        asyncio.events._set_running_loop(self)
        try:
            while not task.done():
                self._turn()
        finally:
            asyncio.events._set_running_loop(None)
        task.result()

    def _turn(self) -> None:
        """Whose time has come joins the others; then one process has its turn."""
        timers, processes = self._timers, self._processes
        while timers and (timers[0][0] <= self.now or not processes):
            when, _, handle = heapq.heappop(timers)
            if handle.is_cancelled:
                continue
            if when > self.now:
                self.now = when
            process = handle.context.get(_process, OUTSIDE)
            process.ready.append(handle)
            if not process.waiting:
                process.waiting = True
                processes.append(process)
        if len(processes) == 1 and not processes[0].frozen:
            self._give_turn(processes[0])
        elif awake := [process for process in processes if not process.frozen]:
            self._give_turn(awake[int(self.random.random() * len(awake))])
        elif timers:
            self.now = max(self.now, timers[0][0])
        else:
            raise RuntimeError("nothing will ever happen again")

    def _give_turn(self, process: Process) -> None:
        """Run what is ready now, and not what it makes ready."""
        ready = process.ready
        for _ in range(len(ready)):
            if process.frozen or not ready:
                break
            handle = ready.popleft()
            if handle.is_cancelled:
                continue
            self.turns += 1
            try:
                handle.context.run(handle.callback, *handle.args)
            except Exception as error:
                self.errors.append(f"{handle.callback!r} failed: {error!r}")
            if process.fuse is not None:
                self._burn(process)
        if not ready:
            process.waiting = False
            self._processes.remove(process)

    def _burn(self, process: Process) -> None:
        assert process.fuse is not None
        process.fuse -= 1
        if process.fuse <= 0:
            process.fuse = None
            process.blow()


def clocks(loop: Loop) -> SimpleNamespace:
    """A stand-in for the module `time`: each process has clocks of its own."""

    def monotonic() -> float:
        return loop.now + _process.get().booted_seconds

    def wall() -> float:
        return EPOCH_SECONDS + loop.now + _process.get().skew_seconds

    return SimpleNamespace(monotonic=monotonic, time=wall)
