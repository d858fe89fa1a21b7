"""Serving an ASGI application over HTTP with uvicorn, ended by the caller and not by signals."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

from postroom.errors import ConfigurationError, MissingDriver

__all__ = ["free_port", "is_loopback", "listening", "serving"]


def free_port() -> int:
    """A port nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name, even if it begins with 127.


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens, or an error that says why not."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigurationError(
            f"Nothing can listen at {host}:{port}: {error.strerror}."
        ) from None
    listener.listen(1024)
    return listener


@contextlib.asynccontextmanager
async def serving(app: Any, listener: socket.socket) -> AsyncIterator[str]:
    """Serve an application until the block ends; gives its URL once it answers.

    Its `state.closing`, if it has one, is set before the end: requests that wait for something are
    answered then.
    """
    try:
        import uvicorn
    except ImportError as error:
        raise MissingDriver(
            "The gateway needs Starlette and uvicorn: pip install 'postroom[gateway]'."
        ) from error

    class Server(uvicorn.Server):
        """One that leaves the process's signals alone."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    server = Server(
        uvicorn.Config(
            app,
            lifespan="off",
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=10,
            # Longer than clients and proxies keep a connection: theirs is the end of it, so that
            # none is closed under a request.
            timeout_keep_alive=75,
        )
    )
    host, port = listener.getsockname()[:2]
    # Its lifespan by hand: what goes wrong at the start is an error of ours, not a line in a log.
    async with app.router.lifespan_context(app):
        task = asyncio.create_task(server.serve([listener]))
        try:
            while not server.started:
                if task.done():
                    await task
                    raise ConfigurationError("the server ended at once.")
                await asyncio.sleep(0.01)
            shown = f"[{host}]" if ":" in host else host
            yield f"http://{shown}:{port}"
        finally:
            if (closing := getattr(app.state, "closing", None)) is not None:
                closing.set()
            server.should_exit = True
            await task
