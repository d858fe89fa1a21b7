"""Health and metrics over HTTP: `/healthz`, `/readyz` and `/metrics`, from a thread or as ASGI.

`serve` answers from a thread of its own, so that a relay whose event loop is stuck is still told
apart from one that is gone. `asgi(relay)` is the same as an application to mount in one's own; it
lives in that application's loop, and is silent when that is stuck.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from postroom.errors import ConfigurationError, MissingDriver

if TYPE_CHECKING:
    import socket

    from postroom.worker.vitals import Health

__all__ = ["Answer", "answer", "asgi", "serve"]

REQUEST_SECONDS = 5.0
MOST_REQUESTS = 32

Scope: TypeAlias = dict[str, Any]
Asgi: TypeAlias = Callable[
    [Scope, Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Awaitable[None]
]


class Answer(NamedTuple):
    """What is answered to a request."""

    status: int
    content_type: str
    body: bytes
    allow: str | None = None

    @property
    def headers(self) -> list[tuple[str, str]]:
        """All headers of the answer."""
        found = [
            ("content-type", self.content_type),
            ("content-length", str(len(self.body))),
            ("cache-control", "no-store"),
        ]
        return found + ([("allow", self.allow)] if self.allow else [])


class Worker(Protocol):
    """A relay or a consumer, or several of them."""

    def health(self) -> Health:
        """Whether it lives, and whether it can work."""


def answer(relay: Worker, method: str, path: str) -> Answer:
    """The answer to one request."""
    path = path.partition("?")[0]
    if path not in ("/healthz", "/readyz", "/metrics"):
        return _document(404, {"error": "there is /healthz, /readyz and /metrics"})
    if method not in ("GET", "HEAD"):
        said = _document(405, {"error": "only GET is answered here"})
        return said._replace(allow="GET, HEAD")
    if path == "/metrics":
        return _metrics()
    health = relay.health()
    if path == "/healthz":
        return _verdict(health.healthy, health.unhealthy)
    return _verdict(health.ready, health.unhealthy + health.unready, health.degraded)


def _verdict(well: bool, reasons: tuple[str, ...], degraded: tuple[str, ...] = ()) -> Answer:
    status = ("degraded" if degraded else "ok") if well else "failing"
    return _document(200 if well else 503, {"status": status, "reasons": [*reasons, *degraded]})


def _document(status: int, document: dict[str, Any]) -> Answer:
    return Answer(status, "application/json", json.dumps(document).encode() + b"\n")


def _metrics() -> Answer:
    try:
        from postroom.ops import metrics
    except MissingDriver as error:
        return _document(404, {"error": str(error)})
    return Answer(200, *metrics.exposition())


def asgi(relay: Worker) -> Asgi:
    """An ASGI application to mount: `app.mount("/relay", asgi(relay))`."""

    async def application(
        scope: Scope, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]
    ) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"health answers http, not {scope['type']}: mount it")
        root = scope.get("root_path", "")
        found = answer(relay, scope["method"], scope["path"].removeprefix(root))
        head = [(name.encode(), value.encode()) for name, value in found.headers]
        await send({"type": "http.response.start", "status": found.status, "headers": head})
        body = b"" if scope["method"] == "HEAD" else found.body
        await send({"type": "http.response.body", "body": body})

    return application


class _Server(ThreadingHTTPServer):
    """Answers so many requests at a time, and hangs up on whoever comes beyond."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], relay: Worker) -> None:
        self.relay = relay
        self._room = threading.BoundedSemaphore(MOST_REQUESTS)
        if ":" in address[0]:
            import socket

            self.address_family = socket.AF_INET6
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: socket.socket | tuple[bytes, Any], client: Any) -> None:
        """Whoever asked has gone; nobody needs to know."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = REQUEST_SECONDS
    server_version = "postroom"
    sys_version = ""

    def _answer(self) -> None:
        found = answer(self.server.relay, self.command, self.path)
        self.send_response(found.status)
        for name, value in found.headers:
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(found.body)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = _answer

    def log_message(self, format: str, *args: Any) -> None:
        """A probe every few seconds is no news."""


@contextlib.contextmanager
def serve(relay: Worker, host: str, port: int) -> Iterator[tuple[str, int]]:
    """Answer at this address until the block ends; gives the address, with the port if it was 0."""
    try:
        server = _Server((host, port), relay)
    except OSError as error:
        raise ConfigurationError(
            f"health and metrics cannot be served at {host}:{port}: "
            f"{error.strerror or error}; choose another address with --http."
        ) from None
    thread = threading.Thread(
        target=server.serve_forever, args=(0.1,), name="postroom http", daemon=True
    )
    thread.start()
    try:
        yield server.server_address[0], server.server_address[1]  # type: ignore[misc]
    finally:
        server.shutdown()
        server.server_close()
