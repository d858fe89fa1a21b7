"""What may be called and must have run when it returns.

Promise: nothing counts as done that has only been described. A coroutine or a generator that an
ordinary call hands back has run no line of its function: it is closed, and the call has failed.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from postroom.errors import WrongCall

__all__ = ["is_async", "must_have_run"]


def is_async(function: Any, *, wrapped: bool = True) -> bool:
    """Whether calling it gives something to await, as far as can be seen: a function, a partial of
    one, or an object with `async def __call__`; if `wrapped`, behind whatever `functools.wraps` has
    wrapped."""
    function = inspect.unwrap(function) if wrapped else function
    while isinstance(function, functools.partial):
        function = inspect.unwrap(function.func) if wrapped else function.func
    called = getattr(type(function), "__call__", None)  # noqa: B004 - it is looked at, not called
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)


def must_have_run(answer: Any, function: Any, instead: str) -> None:
    """Refuse what an ordinary call returned if its function has not run by that."""
    lazy = inspect.isgenerator(answer) or inspect.isasyncgen(answer)
    if answer is None or not (lazy or inspect.isawaitable(answer)):
        return
    if not inspect.isasyncgen(answer) and callable(close := getattr(answer, "close", None)):
        close()  # or Python would warn that nobody awaited it
    name = getattr(function, "__qualname__", None) or repr(function)
    raise WrongCall(
        f"{name} was called as an ordinary function and returned a {type(answer).__name__}: "
        f"nothing of it has run. {instead}"
    )
