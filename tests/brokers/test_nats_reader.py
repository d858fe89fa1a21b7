"""The reader takes answers wherever the network cuts them, and leaves all else to nats-py."""

import asyncio
import itertools
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from nats.protocol.parser import Parser

from postroom.brokers.nats_reader import Reader

PREFIX = b"_INBOX.us."


class Client:
    """Writes down what the parser makes of the bytes."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    async def _process_msg(self, _: int, subject: bytes, __: bytes, data: bytes, head: Any) -> None:
        self.heard.append((bytes(subject), data, head))

    async def _process_ping(self) -> None:
        self.heard.append("ping")

    async def _process_pong(self) -> None:
        self.heard.append("pong")

    async def _process_err(self, text: str) -> None:
        self.heard.append(text)


def message(subject: bytes, data: bytes) -> bytes:
    return b"MSG %b 1 %d\r\n%b\r\n" % (subject, len(data), data)


ANSWERS = st.builds(
    lambda token, data: message(PREFIX + b"%d" % token, data),
    st.integers(1, 10**9),
    st.sampled_from([b'{"stream":"orders","seq":7}', b"", b"\r\nPING\r\n", b"MSG _INBOX.us.1 1 9"]),
)
OTHERS = st.sampled_from(
    [
        b"PING\r\n",
        b"PONG\r\n",
        b"+OK\r\n",
        b"-ERR 'permissions violation'\r\n",
        message(b"somebody.else", b"hello"),
        b"HMSG _INBOX.us.12 1 16 16\r\nNATS/1.0 503\r\n\r\n\r\n",
    ]
)


def read(pieces: list[bytes], *, ours: bool) -> list[Any]:
    client = Client()
    parser: Any = Parser(client)
    if ours:
        parser = Reader(parser, PREFIX, lambda token, data: heard(client, token, data))

    async def feed() -> None:
        for piece in pieces:
            await parser.parse(piece)

    asyncio.run(feed())
    return client.heard


def heard(client: Client, token: bytes, data: bytes) -> None:
    client.heard.append((PREFIX + token, data, None))


@settings(max_examples=300, deadline=None)
@given(st.lists(ANSWERS | OTHERS, max_size=12), st.lists(st.integers(0, 400), max_size=8))
def test_answers_are_found_wherever_the_bytes_are_cut(said: list[bytes], cuts: list[int]) -> None:
    whole = b"".join(said)
    places = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    pieces = [whole[a:b] for a, b in itertools.pairwise(places)]
    assert read(pieces, ours=True) == read([whole], ours=False)


def test_it_takes_over_in_the_middle_of_a_message() -> None:
    client = Client()
    before = Parser(client)
    whole = message(PREFIX + b"1", b"first") + message(PREFIX + b"2", b"second")
    asyncio.run(before.parse(whole[:20]))
    reader = Reader(before, PREFIX, lambda token, data: heard(client, token, data))
    asyncio.run(reader.parse(whole[20:]))
    assert client.heard == [(PREFIX + b"1", b"first", None), (PREFIX + b"2", b"second", None)]
