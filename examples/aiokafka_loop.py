"""A plain aiokafka loop that applies each message once, without Postroom's own consumer.

    pip install 'postroom[asyncpg]' aiokafka
    python examples/aiokafka_loop.py

The inbox's row and the effect commit together, a whole batch of a partition at a time; only then
the offset is committed. A crash between the two brings the batch again, as duplicates.
"""

import asyncio
import json
import os
from collections.abc import Iterable

from aiokafka import AIOKafkaConsumer, ConsumerRecord
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from postroom import inbox

CONSUMER = "billing"
INSERT = text("INSERT INTO bill (order_id, total) VALUES (:order_id, :total)")


def id_of(record: ConsumerRecord) -> str:
    """The id Postroom's relay sends along; it is the same each time the message comes."""
    return next(value.decode() for name, value in record.headers if name == "event_id")


async def apply(engine: AsyncEngine, records: Iterable[ConsumerRecord]) -> int:
    """Apply a batch in one transaction; returns how many of it were new."""
    new = 0
    async with AsyncSession(engine) as session, session.begin():
        for record in records:
            if await inbox.once_async(session, CONSUMER, id_of(record), content=record.value):
                order = json.loads(record.value)
                await session.execute(INSERT, order)
                new += 1
    return new


async def main() -> None:
    engine = create_async_engine(os.environ["DATABASE_URL"])
    consumer = AIOKafkaConsumer(
        "orders",
        bootstrap_servers=os.environ.get("KAFKA", "localhost:9092"),
        group_id=CONSUMER,
        enable_auto_commit=False,
        auto_offset_reset="earliest",
    )
    await consumer.start()
    try:
        while True:
            for partition, records in (await consumer.getmany(timeout_ms=1000)).items():
                await apply(engine, records)
                await consumer.commit({partition: records[-1].offset + 1})
    finally:
        await consumer.stop()
        await engine.dispose()


if __name__ == "__main__":
    asyncio.run(main())
