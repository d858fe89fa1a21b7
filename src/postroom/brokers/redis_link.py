"""Connections to Redis: one on which many messages are under way, and one for a question at a time.

redis-py connects, greets and encrypts. On a `RedisLink` the answers are read by us, as they come:
its own pipeline answers for a batch as a whole, so that one lost connection would hide what was
answered before, and it would send again by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any, TypeAlias

from postroom.brokers.address import Address
from postroom.brokers.base import DELIVERED, Outcome, Permanent, Transient, Unknown
from postroom.brokers.invoke import describe
from postroom.brokers.pipelined import CONNECT_SECONDS, Link
from postroom.brokers.redis_wire import answer_of, command, replies, too_large, xadd
from postroom.brokers.window import MAX_OUTSTANDING_BYTES, Sending
from postroom.errors import Unreachable
from postroom.messages import Message

__all__ = ["Command", "Line", "RedisLink", "connect", "largest"]

Command: TypeAlias = Sequence[str | bytes | int]
_READ_BYTES = 256 * 1024
_PING = command("PING")
_MAX_STRING = 512 * 1024 * 1024  # unless the server says otherwise


async def connect(address: Address, seconds: float) -> Any:
    """A connection of redis-py's that has said who we are and chosen its database."""
    from redis.asyncio import connection as redis

    settings: dict[str, Any] = {
        "host": address.host,
        "port": address.port,
        "db": int(address.path.strip("/") or 0),
        "username": address.user,
        "password": address.password,
        "socket_connect_timeout": seconds,
        "socket_timeout": None,
        "client_name": "postroom",
        "protocol": 2,
    }
    kind: Any = redis.Connection
    if address.context is not None:
        kind = redis.SSLConnection
        settings |= {
            "ssl_ca_certs": address.options.get("tls_ca"),
            "ssl_certfile": address.options.get("tls_cert"),
            "ssl_keyfile": address.options.get("tls_key"),
            "ssl_cert_reqs": "required",
            "ssl_check_hostname": True,
        }
    made = kind(**settings)
    try:
        async with asyncio.timeout(seconds):
            await made.connect()
    except BaseException:
        abort(made)
        raise
    return made


async def largest(connection: Any) -> int:
    """The longest string the server takes. For a longer one it would hang up on all the others."""
    from redis.exceptions import ResponseError

    try:
        await connection.send_command("CONFIG", "GET", "proto-max-bulk-len")
        answer = await connection.read_response()
    except ResponseError:
        return _MAX_STRING  # not everybody may ask
    return int(answer[1]) if len(answer) == 2 else _MAX_STRING


def abort(connection: Any) -> None:
    """Throw a connection away, with whatever it has not sent."""
    writer, connection._writer, connection._reader = connection._writer, None, None
    if writer is not None:
        writer.transport.abort()


class RedisLink(Link):
    """A connection on which XADDs follow each other; Redis answers them in their order.

    With `replicas` a message counts as delivered once so many replicas have it.
    """

    def __init__(
        self,
        connection: Any,
        prefix: str,
        *,
        max_string: int,
        max_rows: int,
        replicas: int,
        wait_seconds: float,
    ) -> None:
        super().__init__(max_rows=max_rows, max_bytes=MAX_OUTSTANDING_BYTES)
        self._prefix = prefix
        self._max_string = max_string
        self._replicas = replicas
        self._wait = command("WAIT", replicas, int(wait_seconds * 1000)) if replicas else b""
        self._waits: set[int] = set()  # which of the numbers is that of a WAIT
        self._stored: list[int] = []  # what awaits its replicas
        self._sent = self._answered = 0
        self._demoted = False  # it is a replica now: another may be the master under this address
        self._connection = connection
        self._reader: asyncio.StreamReader = connection._reader
        self._writer: asyncio.StreamWriter = connection._writer
        self._reading = asyncio.create_task(self._read())

    @property
    def alive(self) -> bool:
        return not self.lost and not (self._demoted and not self.waiting)

    def command(self, message: Message, source: str, epoch: int) -> bytes | Permanent:
        if len(message.payload) > self._max_string:
            return too_large(len(message.payload), self._max_string)
        return xadd(message, self._prefix, source=source, epoch=epoch)

    def number(self, message: Message) -> int:
        self._sent += 1
        return self._sent

    def write(self, data: bytes) -> None:
        if self._replicas:
            self._sent += 1
            self._waits.add(self._sent)
            data += self._wait
        if not self._writer.transport.is_closing():  # asyncio would say so in the log
            self._writer.write(data)

    def echo(self) -> Sending:
        asked = Sending((), 1)
        self._sent += 1
        self.expect(self._sent, asked, 0, 0)
        self._writer.write(_PING)
        return asked

    async def _read(self) -> None:
        rest = b""
        try:
            while data := await self._reader.read(_READ_BYTES):
                found, rest = replies(rest + data)
                for reply in found:
                    self._take(reply)
        except (OSError, ValueError, IndexError) as error:
            self.error = error
        finally:
            self.lose(describe(self.error) if self.error else "")
            abort(self._connection)

    def _take(self, reply: bytes) -> None:
        self.heard += 1
        self._answered += 1
        number = self._answered
        if number in self._waits:
            self._replicated(number, reply)
            return
        sending, index, _ = self.waiting.get(number, (None, 0, 0))
        if sending is None:
            return
        outcome = answer_of(reply, sending.batch[index] if sending.batch else None)
        if isinstance(outcome, Transient) and outcome.code == "readonly":
            self._demoted = True
        if self._replicas and sending.batch and outcome is DELIVERED:
            self._stored.append(number)
        else:
            self.settle(number, outcome)

    def _replicated(self, number: int, reply: bytes) -> None:
        self._waits.discard(number)
        stored, self._stored = self._stored, []
        outcome: Outcome = DELIVERED
        had = int(reply[1:]) if reply[:1] == b":" else 0
        if had < self._replicas:
            text = f"stored, but on {had} replicas in time, and {self._replicas} are asked for"
            outcome = Unknown("not_replicated", text, down="broker")
        for each in stored:
            self.settle(each, outcome)

    def discard(self) -> None:
        self.lose(describe(self.error) if self.error else "")
        self._reading.cancel()
        abort(self._connection)

    async def close(self) -> None:
        """All that was sent is answered, so nothing is lost with the connection."""
        self.discard()
        await asyncio.wait({self._reading}, timeout=1)


class Line:
    """A connection for one question at a time, made when first needed and again when lost.

    Raises `Unreachable` when Redis is lost, and redis-py's `ResponseError` for what it refuses.
    """

    def __init__(self, address: Address, seconds: float) -> None:
        self._address = address
        self._seconds = seconds
        self._connection: Any = None
        self._turn = asyncio.Lock()

    async def ask(self, *words: str | bytes | int, seconds: float | None = None) -> Any:
        """The answer to one command, as it came: strings are bytes."""
        (answer,) = await self.ask_all([words], seconds=seconds)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def ask_all(
        self, commands: Sequence[Command], *, seconds: float | None = None
    ) -> list[Any]:
        """The answers to commands sent in one go; an error is one of them."""
        from redis.exceptions import RedisError, ResponseError

        async with self._turn:
            try:
                async with asyncio.timeout(seconds or self._seconds):
                    if self._connection is None:
                        connecting = min(CONNECT_SECONDS, self._seconds)
                        self._connection = await connect(self._address, connecting)
                    connection = self._connection
                    packed = b"".join(command(*words) for words in commands)
                    await connection.send_packed_command(packed, check_health=False)
                    answers: list[Any] = []
                    for _ in commands:
                        try:
                            answers.append(await connection.read_response(disable_decoding=True))
                        except ResponseError as refused:
                            answers.append(refused)
                    return answers
            except (RedisError, OSError) as error:
                self.drop()
                text = self._address.without_secrets(describe(error))
                raise Unreachable(f"Redis at {self._address} was lost: {text}") from error
            except BaseException:
                self.drop()  # an answer may be on its way that nobody would read
                raise

    def drop(self) -> None:
        """Throw the connection away."""
        if self._connection is not None:
            abort(self._connection)
            self._connection = None

    async def close(self) -> None:
        """Close it; whoever waits on it gets an error."""
        with contextlib.suppress(Exception):
            self.drop()
