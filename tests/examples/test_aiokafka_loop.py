"""The plain aiokafka loop, killed while it works: every order is billed once."""

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path

import psycopg

from helpers import eventually_async
from helpers_messages import make_message
from postroom.brokers import BrokerOptions, Delivered
from postroom.brokers.kafka import KafkaBroker
from postroom.databases import migrate
from postroom.messages import Message
from servers import KafkaServer, PostgresServer

EXAMPLE = Path(__file__).parents[2] / "examples" / "aiokafka_loop.py"
ORDERS = 400


def order(number: int) -> Message:
    content = {"order_id": number, "total": 10 * number}
    return make_message(json.dumps(content).encode(), topic="orders", key=f"k{number % 7}")


async def test_orders_are_billed_once_through_a_kill(
    kafka_server: KafkaServer, postgres: PostgresServer
) -> None:
    name = f"loop_{uuid.uuid4().hex[:12]}"
    url = postgres.create_database(name)
    await migrate.install(url)
    file = psycopg.connect(url, autocommit=True)
    file.execute("CREATE TABLE bill (order_id INTEGER, total INTEGER)")
    kafka_server.create_topic("orders", partitions=1)
    broker = KafkaBroker(kafka_server.url, BrokerOptions())

    async def send(batch: list[Message]) -> None:
        assert await broker.send(batch) == [Delivered()] * len(batch)

    def billed() -> list[int]:
        return [number for (number,) in file.execute("SELECT order_id FROM bill").fetchall()]

    environment = os.environ | {
        "DATABASE_URL": url.replace("postgresql:", "postgresql+asyncpg:"),
        "KAFKA": kafka_server.bootstrap,
    }
    command = [sys.executable, str(EXAMPLE)]
    orders = [order(number) for number in range(ORDERS)]
    loop = subprocess.Popen(command, env=environment)
    try:
        await send(orders[: ORDERS // 2])
        await eventually_async(lambda: len(billed()) > 0, 60)
        loop.kill()
        loop.wait()
        await send([*orders, order(ORDERS)])  # half of them for the second time
        loop = subprocess.Popen(command, env=environment)
        await eventually_async(lambda: ORDERS in billed(), 60)  # all before it were looked at
    finally:
        loop.kill()
        loop.wait()
        await broker.close()
    assert sorted(billed()) == list(range(ORDERS + 1))
    file.close()
    postgres.drop_database(name)
