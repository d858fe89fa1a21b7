"""Every report of an outage names its reason, and none is a traceback of a driver's."""

import gc
from typing import Any

import pytest
from consuming import House, apply, note
from sqlalchemy import text

from helpers import eventually_async


@pytest.mark.parametrize("house", ["postgresql"], indirect=True)
async def test_terminated_backends_are_reported_with_their_reason(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    consumer = house.consumer(concurrency=4, chunk_rows=1)

    @consumer.on("note")
    async def handle(event: Any, tx: Any) -> None:
        await apply(tx, event)
        await tx.execute(text("SELECT pg_sleep(0.05)"))

    async def round_of(count: int) -> None:
        await house.send(*(note(f"k{count}-{each}", 0) for each in range(8)))
        await eventually_async(lambda: len(house.effects()) > 8 * count - 6)
        house.stage.query(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        await eventually_async(lambda: len(house.said("database.back")) >= count)
        await eventually_async(lambda: len(house.effects()) == 8 * count)

    async with consumer:
        for count in range(1, 7):
            await round_of(count)
    gc.collect()
    told = [each["error"] for each in house.said("database.lost")]
    assert not any("the connection is gone" in each for each in told), told
    noise = [each for each in caplog.records if each.name == "asyncio"]
    assert [each.getMessage() for each in noise] == []
