"""Small things every test may want."""

import asyncio
import inspect
import os
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, overload

T = TypeVar("T")
# However slow the machine is; where a bug is planted, what is waited for never comes.
PATIENCE_SECONDS = 10.0 if os.environ.get("POSTROOM_PLANTED") else 60.0


class _Patience:
    """Counts one wait, and tells in the end what was last seen.

    It reads perf_counter, because a test may have frozen the other clocks.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.deadline = time.perf_counter() + timeout
        self.last: object = None

    def saw(self, value: object) -> None:
        self.last = value
        if time.perf_counter() > self.deadline:
            cause = value if isinstance(value, Exception) else None
            raise AssertionError(f"not within {self.timeout} s; last: {value!r}") from cause


def eventually(
    check: Callable[[], T],
    timeout: float = PATIENCE_SECONDS,
    *,
    interval: float = 0.02,
    retry: tuple[type[Exception], ...] = (AssertionError,),
) -> T:
    """Call `check` until its answer is true, and give that answer.

    A failed assertion inside, or another error named in `retry`, counts as "not yet".
    """
    patience = _Patience(timeout)
    while True:
        try:
            value = check()
        except retry as error:
            patience.saw(error)
        else:
            if value:
                return value
            patience.saw(value)
        time.sleep(interval)


def until_none_left(left: Callable[[], int], still_seconds: float = 60.0) -> None:
    """Wait until none is left, for as long as it gets fewer: a slow machine may take its time.

    An error counts as "not known yet".
    """
    fewest, patience = sys.maxsize, _Patience(still_seconds)
    while True:
        try:
            now = left()
        except Exception as error:
            patience.saw(error)
        else:
            if not now:
                return
            if now < fewest:
                fewest, patience = now, _Patience(still_seconds)
            patience.saw(f"{now} left")
        time.sleep(0.2)


@overload
async def eventually_async(
    check: Callable[[], Awaitable[T]],
    timeout: float = ...,
    *,
    interval: float = ...,
    retry: tuple[type[Exception], ...] = ...,
) -> T: ...


@overload
async def eventually_async(
    check: Callable[[], T],
    timeout: float = ...,
    *,
    interval: float = ...,
    retry: tuple[type[Exception], ...] = ...,
) -> T: ...


async def eventually_async(
    check: Callable[[], Any],
    timeout: float = PATIENCE_SECONDS,
    *,
    interval: float = 0.02,
    retry: tuple[type[Exception], ...] = (AssertionError,),
) -> Any:
    """`eventually` for async code: the event loop runs on between calls."""
    patience = _Patience(timeout)
    while True:
        try:
            answer = check()
            value = await answer if inspect.isawaitable(answer) else answer
        except retry as error:
            patience.saw(error)
        else:
            if value:
                return value
            patience.saw(value)
        await asyncio.sleep(interval)
