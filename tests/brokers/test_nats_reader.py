"""Readers take what is theirs wherever the network cuts it, and leave all else to nats-py."""

import asyncio
import itertools
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from nats.protocol.parser import Parser

from postroom.brokers.nats_reader import LONG_BYTES, AnswerReader, MessageReader
from postroom.brokers.nats_wire import Arrived

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
        parser = AnswerReader(parser, PREFIX, lambda token, data: heard(client, token, data))

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
    reader = AnswerReader(before, PREFIX, lambda token, data: heard(client, token, data))
    asyncio.run(reader.parse(whole[20:]))
    assert client.heard == [(PREFIX + b"1", b"first", None), (PREFIX + b"2", b"second", None)]


def stream_message(
    data: bytes, *, sid: int = 7, head: bytes = b"NATS/1.0\r\nce-id: 1\r\n\r\n"
) -> bytes:
    sizes = b"%d %d" % (len(head), len(head) + len(data))
    return b"HMSG orders.placed %d $JS.ACK.o.c.1.2.3.4.5 %b\r\n%b%b\r\n" % (sid, sizes, head, data)


class Hearer(Client):
    """Writes down messages of streams in the form that both readers can be held against."""

    async def _process_msg(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, head: Any
    ) -> None:
        self.heard.append((sid, subject.decode(), reply.decode(), data, head))

    def take(self, arrived: list[Arrived]) -> None:
        heads = {"1": b"NATS/1.0\r\nce-id: 1\r\n\r\n"}
        for each in arrived:
            head = heads[each.headers["ce-id"]]
            self.heard.append((7, each.subject, each.reply, each.data, head))


MESSAGES = st.builds(
    stream_message, st.sampled_from([b"", b'{"n":1}', b"\r\nHMSG ", b"x" * (LONG_BYTES + 1)])
)
ODD_MESSAGES = st.sampled_from(
    [
        stream_message(b"of another subscription", sid=8),
        stream_message(b"", head=b"NATS/1.0 100 Idle\r\n\r\n"),
        b"MSG orders.placed 7 $JS.ACK.o.c.1.2.3.4.5 2\r\nhi\r\n",
    ]
)


@settings(max_examples=300, deadline=None)
@given(st.lists(MESSAGES | ODD_MESSAGES | OTHERS, max_size=12), st.lists(st.integers(0, 800)))
def test_messages_are_found_wherever_the_bytes_are_cut(said: list[bytes], cuts: list[int]) -> None:
    whole = b"".join(said)
    places = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    expected, found = Hearer(), Hearer()
    reader = MessageReader(Parser(found), 7, found.take)

    async def feed() -> None:
        await Parser(expected).parse(whole)
        for a, b in itertools.pairwise(places):
            await reader.parse(whole[a:b])

    asyncio.run(feed())
    assert found.heard == expected.heard


def test_messages_come_together_with_plain_headers() -> None:
    head = b"NATS/1.0\r\nCe-Id: 1\r\nce-subject: a%20b\r\n\r\n"
    taken: list[list[Arrived]] = []
    reader = MessageReader(Parser(Client()), 7, taken.append)
    asyncio.run(reader.parse(stream_message(b"first", head=head) + stream_message(b"second")))
    place = ("orders.placed", "$JS.ACK.o.c.1.2.3.4.5")
    first = Arrived(*place, {"ce-id": "1", "ce-subject": "a b"}, b"first")
    assert taken == [[first, Arrived(*place, {"ce-id": "1"}, b"second")]]


async def _feed(reader: Any, pieces: list[bytes]) -> None:
    for piece in pieces:
        await reader.parse(piece)


def test_after_something_else_messages_are_ours_again() -> None:
    """Though what nats-py was given ended in the middle of one."""
    client = Hearer()
    reader = MessageReader(Parser(client), 7, client.take)
    one = stream_message(b"x" * 100)
    long = stream_message(b"x" * (LONG_BYTES + 1))
    whole = one + b"PING\r\n" + one + long + 3 * one
    pieces = [whole[at : at + 150] for at in range(0, len(whole), 150)]
    taken = 0

    def take(arrived: list[Arrived]) -> None:
        nonlocal taken
        taken += len(arrived)

    reader._take = take
    asyncio.run(_feed(reader, pieces))
    assert taken == 5
    assert len(client.heard) == 2  # the ping, and the long one
