"""`check_broker` passes brokers that work and finds what is wrong with those that do not."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from postroom.brokers import BrokerOptions
from postroom.brokers.base import DELIVERED, Capabilities, Outcome, Transient
from postroom.brokers.call import CallBroker
from postroom.brokers.memory import MemoryBroker
from postroom.messages import Message
from postroom.testing import check_broker, conformance


def pairs(messages: Sequence[Message]) -> list[tuple[str, bytes]]:
    return [(message.id, message.payload) for message in messages]


async def test_our_own_pass() -> None:
    memory = MemoryBroker()
    await check_broker(memory, lambda: pairs(memory.messages))
    kept: list[Message] = []
    called = CallBroker(kept.append, BrokerOptions())

    async def arrived() -> list[tuple[str, bytes]]:
        return pairs(kept)

    await check_broker(called, arrived)


class Own:
    """A broker as somebody writes it, with one thing wrong."""

    def __init__(self, wrong: str = "") -> None:
        ordered = wrong == "reverses"
        self.capabilities: Any = {} if wrong == "bare" else Capabilities(ordered_pipeline=ordered)
        self.wrong = wrong
        self.kept: list[Message] = []
        self.closed = 0

    async def send(self, batch: Sequence[Message], *, epoch: int = 0) -> list[Outcome]:
        await asyncio.sleep(0)
        if self.wrong == "raises" and batch:
            raise ConnectionError("gone")
        if self.wrong != "swallows":
            batch = list(batch)
            cut = [m._replace(payload=m.payload[:1000]) for m in batch]
            taken = cut if self.wrong == "cuts" else batch
            self.kept += reversed(taken) if self.wrong == "reverses" else taken
        if self.wrong == "counts":
            return [DELIVERED]
        if self.wrong == "words":
            return ["ok" for _ in batch]  # type: ignore[misc]
        if self.wrong == "refuses":
            return [Transient("busy", "no") for _ in batch]
        return [DELIVERED for _ in batch]

    async def ping(self) -> None: ...

    async def close(self) -> None:
        self.closed += 1
        if self.wrong == "closes" and self.closed > 1:
            raise RuntimeError("closed already")


async def test_a_broker_of_ones_own_passes() -> None:
    own = Own()
    await check_broker(own, lambda: pairs(own.kept))
    assert own.closed == 2


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ("bare", "must be a Capabilities"),
        ("raises", "must answer with outcomes"),
        ("swallows", "did not arrive"),
        ("cuts", "did not arrive as it was sent"),
        ("reverses", "out of order"),
        ("counts", "empty list"),
        ("words", "is no outcome"),
        ("refuses", "a broker that works answered"),
    ],
)
async def test_what_is_wrong_is_said(
    wrong: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conformance, "PATIENCE_SECONDS", 0.2)
    own = Own(wrong)
    with pytest.raises(AssertionError, match=sentence):
        await check_broker(own, lambda: pairs(own.kept))


async def test_closing_twice_must_be_possible() -> None:
    own = Own("closes")
    with pytest.raises(RuntimeError):
        await check_broker(own, lambda: pairs(own.kept))
