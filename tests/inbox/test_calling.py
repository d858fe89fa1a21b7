"""What is called must have run: a handler of any shape is carried out, or has failed."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
from consuming import QUICK_RETRY, House, apply, note

from helpers import eventually_async
from postroom.calling import is_async, must_have_run


async def plain(event: Any, tx: Any) -> None:
    await apply(tx, event)


class Applies:
    async def __call__(self, event: Any, tx: Any) -> None:
        await apply(tx, event)


def bare(function: Any) -> Any:
    """A decorator that forgot functools.wraps."""

    def inner(event: Any, tx: Any) -> Any:
        return function(event, tx)

    return inner


def generating(event: Any, tx: Any) -> Any:
    yield tx


async def generating_async(event: Any, tx: Any) -> Any:
    yield tx


@pytest.mark.parametrize(
    "handler",
    [plain, Applies(), functools.partial(plain), functools.partial(Applies())],
    ids=["function", "object", "partial", "partial of an object"],
)
async def test_what_is_asynchronous_is_awaited(house: House, handler: Any) -> None:
    consumer = house.consumer()
    consumer.on("note")(handler)
    await house.send(note("k", 1))
    assert (await consumer.drain_once()).handled == 1
    assert house.effects() == [("k", 1)]


@pytest.mark.parametrize(
    ("handler", "made"),
    [
        (bare(plain), "coroutine"),
        (lambda event, tx: plain(event, tx), "coroutine"),
        (generating, "generator"),
        (generating_async, "async_generator"),
    ],
    ids=["decorated", "lambda", "generator", "async generator"],
)
async def test_what_was_not_awaited_has_failed(
    house: House, handler: Callable[..., Any], made: str
) -> None:
    """Not acknowledged and forgotten: tried again, then a dead letter with its history."""
    consumer = house.consumer()
    consumer.on("note")(handler)
    await house.send(note("k", 1))
    assert (await consumer.drain_once()).handled == 0
    async with consumer:
        await eventually_async(lambda: house.letters())
    (letter,) = house.letters()
    assert (letter["error_code"], letter["state"]) == ("WrongCall", "dead")
    assert f"returned a {made}: nothing of it has run" in letter["error"]
    assert len(letter["history"]) == QUICK_RETRY.attempts
    assert consumer.tally.handled == 0


def test_an_ordinary_answer_is_nobodys_business() -> None:
    for answer in (None, 0, "text", [], iter([1]), Applies()):
        must_have_run(answer, plain, "")
    assert not is_async(bare(plain))
    assert is_async(functools.wraps(plain)(bare(plain)))
