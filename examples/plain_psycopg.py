"""Without a framework: an order and its message in one transaction of psycopg, then the relay.

pip install 'postroom[psycopg]'
export DATABASE_URL=postgresql://localhost/app
postroom db install --database $DATABASE_URL
python plain_psycopg.py
"""

import asyncio
import os

import psycopg

from postroom import Outbox, Relay

DATABASE_URL = os.environ["DATABASE_URL"]
outbox = Outbox()


def place_order(connection: psycopg.Connection, total: str) -> None:
    row = connection.execute("INSERT INTO orders (total) VALUES (%s) RETURNING id", [total])
    (order_id,) = row.fetchone()
    event = {"order_id": order_id, "total": total}
    outbox.publish(connection, event, type="order.placed.v1", topic="orders", key=str(order_id))


async def deliver() -> None:
    """Send what is committed, once; `postroom relay` does it for as long as it runs."""
    relay = Relay(DATABASE_URL, "stdout://")
    await relay.drain_once()
    await relay.close()


if __name__ == "__main__":
    with psycopg.connect(DATABASE_URL) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS orders (id serial PRIMARY KEY, total text)")
    with psycopg.connect(DATABASE_URL) as connection:
        place_order(connection, "9.90")  # committed at the end of the block, with its message
    asyncio.run(deliver())
