"""A TCP proxy that misbehaves on demand, to put between a client and any server."""

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Coroutine
from typing import Any, Literal, Self, TypeVar
from urllib.parse import urlsplit, urlunsplit

from servers import free_port

T = TypeVar("T")

Direction = Literal["to_server", "to_client"]


class LostReply:
    """An order to lose one reply. `wait` answers once it is lost."""

    def __init__(self, to: bytes | None, containing: bytes | None, after: int) -> None:
        self.to = to
        self.containing = containing
        self.after = after
        self._done = threading.Event()

    def done(self) -> None:
        self._done.set()

    @property
    def happened(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout: float = 10.0) -> None:
        """Block until it happened; in async code, wait in a thread or for `happened`."""
        if not self._done.wait(timeout):
            raise AssertionError(f"no reply was lost within {timeout} s")


class ChaosProxy:
    """Forwards bytes between clients and the server of `url` until told otherwise.

    It lives in a thread with an event loop of its own, so that a test may block, or be async, as
    it likes. All methods are safe to call from any thread.
    """

    def __init__(self, url: str) -> None:
        self._target_url = url
        target = urlsplit(url)
        if target.hostname is None or target.port is None:
            raise ValueError(f"{url} names no host and port")
        self._target = (target.hostname, target.port)
        self.port = free_port()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="chaos-proxy")
        self._thread.daemon = True
        self._listener: asyncio.Server | None = None
        self._links: set[Link] = set()
        self._flowing: dict[Direction, asyncio.Event] = {
            "to_server": asyncio.Event(),
            "to_client": asyncio.Event(),
        }
        self._losses: list[LostReply] = []

    @property
    def url(self) -> str:
        """The server's URL by way of the proxy."""
        return self.through(self._target_url)

    def through(self, url: str) -> str:
        """Another URL of the same server (say, of a fresh database) by way of the proxy."""
        parts = urlsplit(url)
        credentials, at, _ = parts.netloc.rpartition("@")
        return urlunsplit(parts._replace(netloc=f"{credentials}{at}127.0.0.1:{self.port}"))

    def start(self) -> None:
        self._thread.start()
        self.thaw()
        self._run(self._listen())

    def close(self) -> None:
        if self._thread.is_alive():
            self._run(self._close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What can go wrong.

    @property
    def connections(self) -> int:
        return len(self._links)

    def cut(self) -> int:
        """Reset all connections, on both sides; tells how many. New ones are welcome."""
        return self._run(self._cut())

    def refuse(self) -> None:
        """Refuse new connections; those that are open stay."""
        self._run(self._stop_listening())

    def accept(self) -> None:
        """Accept connections again."""
        self._run(self._listen())

    def freeze(self, direction: Direction) -> None:
        """Hold back one direction, on all connections: bytes wait, nothing is lost or closed."""
        self._run(self._let_flow({direction}, False))

    def thaw(self) -> None:
        """Let both directions flow; what was held back arrives."""
        self._run(self._let_flow({"to_server", "to_client"}, True))

    def lose_reply(
        self, *, to: bytes | None = None, containing: bytes | None = None, after: int = 0
    ) -> LostReply:
        """Lose one reply: the server did the work, the client sees its connection reset.

        Without conditions it is whatever the server sends next. `to` waits for a request with
        these bytes and loses what the same connection answers; `containing` waits for a reply
        with these bytes. The first `after` bytes of the reply still arrive.
        """
        loss = LostReply(to, containing, after)
        self._run(self._expect(loss))
        return loss

    # Inside: the coroutines below run in the proxy's loop.

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _listen(self) -> None:
        if self._listener is None:
            self._listener = await asyncio.start_server(self._welcome, "127.0.0.1", self.port)

    async def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    async def _cut(self) -> int:
        links = list(self._links)
        for link in links:
            link.task.cancel()
        await asyncio.gather(*(link.task for link in links), return_exceptions=True)
        return len(links)

    async def _close(self) -> None:
        await self._stop_listening()
        await self._cut()

    async def _let_flow(self, directions: set[Direction], flow: bool) -> None:
        for direction in directions:
            if flow:
                self._flowing[direction].set()
            else:
                self._flowing[direction].clear()

    async def _expect(self, loss: LostReply) -> None:
        self._losses.append(loss)

    def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = self._new_link(reader, writer)
        self._links.add(link)
        link.task.add_done_callback(lambda _: self._links.discard(link))

    def _new_link(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> "Link":
        return Link(self._target, self._flowing, self._losses, reader, writer)


class _Cut(Exception):
    """The connection shall end now, with a reset."""


class Link:
    """One client's connection, and the one to the server that it is joined to."""

    def __init__(
        self,
        target: tuple[str, int],
        flowing: dict[Direction, asyncio.Event],
        losses: list[LostReply],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._target = target
        self._flowing = flowing
        self._losses = losses  # shared by all links: the first that fits takes the order
        self._asked: list[LostReply] = []  # the request has passed here, the reply is due
        self._losing: LostReply | None = None
        self._may_pass = 0
        self._tails: dict[Direction, bytes] = {"to_server": b"", "to_client": b""}
        self._client = (reader, writer)
        self._writers = [writer]
        self.task = asyncio.get_running_loop().create_task(self._serve())

    async def _serve(self) -> None:
        reset = True
        try:
            server_reader, server_writer = await asyncio.open_connection(*self._target)
            self._writers.append(server_writer)
            client_reader, client_writer = self._client
            pumps = [
                asyncio.ensure_future(self._pump(client_reader, server_writer, "to_server")),
                asyncio.ensure_future(self._pump(server_reader, client_writer, "to_client")),
            ]
            try:
                # When either side leaves, so does the other: no protocol here half-closes.
                done, _ = await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
                reset = any(pump.exception() for pump in done)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        except OSError:
            pass  # no server there: the client is reset
        finally:
            for writer in self._writers:
                _end(writer, reset)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: Direction
    ) -> None:
        while data := await reader.read(65536):
            await self._flowing[direction].wait()
            data, ends = self._admit(data, direction)
            writer.write(data)
            await writer.drain()
            if ends:
                raise _Cut
        await self._flowing[direction].wait()

    def _admit(self, data: bytes, direction: Direction) -> tuple[bytes, bool]:
        """What of it may pass, and whether the connection ends after that."""
        if direction == "to_server":
            self._notice_request(data)
        else:
            data = self._without_loss(data)
        return data, self._losing is not None and self._losing.happened

    def _notice_request(self, data: bytes) -> None:
        for loss in list(self._losses):
            if loss.to is not None and self._holds(loss.to, data, "to_server"):
                self._losses.remove(loss)
                self._asked.append(loss)
        self._tails["to_server"] = (self._tails["to_server"] + data)[-256:]

    def _without_loss(self, data: bytes) -> bytes:
        """What of a reply may pass; marks the loss as happened when not all of it may."""
        if self._losing is None:
            self._losing = self._take_loss(data)
            self._may_pass = self._losing.after if self._losing is not None else 0
        self._tails["to_client"] = (self._tails["to_client"] + data)[-256:]
        if self._losing is None:
            return data
        passing = data[: self._may_pass]
        self._may_pass -= len(passing)
        if len(passing) < len(data):
            self._losing.done()
        return passing

    def _take_loss(self, data: bytes) -> LostReply | None:
        for orders in (self._asked, self._losses):
            for loss in orders:
                due = orders is self._asked or loss.to is None
                wanted = loss.containing
                if due and (wanted is None or self._holds(wanted, data, "to_client")):
                    orders.remove(loss)
                    return loss
        return None

    def _holds(self, word: bytes, data: bytes, direction: Direction) -> bool:
        """Whether the word ends in this data; it may have begun in the data before."""
        tail = self._tails[direction]
        return word in tail[max(0, len(tail) - len(word) + 1) :] + data


def _end(writer: asyncio.StreamWriter, reset: bool) -> None:
    if reset:
        # Linger of zero seconds: the kernel sends a reset instead of a polite end.
        with contextlib.suppress(OSError):
            writer.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
        writer.transport.abort()
    else:
        writer.close()
