"""Applications behind real servers: uvicorn for ASGI, waitress for WSGI, each in a thread."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import uvicorn
import waitress.server

from helpers import eventually

# One for all: a client of its own for each request would read all certificates each time. No
# connection is used twice: among threads, httpx may close one that another has just been given.
CLIENT = httpx.Client(
    timeout=120,
    headers={"Connection": "close"},
    limits=httpx.Limits(max_connections=200, max_keepalive_connections=None),
)
DRIVERS = {"postgresql": "asyncpg", "mysql": "asyncmy", "sqlite": "aiosqlite"}
SYNC_DRIVERS = {"postgresql": "psycopg", "mysql": "pymysql", "sqlite": "pysqlite"}


def with_driver(url: str, drivers: dict[str, str] = DRIVERS) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}+{drivers[scheme]}://{rest}"


@contextmanager
def serve_asgi(app: Any) -> Iterator[str]:
    """The address of a running ASGI application."""
    config = uvicorn.Config(app, port=0, log_level="error", lifespan="off", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    eventually(lambda: server.started, 60)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(20)


@contextmanager
def serve_wsgi(app: Any, threads: int = 16) -> Iterator[str]:
    """The address of a running WSGI application."""
    server = waitress.server.create_server(app, host="127.0.0.1", port=0, threads=threads)

    def run() -> None:
        with suppress(OSError):  # it looks at its sockets once more when they are closed
            server.run()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.effective_port}"
    finally:
        server.close()
        thread.join(20)
