"""A database that does not answer: the consumer gives its source up, and another goes on."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest
from consuming import APPLY, House, make_house, note

from helpers import eventually_async
from proxy import ChaosProxy
from stages import Stages

STUCK_SECONDS = 4
# How long one statement may take, since it may wait for a seat.
STATEMENT_SECONDS = STUCK_SECONDS + 15


@pytest.fixture(params=["postgresql", "mariadb"])
def house(request: pytest.FixtureRequest, stages: Stages) -> Iterator[House]:
    yield from make_house(stages[request.param])


@pytest.mark.parametrize("kind", ["async", "in threads", "idle"])
async def test_a_healthy_consumer_takes_over_while_a_database_is_silent(
    house: House, kind: str
) -> None:
    handled: dict[str, int] = {"cut off": 0, "healthy": 0}

    def made(name: str) -> Any:
        how: dict[str, Any] = {"stuck_seconds": STUCK_SECONDS, "chunk_rows": 2, "grace_seconds": 30}
        consumer = house.consumer(worker_name=name, **how)

        async def apply(event: Any, tx: Any) -> None:
            await tx.execute(APPLY, {"who": "billing", "k": event["key"], "n": event["n"]})
            handled[name] += 1

        def apply_in_thread(event: Any, tx: Any) -> None:
            tx.execute(APPLY, {"who": "billing", "k": event["key"], "n": event["n"]})
            handled[name] += 1

        consumer.on("note")(apply_in_thread if kind == "in threads" else apply)
        return consumer

    url = house.stage.url
    with ChaosProxy(url) as proxy:
        house.stage.url = proxy.through(url)
        cut_off = made("cut off")
        house.stage.url = url
        async with cut_off:
            await house.send(*(note("k", n) for n in range(10)))
            await eventually_async(lambda: handled["cut off"] == 10)
            async with made("healthy"):
                sending = [] if kind == "idle" else [note("k", n) for n in range(10, 300)]
                await house.send(*sending)
                for direction in ("to_server", "to_client"):
                    await asyncio.to_thread(proxy.freeze, direction)
                began = time.monotonic()
                await house.send(*(note("k", n) for n in range(10 + len(sending), 310)))
                await eventually_async(lambda: handled["healthy"] > 0)
                waited = time.monotonic() - began
                await eventually_async(lambda: len(house.effects()) == 310)
                await asyncio.to_thread(proxy.thaw)
    assert waited < STATEMENT_SECONDS, "the source was kept until a statement's time was over"
    assert house.by_key() == {"k": list(range(310))}
    assert house.broker.unacknowledged("billing") == 0
