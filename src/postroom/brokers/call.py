"""`call:module:function`: calls your function for each message, to reach any system from Python.

Promise: a message counts as delivered only if your function returned and said so.

The function takes the `Message` and may be `async` or not; one that is not runs in a thread.

=========================  ==========================================================
your function …            the message is …
=========================  ==========================================================
returns None or True       delivered
returns a str              refused for ever; the str is the reason's code
returns an Outcome         what the outcome says; `Delivered("…")` has an answer,
                           which is kept if the message is a request of the ledger
raises TimeoutError        of unknown fate: it may have arrived
takes too long             of unknown fate (`send_timeout_seconds`)
raises anything else       sent again later; the code is the name of the exception
returns anything else      sent again later; the code is `bad_return`
=========================  ==========================================================

Of a request of the ledger, and of whatever can be looked up, an exception or a wrong return says
nothing, since it may have come too late: it is of unknown fate. Only ConnectionRefusedError means
that it was not sent.

At most `concurrency` calls run at a time, and `send` as a whole keeps the timeout: a message that
finds no free slot in the first half of it is not started. If calls returned meanwhile, it waits for
its turn anew, and no attempt is spent; if none did, the broker counts as down for a while. An async
call that takes too long is cancelled. One that hangs in a thread cannot be ended: it keeps its slot
until it returns, and no other message starts there. As many look-ups run beside them.

If the function has an attribute `lookup`, or its module a function of that name, it is asked about
messages of unknown fate: True means arrived, False not arrived, None still unknown; an Outcome may
say more, and of those `Transient("not_arrived", …)` alone means not arrived. It is asked at once
and, until there is a yes or no, before each next try; so is it about what another relay was sending
when it died. An exception, no answer in time, or an Outcome with `down` means that nobody could be
asked: it is asked again later, nothing is sent before, and no attempt is spent.

If the function has an attribute `check`, it is called without arguments when the relay starts and
now and then: what it raises says why the broker cannot take messages.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

from postroom.brokers.base import (
    CROWDED,
    DELIVERED,
    NOT_ARRIVED,
    BrokerOptions,
    Capabilities,
    Delivered,
    Outcome,
    Permanent,
    Transient,
    Unknown,
    is_request,
)
from postroom.brokers.invoke import describe, in_thread
from postroom.brokers.options import known_only
from postroom.errors import ConfigurationError, Unreachable
from postroom.messages import Message

__all__ = ["CallBroker", "LookUpCallBroker", "open_broker"]

Function: TypeAlias = Callable[[Message], Any]


class _Raised:
    """What a call raised, as a value: a future would treat some exceptions as its own."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class _Slots:
    """So many calls at a time, and how many of them have returned so far."""

    def __init__(self, number: int) -> None:
        self._free = asyncio.Semaphore(number)
        self.returned = 0

    async def take(self, until: float) -> bool:
        """Wait for a slot; returns whether there was one in time."""
        if asyncio.get_running_loop().time() >= until:
            return False
        try:
            async with asyncio.timeout_at(until):
                return await self._free.acquire()
        except TimeoutError:
            return False

    def free(self, returned: bool) -> None:
        """A call has ended: it `returned`, or it was given up."""
        self.returned += returned
        self._free.release()


class CallBroker:
    """Calls `function` for each message."""

    can_be_asked = False

    def __init__(self, function: Function, options: BrokerOptions | None = None) -> None:
        self._function = function
        self._options = options or BrokerOptions()
        self._concurrency = max(self._options.concurrency, 1)
        self.capabilities = Capabilities(max_batch=self._concurrency)
        self._slots = _Slots(self._concurrency)
        self._questions = _Slots(self._concurrency)
        self._loop: asyncio.AbstractEventLoop | None = None

    async def send(self, batch: Sequence[Message], *, epoch: int = 0) -> list[Outcome]:
        """Call the function for each message; cancelling this starts no further calls."""
        self._come_home()
        deadline = self._now() + self._options.send_timeout_seconds
        outcomes: dict[int, Outcome] = {}
        todo = iter(enumerate(batch))
        before = self._slots.returned

        async def work() -> None:
            for index, message in todo:
                outcomes[index] = await self._take(message, deadline, before)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(self._concurrency, len(batch))):
                group.create_task(work())
        return [outcomes[index] for index in range(len(batch))]

    async def ping(self) -> None:
        """Call the function's own `check`; else there is nothing to reach before a message."""
        check = getattr(self._function, "check", None)
        if callable(check):
            try:
                check()
            except Exception as error:
                raise Unreachable(describe(error)) from error

    async def close(self) -> None:
        """Nothing is kept open between calls."""

    def __repr__(self) -> str:
        return f"call:{_name(self._function)}"

    def _come_home(self) -> None:
        """Begin with free slots on a new event loop: those of an ended one never come back."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            self._slots = _Slots(self._concurrency)
            self._questions = _Slots(self._concurrency)

    async def _take(self, message: Message, deadline: float, before: int) -> Outcome:
        """The outcome for one message. `before`: how many calls had returned when it came."""
        slots = self._slots
        if not await slots.take(deadline - self._options.send_timeout_seconds / 2):
            if slots.returned > before:
                return CROWDED
            return Transient("busy", self._stuck(self._function), down="broker")
        answer = await self._call(self._function, message, deadline, slots.free)
        return _outcome(answer, self, certain=not (self.can_be_asked or is_request(message)))

    async def _call(
        self, function: Function, message: Message, deadline: float, done: Callable[[bool], None]
    ) -> object:
        """What the function returned or raised; `done` is called once it really has ended, with
        whether it did so by itself."""
        work = _start(function, message)
        try:
            while await _ended(work, deadline):
                result = work.result()
                if not inspect.isawaitable(result):
                    return result
                # From a plain function, or an object, that calls an async one.
                work = asyncio.ensure_future(_await(result))
            return _Raised(TimeoutError(f"{_name(function)} did not return in time"))
        finally:
            given_up = isinstance(work, asyncio.Task) and work.cancel()
            work.add_done_callback(lambda _: done(not given_up))

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _stuck(self, function: Function) -> str:
        return (
            f"none of the {self._concurrency} calls of call:{_name(function)} that may run at a "
            f"time returned within {self._options.send_timeout_seconds / 2:g} s"
        )


class LookUpCallBroker(CallBroker):
    """A `CallBroker` whose other system can be asked whether a message arrived."""

    can_be_asked = True

    def __init__(
        self, function: Function, lookup: Function, options: BrokerOptions | None = None
    ) -> None:
        super().__init__(function, options)
        self._lookup = lookup

    async def lookup(self, message: Message) -> Outcome:
        self._come_home()
        deadline = self._now() + self._options.send_timeout_seconds
        slots = self._questions  # of their own, so that neither kind waits for the other
        before = slots.returned
        if not await slots.take(deadline - self._options.send_timeout_seconds / 2):
            if slots.returned > before:
                return CROWDED
            return Unknown("busy", self._stuck(self._lookup), down="broker")
        answer = await self._call(self._lookup, message, deadline, slots.free)
        if isinstance(answer, Delivered | Transient | Permanent | Unknown):
            return answer
        if answer is True:
            return DELIVERED
        if answer is False:
            return Transient(NOT_ARRIVED, "lookup says that it did not arrive")
        if isinstance(answer, _Raised):
            text = f"lookup failed: {describe(answer.error)}"
            return Unknown(type(answer.error).__name__, text, down="broker")
        return Unknown("still_unknown", "lookup could not tell")


def _start(function: Function, message: Message) -> asyncio.Future[object]:
    if inspect.iscoroutinefunction(function):
        return asyncio.ensure_future(_await(_call_async(function, message)))
    return in_thread(lambda: _run(function, message))


def _run(function: Function, message: Message) -> object:
    try:
        return function(message)
    except BaseException as error:  # sys.exit in a thread would end nothing and say nothing
        return _Raised(error)


async def _call_async(function: Function, message: Message) -> object:
    return await function(message)  # the call itself may raise, so it stands inside


async def _await(answer: Awaitable[object]) -> object:
    try:
        return await answer
    except KeyboardInterrupt:
        raise  # on the loop's own thread this is the user's Ctrl-C
    except BaseException as error:  # sys.exit would end the whole worker for one message
        return _Raised(error)


async def _ended(work: asyncio.Future[object], deadline: float) -> bool:
    remaining = deadline - asyncio.get_running_loop().time()
    await asyncio.wait({work}, timeout=max(remaining, 0))
    return work.done()


def _outcome(answer: object, broker: CallBroker, *, certain: bool) -> Outcome:
    """What a call that ran has said. `certain`: an error of it counts as not delivered."""
    vague: type[Transient] | type[Unknown] = Transient if certain else Unknown
    if answer is None or answer is True:
        return DELIVERED
    if isinstance(answer, Delivered | Transient | Permanent | Unknown):
        return answer
    if isinstance(answer, str):
        code = answer or "refused"
        return Permanent(code, f"{broker!r} refused the message: {code}")
    if not isinstance(answer, _Raised):
        kind = type(answer).__name__
        text = f"{broker!r} returned a {kind}: return None, a reason as str, or an Outcome"
        return vague("bad_return", text)
    if isinstance(answer.error, TimeoutError):
        return Unknown("timeout", describe(answer.error))
    if isinstance(answer.error, ConnectionRefusedError):
        vague = Transient
    return vague(type(answer.error).__name__, describe(answer.error))


def _name(function: Function) -> str:
    module = getattr(function, "__module__", None) or type(function).__module__
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return f"{module}:{name}"


def open_broker(url: str, options: BrokerOptions) -> CallBroker:
    """The broker for `call:module:function`."""
    known_only("call", options.extra, ())
    module_name, _, path = url.partition(":")[2].partition(":")
    if not module_name or not path:
        raise ConfigurationError(f"{url!r}: write call:module:function, as in call:shop.mail:send")
    function = module = _import(url, module_name)
    for name in path.split("."):
        if not hasattr(function, name):
            raise ConfigurationError(f"{url!r}: the module {module_name} has no {path}")
        function = getattr(function, name)
    if not callable(function):
        raise ConfigurationError(f"{url!r}: {path} is a {type(function).__name__}, not a function")
    lookup = getattr(function, "lookup", None) or getattr(module, "lookup", None)
    if callable(lookup) and lookup is not function:
        return LookUpCallBroker(function, lookup, options)
    return CallBroker(function, options)


def _import(url: str, name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigurationError(
                f"{url!r}: there is no module {error.name}; is its directory on PYTHONPATH?"
            ) from error
        raise ConfigurationError(f"{url!r}: importing {name} failed: {describe(error)}") from error
    except Exception as error:
        raise ConfigurationError(f"{url!r}: importing {name} failed: {describe(error)}") from error
