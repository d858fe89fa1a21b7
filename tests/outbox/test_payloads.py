"""Any payload arrives byte for byte, or is refused when it is published; none becomes a poison."""

import json
import math
import os
from contextlib import closing
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from relaying import Post

from postroom import Draft
from postroom.errors import InvalidMessage

pytest_plugins = ("relay_fixtures",)

EXAMPLES = 10_000 if os.environ.get("POSTROOM_GUARANTEES") == "big" else 100

# Surrogates too, which are text for Python and for nobody else.
TEXT = st.text(st.characters(codec=None), max_size=20)
NUMBERS = st.integers() | st.integers(-(2**70), 2**70) | st.floats()
LEAVES = st.none() | st.booleans() | NUMBERS | TEXT
JSON = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4)
)
PAYLOADS = st.lists(JSON | st.binary(max_size=200), min_size=1, max_size=8)
NASTY: list[Any] = [
    {"nul": "\x00", "a\x00b": 1, "": 2},
    {"four bytes": "😀", "line": "\u2028", "é": 1, "e\u0301": 2},
    [2**53 + 1, -(2**63), 10**40, -0.0, 1e308, 5e-324, 0.1],
    [float("nan")],
    {"deep": [float("inf")]},
    "half a \ud800 pair",
    {"\udfff": 1},
    b'{"twice": 1, "twice": 2, "nan": NaN}',
    bytes(range(256)),
    b"",
]


def is_sound(value: Any) -> bool:
    """Whether strict JSON can say it."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, str):
        return not any("\ud800" <= character <= "\udfff" for character in value)
    if isinstance(value, list):
        return all(map(is_sound, value))
    if isinstance(value, dict):
        return all(map(is_sound, [*value, *value.values()]))
    return True


async def test_any_payload_arrives_as_it_was_or_is_refused_when_published(post: Post) -> None:
    wanted: dict[str, Any] = {}
    refused = 0

    with closing(post.connect()) as tx:

        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(PAYLOADS)
        @example(NASTY)
        def publish(payloads: list[Any]) -> None:
            nonlocal refused
            for payload in payloads:
                draft = Draft(payload=payload, type="t", topic="orders", key=f"k{len(wanted) % 40}")
                if isinstance(payload, bytes) or is_sound(payload):
                    (published,) = post.outbox.publish_many(tx, [draft])
                    wanted[published.id] = payload
                else:
                    # The transaction goes on: what is published next shows it.
                    with pytest.raises(InvalidMessage):
                        post.outbox.publish_many(tx, [draft])
                    refused += 1

        publish()
        tx.commit()
    await post.relay().drain_once()
    received = {message.id: message.payload for message in post.broker.messages}
    assert received.keys() == wanted.keys()
    for id, payload in wanted.items():
        if isinstance(payload, bytes):
            assert received[id] == payload
        else:
            assert repr(json.loads(received[id])) == repr(payload)
    assert post.empty()
    assert not post.count("dead_letter")
    assert refused
