"""What only `call:` does: every way a user's function can end."""

import asyncio
import functools
import subprocess
import sys
import textwrap
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers import eventually_async
from helpers_messages import make_message, make_messages
from postroom.brokers import (
    BrokerOptions,
    CanLookUp,
    Delivered,
    Permanent,
    Transient,
    Unknown,
    open_broker,
)
from postroom.brokers.base import CROWDED
from postroom.brokers.call import CallBroker, LookUpCallBroker
from postroom.errors import ConfigurationError
from postroom.messages import Message

QUICK = BrokerOptions(send_timeout_seconds=1.0, concurrency=2)


@pytest.fixture(params=["async", "sync", "sync returning a coroutine", "async object"])
def make(request: pytest.FixtureRequest) -> Callable[[Callable[[Message], Any]], Any]:
    """The same function in each of the forms that users write."""

    def form(body: Callable[[Message], Any]) -> Any:
        async def wrapped(message: Message) -> Any:
            return body(message)

        class Acting:
            async def __call__(self, message: Message) -> Any:
                return body(message)

        return {
            "async": wrapped,
            "sync": body,
            "sync returning a coroutine": lambda message: wrapped(message),
            "async object": Acting(),
        }[request.param]

    return form


Make = Callable[[Callable[[Message], Any]], Any]


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (None, Delivered()),
        (True, Delivered()),
        (Delivered(), Delivered()),
        (Permanent("gone", "no such customer"), Permanent("gone", "no such customer")),
        (Unknown("odd", "who knows"), Unknown("odd", "who knows")),
    ],
)
async def test_what_it_returns(make: Make, answer: object, outcome: object) -> None:
    assert await CallBroker(make(lambda _: answer)).send([make_message()]) == [outcome]


async def test_a_reason_refuses_for_ever(make: Make) -> None:
    (outcome,) = await CallBroker(make(lambda _: "no_such_customer")).send([make_message()])
    assert isinstance(outcome, Permanent)
    assert outcome.code == "no_such_customer"


@pytest.mark.parametrize("answer", [False, 0, 200, {}, object])
async def test_an_answer_of_another_kind_is_not_delivery(make: Make, answer: object) -> None:
    (outcome,) = await CallBroker(make(lambda _: answer)).send([make_message()])
    assert isinstance(outcome, Transient)
    assert outcome.code == "bad_return"
    assert type(answer).__name__ in outcome.text


class Odd(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text for you")


class Base(BaseException):
    pass


@pytest.mark.parametrize(
    "error",
    [ValueError("x"), StopIteration(), Odd(), SystemExit(0), Base(), asyncio.CancelledError()],
)
async def test_what_it_raises(make: Make, error: BaseException) -> None:
    def body(message: Message) -> None:
        raise error

    (outcome,) = await CallBroker(make(body)).send([make_message()])
    assert isinstance(outcome, Transient)
    # Python itself turns StopIteration into RuntimeError inside a coroutine.
    assert outcome.code in (type(error).__name__, "RuntimeError")
    assert outcome.down is None


async def test_a_timeout_it_raises_is_unknown(make: Make) -> None:
    def body(message: Message) -> None:
        raise TimeoutError("gateway")

    (outcome,) = await CallBroker(make(body)).send([make_message()])
    assert outcome == Unknown("timeout", "TimeoutError: gateway")


async def test_keyboard_interrupt_in_a_thread_is_not_delivery() -> None:
    def body(message: Message) -> None:
        raise KeyboardInterrupt

    (outcome,) = await CallBroker(body).send([make_message()])
    assert isinstance(outcome, Transient)


def test_keyboard_interrupt_on_the_loop_ends_the_program() -> None:
    script = """
        import asyncio, sys
        sys.path.insert(0, sys.argv[1])
        from helpers_messages import make_message
        from postroom.brokers.call import CallBroker

        async def body(message):
            raise KeyboardInterrupt

        async def main():
            print(await CallBroker(body).send([make_message()]))

        asyncio.run(main())
    """
    tests = str(Path(__file__).parents[1])
    command = [sys.executable, "-c", textwrap.dedent(script), tests]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode != 0
    assert done.stdout == ""
    assert "KeyboardInterrupt" in done.stderr


async def test_texts_are_short_and_hold_no_secrets(make: Make) -> None:
    def body(message: Message) -> None:
        raise ConnectionError("postgresql://me:canary@host/db password=canary " + "x" * 1_000_000)

    (outcome,) = await CallBroker(make(body)).send([make_message()])
    assert isinstance(outcome, Transient)
    assert outcome.code == "ConnectionError"
    assert "canary" not in outcome.text
    assert len(outcome.text) <= 500


async def test_an_async_call_that_hangs_is_cancelled() -> None:
    cancelled = asyncio.Event()

    async def body(message: Message) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    outcomes = await CallBroker(body, QUICK).send(make_messages(2))
    for outcome in outcomes:
        assert isinstance(outcome, Unknown)
        assert outcome.code == "timeout"
    assert cancelled.is_set()


async def test_a_thread_that_hangs_keeps_its_slot() -> None:
    release = threading.Event()
    started: list[str] = []

    def body(message: Message) -> None:
        started.append(message.id)
        if message.key == "hangs":
            release.wait(60)

    broker = CallBroker(body, QUICK)
    hanging = make_message(key="hangs")
    others = make_messages(5)
    first, *rest = await broker.send([hanging, *others])
    assert isinstance(first, Unknown)
    assert first.code == "timeout"
    assert rest == [Delivered()] * 5  # by the other slot

    assert isinstance((await broker.send([make_message(key="hangs")]))[0], Unknown)
    started.clear()
    began = time.monotonic()
    for outcome in await broker.send(others):
        assert isinstance(outcome, Transient)
        assert (outcome.code, outcome.down) == ("busy", "broker")
    assert time.monotonic() - began < 4  # not one timeout a message
    assert started == []

    release.set()

    async def all_taken() -> bool:
        return await broker.send(others) == [Delivered()] * 5

    await eventually_async(all_taken)


def test_a_thread_that_hangs_does_not_keep_the_process() -> None:
    script = """
        import asyncio, sys, time
        sys.path.insert(0, sys.argv[1])
        from helpers_messages import make_message
        from postroom.brokers import BrokerOptions
        from postroom.brokers.call import CallBroker

        async def main():
            broker = CallBroker(lambda m: time.sleep(300), BrokerOptions(send_timeout_seconds=0.1))
            print((await broker.send([make_message()]))[0].code)

        asyncio.run(main())
    """
    tests = str(Path(__file__).parents[1])
    command = [sys.executable, "-c", textwrap.dedent(script), tests]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert done.stdout == "timeout\n", done.stderr


@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_no_more_calls_at_a_time_than_allowed(kind: str) -> None:
    running, most = 0, 0
    lock = threading.Lock()

    def enter(by: int) -> None:
        nonlocal running, most
        with lock:
            running += by
            most = max(most, running)

    async def slow(message: Message) -> None:
        enter(1)
        await asyncio.sleep(0.005)
        enter(-1)

    def slow_in_a_thread(message: Message) -> None:
        enter(1)
        time.sleep(0.005)
        enter(-1)

    function = slow if kind == "async" else slow_in_a_thread
    broker = CallBroker(function, BrokerOptions(concurrency=3))
    for answer in await asyncio.gather(*(broker.send(make_messages(30)) for _ in range(3))):
        assert answer == [Delivered()] * 30
    assert most == 3


async def test_a_send_as_a_whole_keeps_the_timeout() -> None:
    async def slow(message: Message) -> None:
        await asyncio.sleep(0.15)

    broker = CallBroker(slow, QUICK)
    assert broker.capabilities.max_batch == 2
    began = time.monotonic()
    outcomes = await broker.send(make_messages(50))
    assert time.monotonic() - began < 3  # all of them would take longer
    done = outcomes.count(Delivered())
    assert 0 < done < 20
    assert set(outcomes[done:]) == {CROWDED}  # not started


async def test_a_receiver_that_is_slow_is_not_called_down() -> None:
    async def slow(message: Message) -> None:
        await asyncio.sleep(0.3)

    broker = CallBroker(slow, QUICK)
    answers = await asyncio.gather(*(broker.send(make_messages(2)) for _ in range(8)))
    told = [outcome for answer in answers for outcome in answer]
    assert set(told) == {Delivered(), CROWDED}
    assert await broker.send(make_messages(2)) == [Delivered()] * 2


async def test_calls_that_are_given_up_have_not_returned() -> None:
    async def hangs(message: Message) -> None:
        await asyncio.sleep(60)

    broker = CallBroker(hangs, QUICK)
    first = asyncio.create_task(broker.send(make_messages(2)))
    await asyncio.sleep(0.55)  # the others wait while the first are given up
    others = [broker.send(make_messages(2)) for _ in range(3)]
    told = [outcome for answer in await asyncio.gather(*others) for outcome in answer]
    assert {getattr(outcome, "code", None) for outcome in told} == {"timeout", "busy"}
    assert {outcome.down for outcome in told if isinstance(outcome, Transient)} == {"broker"}
    assert all(isinstance(outcome, Unknown) for outcome in await first)


async def test_cancelling_a_send_starts_no_more_calls() -> None:
    started: list[str] = []

    async def body(message: Message) -> None:
        started.append(message.id)
        await asyncio.sleep(0.05)

    broker = CallBroker(body, BrokerOptions(concurrency=2))
    sending = asyncio.create_task(broker.send(make_messages(100)))
    await asyncio.sleep(0.02)
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    before = len(started)
    await asyncio.sleep(0.1)
    assert len(started) == before == 2
    assert await broker.send(make_messages(2)) == [Delivered()] * 2


# Finding the function.


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("shop_mail")
    monkeypatch.setitem(sys.modules, "shop_mail", module)
    return module


async def test_it_is_found_by_name(shop: Any) -> None:
    seen: list[Message] = []
    shop.send = seen.append
    shop.client = types.SimpleNamespace(send=seen.append)
    message = make_message()
    for url in ("call:shop_mail:send", "call:shop_mail:client.send"):
        assert await open_broker(url).send([message]) == [Delivered()]
    assert seen == [message, message]
    assert not isinstance(open_broker("call:shop_mail:send"), CanLookUp)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("call:", "write call:module:function"),
        ("call:shop_mail", "write call:module:function"),
        ("call::send", "write call:module:function"),
        ("call:no_such_module:send", "there is no module no_such_module"),
        ("call:shop_mail.inner:send", "importing shop_mail.inner failed|no module shop_mail.inner"),
        ("call:shop_mail:absent", "the module shop_mail has no absent"),
        ("call:shop_mail:number", "number is a int, not a function"),
    ],
)
def test_a_wrong_name_says_what_is_missing(shop: Any, url: str, text: str) -> None:
    shop.number = 7
    with pytest.raises(ConfigurationError, match=text):
        open_broker(url)


def test_a_module_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "needs_more.py").write_text("import no_such_library")
    with pytest.raises(ConfigurationError, match=r"needs_more failed: .*no_such_library"):
        open_broker("call:needs_more:send")


# Asking afterwards.


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (True, Delivered()),
        (False, Transient("not_arrived", "lookup says that it did not arrive")),
        (None, Unknown("still_unknown", "lookup could not tell")),
        (Permanent("gone", "for good"), Permanent("gone", "for good")),
    ],
)
async def test_lookup(make: Make, answer: object, outcome: object) -> None:
    broker = LookUpCallBroker(lambda _: None, make(lambda _: answer), QUICK)
    assert isinstance(broker, CanLookUp)
    assert await broker.lookup(make_message()) == outcome


@pytest.mark.parametrize(
    ("error", "outcome"), [(ValueError, Unknown), (ConnectionRefusedError, Transient)]
)
async def test_what_can_be_asked_is_unknown_after_an_exception(
    make: Make, error: type[Exception], outcome: type
) -> None:
    def body(_: object) -> None:
        raise error("too late?")

    broker = LookUpCallBroker(make(body), lambda _: False)
    assert [type(each) for each in await broker.send([make_message()])] == [outcome]


async def test_a_lookup_that_fails_leaves_it_unknown(make: Make) -> None:
    def body(message: Message) -> bool:
        raise ConnectionError("password=canary")

    outcome = await LookUpCallBroker(lambda _: None, make(body)).lookup(make_message())
    assert isinstance(outcome, Unknown)
    assert outcome.code == "ConnectionError"
    assert "canary" not in outcome.text


async def test_no_more_lookups_at_a_time_than_allowed_and_sends_do_not_wait_for_them() -> None:
    running, most, release = 0, 0, asyncio.Event()

    async def asked(message: Message) -> bool:
        nonlocal running, most
        running, most = running + 1, max(most, running + 1)
        await release.wait()
        running -= 1
        return True

    broker = LookUpCallBroker(lambda _: None, asked, QUICK)
    looks = [asyncio.create_task(broker.lookup(make_message())) for _ in range(6)]
    await asyncio.sleep(0.05)
    assert await broker.send(make_messages(3)) == [Delivered()] * 3
    release.set()
    assert await asyncio.gather(*looks) == [Delivered()] * 6
    assert most == 2


async def test_a_lookup_that_finds_no_room_says_whether_any_returns() -> None:
    async def slow(message: Message) -> bool:
        await asyncio.sleep(0.3 if message.key == "slow" else 60)
        return True

    def of(key: str) -> list[Message]:
        return [make_message(key=key) for _ in range(10)]

    broker = LookUpCallBroker(lambda _: None, slow, QUICK)
    told = await asyncio.gather(*map(broker.lookup, of("slow")))
    assert set(told) == {Delivered(), CROWDED}
    told = await asyncio.gather(*map(broker.lookup, of("hangs")))
    unheard = [each for each in told if isinstance(each, Unknown)]
    assert len(unheard) == 10
    assert {(each.code, each.down) for each in unheard} == {
        ("TimeoutError", "broker"),
        ("busy", "broker"),
    }


async def test_lookup_is_found_beside_the_function_or_on_it(shop: Any) -> None:
    shop.send = functools.partial(lambda _: None)
    shop.lookup = lambda _: True
    broker = open_broker("call:shop_mail:send")
    assert isinstance(broker, CanLookUp)
    assert await broker.lookup(make_message()) == Delivered()
    shop.send.lookup = lambda _: False
    broker = open_broker("call:shop_mail:send")
    assert isinstance(broker, CanLookUp)
    assert isinstance(await broker.lookup(make_message()), Transient)
    assert not isinstance(open_broker("call:shop_mail:lookup"), CanLookUp)
