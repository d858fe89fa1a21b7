"""Headers from NATS: read as nats-py reads them, only sooner."""

import hypothesis
from hypothesis import strategies as st
from nats.aio.client import Client

from postroom.brokers.nats_wire import header_lines

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
    ]
)
VALUES = st.one_of(
    st.binary(max_size=12), st.sampled_from([b"", b" x ", "世界".encode(), b"a:b", b"\xff", b"\r"])
)
LINES = st.one_of(
    st.builds(lambda name, value: name + b":" + value, NAMES, VALUES), st.binary(max_size=12)
)


@hypothesis.given(st.lists(LINES, max_size=8))
def test_by_the_same_rules(lines: list[bytes]) -> None:
    raw = b"\r\n".join(lines)
    assert header_lines(raw) == Client._parse_header_lines(raw)


def test_the_last_of_a_name_counts() -> None:
    assert header_lines(b"a: 1\r\nb:2\r\na: 3\r\n\r\n") == {"a": "3", "b": "2"}
