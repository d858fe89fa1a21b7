"""Headers from NATS: read as nats-py reads them, only sooner."""

import hypothesis
from hypothesis import strategies as st
from nats.aio.client import Client

from postroom.brokers.nats_wire import message_headers
from postroom.brokers.receiving import plain_headers

NAMES = st.sampled_from(
    [
        b"ce-id",
        b"",
        b" ce-id ",
        b"ce id",
        b"ce\tid",
        b"ce\x1fid",
        b"\xc3\xbc",
        b"a\x00b",
        b"\r",
        b"\n",
        b"Ce-Subject",
        b"ce_type",
        b"cloudEvents:type",
    ]
)
VALUES = st.one_of(
    st.binary(max_size=12),
    st.sampled_from(
        [b"", b" x ", "世界".encode(), b"a:b", b"\xff", b"\r", b'"a%20b"', b"%C3%BC", b"\xc2\xa0x"]
    ),
)
LINES = st.one_of(
    st.builds(lambda name, value: name + b":" + value, NAMES, VALUES), st.binary(max_size=12)
)


@hypothesis.given(st.lists(LINES, max_size=8))
def test_by_the_same_rules(lines: list[bytes]) -> None:
    raw = b"\r\n".join(lines)
    assert message_headers(raw) == plain_headers(Client._parse_header_lines(raw).items())


def test_the_last_of_a_name_counts() -> None:
    assert message_headers(b"a: 1\r\nb:2\r\na: 3\r\n\r\n") == {"a": "3", "b": "2"}
