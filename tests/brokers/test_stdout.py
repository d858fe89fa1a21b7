"""What only standard output does: lines, slow readers, broken pipes."""

import asyncio
import base64
import errno
import io
import json
import os
import sys
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import TextIO

import pytest

from helpers_messages import make_message, make_messages
from postroom.brokers import BrokerOptions, Delivered, Permanent, Transient, Unknown, open_broker
from postroom.brokers.stdout import StdoutBroker, line_of
from postroom.errors import ConfigurationError, Unreachable

QUICK = BrokerOptions(send_timeout_seconds=0.3)


@pytest.fixture
def pipe() -> Iterator[tuple[FileIO, TextIO]]:
    """A reading end, and a stream on the writing end."""
    source, target = os.pipe()
    with open(source, "rb", buffering=0) as reader, open(target, "w") as stream:
        yield reader, stream


@pytest.mark.parametrize(
    ("payload", "content_type"),
    [
        (b'{"total": 1.10, "big": 12345678901234567890.10, "exp": 1E400}', "application/json"),
        (b'{"a":1,"a":2}', "application/cloudevents+json; charset=utf-8"),
        ('"grüße \u2028 世界"'.encode(), "Application/JSON"),
        (b'{\r\n  "pretty": [\n 1 ]\n}', "application/json;charset=utf-8"),
        (b"null", "text/json"),
    ],
)
def test_json_stands_as_it_was_written(payload: bytes, content_type: str) -> None:
    line = line_of(make_message(payload, content_type=content_type), source="x")
    assert len(line.decode().splitlines()) == 1
    as_written = json.loads(payload, parse_float=str, object_pairs_hook=list)
    document = dict(json.loads(line, parse_float=str, object_pairs_hook=list))
    assert document["payload"] == as_written


@pytest.mark.parametrize(
    ("payload", "content_type"),
    [
        (b"", "application/json"),
        (b"{broken", "application/json"),
        (b"NaN", "application/json"),
        (b"[" * 100_000, "application/json"),
        (b'"\xff"', "application/json"),
        (b"[1]", "application/octet-stream"),
        (b"[1]", "application/jsonish"),
    ],
)
def test_anything_else_is_base64(payload: bytes, content_type: str) -> None:
    line = line_of(make_message(payload, content_type=content_type), source="x")
    document = json.loads(line)
    assert base64.b64decode(document["payload_base64"]) == payload
    assert "payload" not in document


def test_a_line_holds_all_there_is_to_know() -> None:
    message = make_message(key="k", headers={"a": "b"}, aggregate_type="order", aggregate_id="7")
    document = json.loads(line_of(message, source="shop", epoch=3))
    assert list(document) == ["id", "type", "topic", "key", "headers", "payload"]
    assert document["id"] == message.id
    assert document["key"] == "k"
    assert document["payload"] == {"total": 42}
    assert document["headers"]["aggregate_id"] == "7"
    assert document["headers"]["a"] == "b"
    assert document["headers"]["postroom-epoch"] == "3"


async def test_a_batch_is_one_write(
    pipe: tuple[FileIO, TextIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, stream = pipe
    sizes: list[int] = []
    write = os.write

    def counted(fd: int, data: bytes) -> int:
        if fd == stream.fileno():
            sizes.append(len(data))
        return write(fd, data)

    monkeypatch.setattr(os, "write", counted)
    broker = StdoutBroker(stream=stream)
    assert await broker.send(make_messages(20)) == [Delivered()] * 20
    assert len(sizes) == 1
    assert reader.read(1 << 20).count(b"\n") == 20


async def test_a_slow_reader_freezes_nothing(pipe: tuple[FileIO, TextIO]) -> None:
    reader, stream = pipe
    broker = StdoutBroker(QUICK, stream)
    batch = [make_message(b"x" * 100_000, content_type="text/plain") for _ in range(10)]
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.005)
            ticks += 1

    ticking = asyncio.create_task(tick())
    outcomes = await broker.send(batch)
    late = await broker.send(make_messages(3))
    ticking.cancel()
    assert ticks > 10, "a send that blocks the loop leaves room for one or two"
    for outcome in outcomes:
        assert isinstance(outcome, Unknown)
        assert (outcome.code, outcome.down) == ("timeout", "broker")
    for outcome in late:  # not begun, so surely not delivered
        assert isinstance(outcome, Transient)
        assert (outcome.code, outcome.down) == ("busy", "broker")

    text = await asyncio.to_thread(_read_lines, reader, 10)
    assert [json.loads(line)["id"] for line in text] == [m.id for m in batch]
    after = make_messages(2)
    assert await broker.send(after) == [Delivered()] * 2
    text = await asyncio.to_thread(_read_lines, reader, 2)
    assert [json.loads(line)["id"] for line in text] == [m.id for m in after]


def _read_lines(reader: FileIO, count: int) -> list[bytes]:
    data = b""
    while data.count(b"\n") < count:
        data += reader.read(1 << 20)
    return data.splitlines()


async def test_a_broken_pipe_keeps_what_was_not_written(pipe: tuple[FileIO, TextIO]) -> None:
    reader, stream = pipe
    os.set_blocking(stream.fileno(), False)
    broker = StdoutBroker(BrokerOptions(), stream)
    batch = [make_message(b"x" * 10_000, content_type="text/plain") for _ in range(20)]
    sending = asyncio.create_task(broker.send(batch))
    await asyncio.sleep(0.2)
    reader.close()
    outcomes = await sending
    delivered = outcomes.count(Delivered())
    assert 0 < delivered < 20  # as much as the pipe took
    assert outcomes[:delivered] == [Delivered()] * delivered
    for outcome in outcomes[delivered:]:
        assert isinstance(outcome, Transient)
        assert (outcome.code, outcome.down) == ("broken_pipe", "broker")
    with pytest.raises(Unreachable, match="nobody reads"):
        await broker.ping()


async def test_a_line_broken_off_does_not_spoil_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    room = [10]

    def full_disk(fd: int, data: bytes) -> int:
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data[: room.pop()])

    with (tmp_path / "out").open("w") as stream:
        broker = StdoutBroker(stream=stream)
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full_disk)
            (outcome,) = await broker.send(make_messages(1))
        assert isinstance(outcome, Transient)
        assert (outcome.code, outcome.down) == ("enospc", "broker")
        message = make_message()
        assert await broker.send([message]) == [Delivered()]
        torn, whole = (tmp_path / "out").read_bytes().splitlines()
        assert len(torn) == 10
        assert json.loads(whole)["id"] == message.id


async def test_after_a_message_that_cannot_be_written_nothing_of_its_key_follows(
    pipe: tuple[FileIO, TextIO],
) -> None:
    reader, stream = pipe
    broken = make_message(key="a", headers_json="{")
    batch = [make_message(key="a"), broken, make_message(key="a"), make_message(key="b")]
    outcomes = await StdoutBroker(stream=stream).send(batch)
    assert outcomes[0] == outcomes[3] == Delivered()
    assert isinstance(outcomes[1], Permanent)
    assert isinstance(outcomes[2], Transient)
    lines = reader.read(1 << 20).splitlines()
    assert [json.loads(line)["id"] for line in lines] == [batch[0].id, batch[3].id]


async def test_it_follows_what_was_printed_before(capfd: pytest.CaptureFixture[str]) -> None:
    broker = open_broker("stdout://")
    sys.stdout.write("before\n")
    assert await broker.send(make_messages(1)) == [Delivered()]
    print("after")
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == "before"
    assert json.loads(lines[1])["payload"] == 0
    assert lines[2] == "after"


async def test_a_stream_that_is_no_file() -> None:
    stream = io.StringIO()
    broker = StdoutBroker(stream=stream)
    await broker.ping()
    assert await broker.send(make_messages(2)) == [Delivered()] * 2
    assert len(stream.getvalue().splitlines()) == 2


async def test_a_closed_stream() -> None:
    stream = io.StringIO()
    stream.close()
    broker = StdoutBroker(stream=stream)
    (outcome,) = await broker.send(make_messages(1))
    assert isinstance(outcome, Transient)
    assert (outcome.code, outcome.down) == ("closed", "broker")
    with pytest.raises(Unreachable, match="it is closed"):
        await broker.ping()


def test_it_has_no_address() -> None:
    with pytest.raises(ConfigurationError, match="write stdout://"):
        open_broker("stdout://somewhere")
