"""Handlers by message type: which function a message goes to, and what it is given.

A type nobody handles may be lifted to one somebody does, by upcasters: `order.placed.v1` becomes
`order.placed.v2`, one step after another. What a handler gets is decoded only once, from the last.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from postroom.calling import is_async
from postroom.derivation import Part, derive_key
from postroom.errors import ConfigurationError, InvalidMessage
from postroom.inbox.decoding import decode, plain
from postroom.inbox.rules import Letter
from postroom.messages import SEQUENCE, MessageType, check_name, declared_type
from postroom.retry import RetryPolicy

__all__ = ["Handler", "Handlers", "Received", "upcast"]

Class: TypeAlias = type  # where a field is called type
Function: TypeAlias = Callable[..., Awaitable[None] | None]
F = TypeVar("F", bound=Callable[..., Any])
LONGEST_CHAIN = 20


@dataclass(frozen=True, slots=True)
class Received:
    """What is known of a message besides its content: a handler's third argument, if it has one."""

    id: str
    type: str
    topic: str
    key: str | None
    content_type: str
    headers: dict[str, str]
    payload: bytes
    attempt: int

    @property
    def sequence(self) -> int | None:
        """The number of this message within its aggregate; None if its publisher gave none."""
        text = self.headers.get(SEQUENCE, "")
        return int(text) if text.isascii() and text.isdigit() else None

    @property
    def aggregate_key(self) -> str | None:
        """A key made of aggregate type, aggregate id, message type and sequence, for `inbox.once`.

        Two messages have the same key if they state the same step of an aggregate, even under
        different ids. None if the publisher gave no sequence.
        """
        aggregate = (self.headers.get("aggregate_type"), self.headers.get("aggregate_id"))
        if self.sequence is None or aggregate[0] is None or aggregate[1] is None:
            return None
        return derive_key(aggregate[0], aggregate[1], self.type, self.sequence)

    def key_for(self, *steps: Part) -> str:
        """An idempotency key for a call to another system, the same whenever the message comes
        again; where several consumers call the same system, their names belong in it."""
        return derive_key(self.id, *steps)


@dataclass(frozen=True, slots=True)
class Handler:
    """A function of the user's and what it takes."""

    type: str
    function: Function
    model: Class | None
    is_async: bool
    wants_received: bool
    retry: RetryPolicy | None

    def arguments(self, letter: Letter, content: Any, tx: Any) -> tuple[Any, ...]:
        """What to call it with."""
        if not self.wants_received:
            return (content, tx)
        received = Received(
            letter.id,
            letter.type,
            letter.topic,
            letter.whole_key,
            letter.content_type,
            letter.headers,
            letter.payload,
            letter.attempts + (letter.position is None),
        )
        return (content, tx, received)


@dataclass(frozen=True, slots=True)
class _Upcaster:
    to: str
    function: Callable[[Any], Any]


_upcasters: dict[str, _Upcaster] = {}


def upcast(type: str, *, to: str) -> Callable[[F], F]:
    """Declare how the content of a message type becomes that of a newer one.

        @upcast("order.placed.v1", to="order.placed.v2")
        def with_currency(content: dict) -> dict:
            return content | {"currency": "EUR"}

    It is given plain values and returns plain values. It holds for every consumer of the process.
    """
    check_name("type", type)
    check_name("type", to)

    def declare(function: F) -> F:
        if type in _upcasters and _upcasters[type].function is not function:
            raise ConfigurationError(f"{type} has an upcaster already, to {_upcasters[type].to}")
        seen, step = {type}, to
        while step in _upcasters:
            if step in seen:
                raise ConfigurationError(f"the upcasters of {type} go in a circle")
            seen.add(step)
            step = _upcasters[step].to
        if step in seen:
            raise ConfigurationError(f"the upcasters of {type} go in a circle")
        _upcasters[type] = _Upcaster(to, function)
        return function

    return declare


class Handlers:
    """The handlers of one consumer."""

    def __init__(self) -> None:
        self._by_type: dict[str, Handler] = {}

    def __bool__(self) -> bool:
        return bool(self._by_type)

    def __iter__(self) -> Iterator[Handler]:
        return iter(self._by_type.values())

    def add(self, what: str | type, function: Function, retry: RetryPolicy | None) -> Handler:
        """Hand messages of a type, or of a declared class, to a function."""
        model = what if isinstance(what, type) else None
        name = self.name_of(what)
        if name in self._by_type:
            raise ConfigurationError(f"{name} has a handler already: {_name(self._by_type[name])}")
        handler = Handler(
            name,
            function,
            model,
            is_async(function),
            _arguments(function) == 3,
            retry,
        )
        self._by_type[name] = handler
        return handler

    def require_sync(self, remedy: str) -> None:
        """Raise `ConfigurationError` if one of the functions is async."""
        for handler in self:
            if handler.is_async:
                raise ConfigurationError(f"the handler {_name(handler)} is async; {remedy}")

    def name_of(self, what: str | type) -> str:
        """The message type that is meant."""
        return _declared(what).name if isinstance(what, type) else check_name("type", what)

    def find(self, type: str) -> Handler | None:
        """The handler of a message type, if need be by way of upcasters."""
        for _ in range(LONGEST_CHAIN):
            if (found := self._by_type.get(type)) is not None:
                return found
            if (step := _upcasters.get(type)) is None:
                return None
            type = step.to
        return None

    def topics(self) -> list[str]:
        """The topics of the declared classes that are handled."""
        declared = [_declared(handler.model) for handler in self if handler.model is not None]
        return sorted({each.topic for each in declared if each.topic is not None})

    def content(self, handler: Handler, letter: Letter) -> Any:
        """The content of a message as its handler takes it; `InvalidMessage` if it does not fit."""
        value, type = plain(letter.payload, letter.content_type), letter.type
        while type != handler.type:
            step = _upcasters[type]
            try:
                value = step.function(value)
            except Exception as error:
                said = f"the upcaster from {type} to {step.to} failed: {error!r}"
                raise InvalidMessage(said[:300]) from error
            type = step.to
        return value if handler.model is None else decode(handler.model, value)


def _declared(cls: type) -> MessageType:
    found = declared_type(cls)
    if found is None:
        raise ConfigurationError(
            f"{cls.__name__} is no message type: declare it with @message, or name the type"
        )
    return found


def _arguments(function: Function) -> int:
    """How many arguments it takes, 2 or 3."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    found = inspect.signature(function).parameters.values()
    if any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in found):
        return 2
    needed = [each for each in found if each.kind in kinds]
    least = sum(each.default is inspect.Parameter.empty for each in needed)
    if least <= 3 and len(needed) >= 3:
        return 3
    if least <= 2 <= len(needed):
        return 2
    raise ConfigurationError(
        f"{getattr(function, '__qualname__', function)} must take (event, tx), or "
        "(event, tx, received)"
    )


def _name(handler: Handler) -> str:
    return getattr(handler.function, "__qualname__", repr(handler.function))
