"""Cancels a task at its n-th await, always the same one, so that a test can go through them all."""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")


class Stepper:
    """Counts the waits of tasks, and cancels the task at the `at`-th of them, or of one place.

    At once: the question is on its way, the answer is not. Or, with `answered`, in the moment in
    which the answer is there and the task has not seen it yet.
    """

    def __init__(self, at: int = 0, *, place: str | None = None, answered: bool = False) -> None:
        self.passed: Counter[str] = Counter()
        self.where = ""
        self.note: Callable[[], None] = lambda: None  # called when it happens
        self._at = at
        self._place = place
        self._answered = answered

    @property
    def cancelled(self) -> bool:
        return bool(self.where)

    async def watch(self, work: Coroutine[Any, Any, T]) -> T:
        """Carry out `work`; each of its waits counts."""
        return await _Watched(self, work)  # type: ignore[no-any-return]

    def waiting(self, work: Coroutine[Any, Any, Any], future: Any) -> None:
        """A task is about to wait; called before it does."""
        place = place_of(work)
        self.passed[place] += 1
        passed = self.passed.total() if self._place is None else self.passed[self._place]
        if self.cancelled or passed != self._at:
            return
        task = asyncio.current_task()
        assert task is not None
        self.where = place
        self.note()
        if self._answered and asyncio.isfuture(future):
            # Our callback comes before that of the task, which would wake it.
            future.add_done_callback(lambda _: task.cancel())
        else:
            task.cancel()


class _Watched:
    """A coroutine that is driven step by step, as `await` itself would do it."""

    def __init__(self, stepper: Stepper, work: Coroutine[Any, Any, Any]) -> None:
        self._stepper = stepper
        self._work = work

    def __await__(self) -> Generator[Any, Any, Any]:
        error: BaseException | None = None
        while True:
            try:
                future = self._work.send(None) if error is None else self._work.throw(error)
            except StopIteration as done:
                return done.value
            self._stepper.waiting(self._work, future)
            try:
                yield future
                error = None
            except BaseException as thrown:
                error = thrown


def place_of(work: Any) -> str:
    """Where it waits: the lines of the coroutines that await each other, the outermost first."""
    names = []
    while work is not None:
        frame = getattr(work, "cr_frame", None) or getattr(work, "gi_frame", None)
        if frame is not None:
            names.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
        work = getattr(work, "cr_await", None) or getattr(work, "gi_yieldfrom", None)
    return " > ".join(names)
