"""Receiving from Redis Streams: a consumer group, and one receiver of a stream at a time.

Promise: entries of a stream come in the order of their ids, first those that were handed out and
never acknowledged, whoever had them; and as long as a receiver holds a stream nobody else gets
anything of it.

    free ──take──► held: what is pending, by id ──► held: what is new ──lease ended──► free

A stream is held by a key beside it with the holder's token, which ends by itself. Every read is one
step for Redis: is the token still there, then prolong it and read. So a holder that was frozen and
comes back late gets nothing.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from postroom.brokers.address import Address
from postroom.brokers.receiving import Delivery, delivery
from postroom.brokers.redis_link import Command, Line
from postroom.brokers.redis_wire import entry
from postroom.errors import Unreachable

__all__ = ["RedisSubscription"]

RECEIVER = "postroom"  # the one name within a group: who it is, the lease says
_WAIT_SECONDS = 1.0
_PAGE = 100
_FIRST_ROWS = 64
_MAX_BYTES = 8 * 1024 * 1024  # to be read at once, going by the size of those before
_LOST = b"-lost"

# Also from ourselves, under a new token: a read of the old one may still be on its way.
_HOLD = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[3] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""
_RENEW = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
"""
_RELEASE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
"""
_READ = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return '-lost' end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return redis.call('XREADGROUP', 'GROUP', ARGV[3], ARGV[4], 'COUNT', ARGV[5],
                  'STREAMS', KEYS[2], '>')
"""
_CLAIM = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return '-lost' end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return redis.call('XCLAIM', KEYS[2], ARGV[3], ARGV[4], 0, unpack(ARGV, 5))
"""


@dataclass
class _Stream:
    """A stream, and how far we are in it while we hold it."""

    topic: str
    key: str
    lease: str
    token: str = ""
    held: bool = False
    claim: int = 0
    last: bytes = b"0-0"  # the last entry that was read as new
    cursor: bytes | None = None  # where the list of pending entries goes on; None: all of it read
    again: list[tuple[tuple[int, int], bytes, int]] = field(default_factory=list)
    rows: int = _FIRST_ROWS

    def give_back(self, id: bytes, times: int) -> None:
        """Into its place, and only once."""
        order = _order(id)
        index = bisect.bisect_left(self.again, order, key=lambda entry: entry[0])
        if index == len(self.again) or self.again[index][0] != order:
            self.again.insert(index, (order, id, times))

    def let_go(self) -> None:
        self.held, self.cursor = False, None
        self.again.clear()


class RedisSubscription:
    """Receives from streams, each of which one process of the consumer holds at a time."""

    exclusive = True

    def __init__(
        self,
        address: Address,
        keys: Mapping[str, str],
        consumer: str,
        *,
        lease_seconds: float,
        timeout_seconds: float,
    ) -> None:
        self.extend_seconds: float | None = lease_seconds / 3
        self._timeout_seconds = timeout_seconds
        self._group = consumer
        self._lease_ms = int(lease_seconds * 1000)
        self._line = Line(address, timeout_seconds)
        self._watch_line = Line(address, timeout_seconds)
        # In braces, so that a cluster would keep a stream and its lease together.
        self._streams = {
            key: _Stream(topic, key, f"{{{key}}}:{consumer}:lease") for topic, key in keys.items()
        }
        self._taking = asyncio.Lock()
        self._turn = 0
        self._watch: asyncio.Task[None] | None = None
        self._stirred = asyncio.Event()
        self._closed = False

    async def begin(self) -> None:
        """Make the groups, so that from now on nothing is cut off that they have not read."""
        await self._make_groups(list(self._streams.values()))

    async def take(self, most: int) -> list[Delivery]:
        """The next entries of the first stream that has some; waits for them about a second."""
        async with self._taking:
            found = await self._look(most)
            if not found and most > 0:
                await self._rest()
                found = await self._look(most)
            return found

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        """Take them off the list of what is pending, whoever holds the stream by now."""
        ids: dict[str, list[bytes]] = {}
        for each in deliveries:
            ids.setdefault(each.source, []).append(each.receipt)
        if ids:
            commands: list[Command] = [
                ("XACK", key, self._group, *some) for key, some in ids.items()
            ]
            _raise_first(await self._ask_all(commands))

    async def give_back(self, deliveries: Sequence[Delivery]) -> None:
        """They are pending still; hand them out again before anything that is new."""
        for each in deliveries:
            stream = self._streams[each.source]
            if stream.held and stream.claim == each.claim:
                stream.give_back(each.receipt, each.seen + 1)
        self._stirred.set()

    async def extend(self, deliveries: Sequence[Delivery]) -> None:
        """Keep the streams for another while."""
        held = [stream for stream in self._streams.values() if stream.held]
        commands = [
            ("EVAL", _RENEW, 1, stream.lease, stream.token, self._lease_ms) for stream in held
        ]
        if commands:
            for stream, kept in zip(held, await self._ask_all(commands), strict=True):
                if kept != 1:
                    stream.let_go()

    async def close(self) -> None:
        """Leave the streams to others. What is in hand is pending, and the next holder's first."""
        if self._closed:
            return
        self._closed = True
        self._stirred.set()
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait({self._watch})
        commands = [
            ("EVAL", _RELEASE, 1, stream.lease, stream.token)
            for stream in self._streams.values()
            if stream.token
        ]
        with contextlib.suppress(Unreachable):  # the leases end by themselves
            if commands:
                await self._line.ask_all(commands, seconds=_WAIT_SECONDS)
        await self._line.close()
        await self._watch_line.close()

    # Looking for entries.

    async def _look(self, most: int) -> list[Delivery]:
        """One look at each stream, every time beginning with another one."""
        if most < 1:
            return []
        streams = list(self._streams.values())
        self._turn = (self._turn + 1) % len(streams)
        for stream in streams[self._turn :] + streams[: self._turn]:
            if stream.held or await self._hold(stream):
                found = await self._next(stream, most)
                if found:
                    return found
        return []

    async def _hold(self, stream: _Stream) -> bool:
        """Try to become the holder of a stream."""
        old, stream.token = stream.token, uuid.uuid4().hex
        words = (stream.lease, stream.token, self._lease_ms, old)
        if not await self._ask("EVAL", _HOLD, 1, *words):
            return False
        await self._make_groups([stream])
        groups = await self._ask("XINFO", "GROUPS", stream.key)
        for flat in groups:
            group = dict(zip(flat[::2], flat[1::2], strict=True))
            if group[b"name"] == self._group.encode():
                stream.last = group[b"last-delivered-id"]
        stream.claim += 1
        stream.held, stream.cursor = True, b"-"
        return True

    async def _make_groups(self, streams: Sequence[_Stream]) -> None:
        commands = [("XGROUP", "CREATE", s.key, self._group, "0", "MKSTREAM") for s in streams]
        answers = await self._ask_all(commands)
        _raise_first([each for each in answers if "BUSYGROUP" not in str(each)])

    async def _next(self, stream: _Stream, most: int) -> list[Delivery]:
        rows = max(1, min(most, stream.rows))
        while stream.again or stream.cursor is not None:
            if not stream.again:
                await self._list_pending(stream)
            found = await self._claim(stream, rows)
            if found or not stream.held:
                return found
        return await self._read(stream, rows)

    async def _list_pending(self, stream: _Stream) -> None:
        """The next page of what was handed out and not acknowledged, by whomever."""
        cursor = stream.cursor or b"-"
        page = await self._ask("XPENDING", stream.key, self._group, cursor, "+", _PAGE)
        stream.again += [(_order(id), id, times) for id, _, _, times in page]
        stream.cursor = b"(" + page[-1][0] if len(page) == _PAGE else None

    async def _claim(self, stream: _Stream, rows: int) -> list[Delivery]:
        seen = {id: times for _, id, times in stream.again[:rows]}
        del stream.again[:rows]  # before others may give something back
        if not seen:
            return []
        answer = await self._fenced(_CLAIM, stream, *seen)
        if not stream.held:
            return []
        found = [item for item in answer if item and item[1] is not None]
        # What does not come back was acknowledged late, or is deleted: nobody waits for it.
        if gone := seen.keys() - {id for id, _ in found}:
            await self._ask("XACK", stream.key, self._group, *gone)
        return self._deliveries(stream, found, seen)

    async def _read(self, stream: _Stream, rows: int) -> list[Delivery]:
        answer = await self._fenced(_READ, stream, rows)
        if not stream.held or not answer:
            return []
        found = answer[0][1]
        stream.last = found[-1][0]
        size = sum(len(value) for _, fields in found for value in fields)
        stream.rows = min(most_rows(size, len(found)), 10_000)
        return self._deliveries(stream, found, {})

    async def _fenced(self, script: str, stream: _Stream, *words: bytes | int) -> Any:
        """Run a script that begins with a look at the lease; let go of the stream if it is lost."""
        from redis.exceptions import ResponseError

        who = (stream.token, self._lease_ms, self._group, RECEIVER)
        command: Command = ("EVAL", script, 2, stream.lease, stream.key, *who, *words)
        (answer,) = await self._ask_all([command])
        if isinstance(answer, ResponseError):
            if "NOGROUP" not in str(answer):
                raise Unreachable(f"Redis does not let us read {stream.key}: {answer}")
            answer = _LOST  # the stream was deleted, and with it the group: begin anew
        if answer == _LOST:
            stream.let_go()
        return answer

    def _deliveries(
        self, stream: _Stream, found: Sequence[Any], seen: Mapping[bytes, int]
    ) -> list[Delivery]:
        made = []
        for id, fields in found:
            headers, payload = entry(fields)
            made.append(
                delivery(
                    headers,
                    payload,
                    topic=stream.topic,
                    source=stream.key,
                    claim=stream.claim,
                    receipt=id,
                    unnamed=f"{stream.key}:{id.decode()}",
                    seen=seen.get(id, 0),
                )
            )
        return made

    # Waiting, and asking.

    async def _rest(self) -> None:
        """Wait until a stream that we hold grows, something is given back, or a second is over."""
        if self._watch is None and any(stream.held for stream in self._streams.values()):
            self._watch = asyncio.create_task(self._grown())
        stirred = asyncio.create_task(self._stirred.wait())
        waiting = {stirred} if self._watch is None else {stirred, self._watch}
        try:
            await asyncio.wait(waiting, timeout=_WAIT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stirred.cancel()
        self._stirred.clear()
        self._check()
        if self._watch is not None and self._watch.done():
            watch, self._watch = self._watch, None
            if error := watch.exception():
                self._let_go()
                raise error

    async def _grown(self) -> None:
        held = [stream for stream in self._streams.values() if stream.held]
        wait_ms = int(_WAIT_SECONDS * 1000)
        keys, lasts = [stream.key for stream in held], [stream.last for stream in held]
        words: Command = ("XREAD", "COUNT", 1, "BLOCK", wait_ms, "STREAMS", *keys, *lasts)
        await self._watch_line.ask(*words, seconds=_WAIT_SECONDS + self._timeout_seconds)

    async def _ask(self, *words: str | bytes | int) -> Any:
        answers = await self._ask_all([words])
        _raise_first(answers)
        return answers[0]

    async def _ask_all(self, commands: Sequence[Command]) -> list[Any]:
        self._check()
        try:
            return await self._line.ask_all(commands)
        except BaseException:
            # Also when cancelled: an answer that nobody reads may have been entries for us.
            self._let_go()
            raise

    def _check(self) -> None:
        if self._closed:
            raise Unreachable("the subscription was closed")

    def _let_go(self) -> None:
        """Whoever was out of touch may have lost what it held: it takes it anew, or does not."""
        for stream in self._streams.values():
            stream.let_go()


def most_rows(size: int, rows: int) -> int:
    """How many entries to read next, going by the size of those just read."""
    return max(1, _MAX_BYTES // max(1, size // max(1, rows)))


def _order(id: bytes) -> tuple[int, int]:
    time, _, number = id.partition(b"-")
    return int(time), int(number)


def _raise_first(answers: Sequence[Any]) -> None:
    for answer in answers:
        if isinstance(answer, Exception):
            raise Unreachable(f"Redis refused it: {answer}")
