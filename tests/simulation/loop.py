"""An event loop whose time jumps to the next timer, shared by processes that take turns by dice.

Promise: one seed gives one order of events. Within a process callbacks run in the order asyncio
gives them; which process has the next turn is drawn. A process can stand still while time goes on
for the others, and can end between any two of its callbacks.
"""

import asyncio
import contextvars
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from itertools import count
from random import Random
from types import SimpleNamespace
from typing import Any

EPOCH_SECONDS = 1_700_000_000.0


@dataclass(eq=False)
class Process:
    """One process of the simulated world: its callbacks, and its idea of the time."""

    name: str
    skew_seconds: float = 0.0  # how far its wall clock is ahead of the true time
    booted_seconds: float = 0.0  # where its monotonic clock began
    frozen: bool = False
    dead: bool = False
    ready: deque[asyncio.Handle] = field(default_factory=deque)
    tasks: dict["Task", None] = field(default_factory=dict)
    fuse: int | None = None  # so many callbacks until `blow`
    blow: Callable[[], None] = lambda: None
    waits_for_send: bool = False  # `blow` comes when its next send is under way


OUTSIDE = Process("outside")
_process = contextvars.ContextVar("process", default=OUTSIDE)
_numbers = count()


def current() -> Process:
    """The process whose code runs now."""
    return _process.get()


class Future(asyncio.Future[Any]):
    """Futures stand in sets; addresses must not decide in which order they are woken."""

    def __init__(self, *, loop: asyncio.AbstractEventLoop) -> None:
        self._number = next(_numbers)
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._number


class Task(asyncio.Task[Any]):
    """As `Future`."""

    def __init__(self, coro: Coroutine[Any, Any, Any], **how: Any) -> None:
        self._number = next(_numbers)
        super().__init__(coro, **how)

    def __hash__(self) -> int:
        return self._number


class Loop(asyncio.AbstractEventLoop):
    """Runs callbacks of many processes on one thread, in an order drawn from `random`."""

    def __init__(self, random: Random) -> None:
        global _numbers
        _numbers = count()
        self.random = random
        self.now = 0.0
        self.turns = 0
        self.errors: list[str] = []
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
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
        process.tasks[task] = None
        task.add_done_callback(lambda done: process.tasks.pop(done, None))  # type: ignore[arg-type]
        return task

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._put(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(
        self, delay: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._sequence), handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Future:  # type: ignore[override]
        future = self.create_future()
        future.set_result(func(*args))
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.errors.append(f"{context.get('message')} {context.get('exception')!r}")

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

    def _put(self, handle: asyncio.Handle) -> None:
        process: Process = handle._context.get(_process, OUTSIDE)  # type: ignore[attr-defined]
        if not process.ready and process not in self._processes:
            self._processes.append(process)
        process.ready.append(handle)

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
        timers, processes = self._timers, self._processes
        while timers and (timers[0][0] <= self.now or not processes):
            when, _, handle = heapq.heappop(timers)
            if not handle._cancelled:  # type: ignore[attr-defined]
                self.now = max(self.now, when)
                self._put(handle)
        awake = [process for process in processes if not process.frozen]
        if not awake:
            if not timers:
                raise RuntimeError("nothing will ever happen again")
            self.now = max(self.now, timers[0][0])
            return
        process = awake[0] if len(awake) == 1 else self.random.choice(awake)
        ready = process.ready
        for _ in range(len(ready)):
            if process.frozen or not ready:
                break
            handle = ready.popleft()
            if not handle._cancelled:  # type: ignore[attr-defined]
                self.turns += 1
                handle._run()
                if process.fuse is not None:
                    self._burn(process)
        if not ready:
            processes.remove(process)

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
