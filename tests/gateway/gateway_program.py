"""One life of a gateway: takes orders over HTTP, and ends when each of them has come to its end.

gateway_program.py DATABASE KEY=SYMBOL…: prints what became of each as JSON.
"""

import asyncio
import json
import sys
from typing import Any

import httpx
from gateway_tools import ADAPTER, ORDER, QUICK

from postroom.gateway.service import create_app
from postroom.gateway.serving import listening, serving


async def place(client: httpx.AsyncClient, key: str, symbol: str) -> dict[str, Any]:
    while True:
        try:
            answer = await client.post(
                "/do/order",
                json=ORDER | {"symbol": symbol},
                headers={"Idempotency-Key": key},
                params={"wait": 20},
            )
        except httpx.TransportError:
            await asyncio.sleep(0.05)
            continue
        if answer.status_code < 300 and answer.json()["finished"]:
            told: dict[str, Any] = answer.json()
            return told
        assert answer.status_code in (200, 202, 503), answer.text
        await asyncio.sleep(0.05)


async def main(database: str, *wishes: str) -> None:
    app = create_app(database, ADAPTER, **QUICK)
    async with (
        serving(app, listening("127.0.0.1", 0)) as url,
        httpx.AsyncClient(base_url=url, timeout=30) as client,
    ):
        pairs = [wish.split("=") for wish in wishes]
        told = await asyncio.gather(*(place(client, *pair) for pair in pairs))
    print(json.dumps({each["idempotency_key"]: each for each in told}))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
