"""The sequence of a message within its aggregate: from the publisher to `inbox.once`."""

from typing import Any

import pytest
from consuming import House, note

from postroom import Draft, inbox
from postroom.errors import InvalidMessage
from postroom.idempotency import derive_key
from postroom.inbox import Received
from postroom.messages import Message, encode

VERSIONED: dict[str, Any] = {"type": "note", "aggregate_type": "order", "aggregate_id": "№ 7"}


def versioned(number: int, sequence: int | None) -> Message:
    """A message as the outbox stores it; each has an id of its own."""
    made = encode(Draft(payload={"n": number}, sequence=sequence, **VERSIONED))
    return note("k", number)._replace(
        aggregate_type=made.aggregate_type,
        aggregate_id=made.aggregate_id,
        headers_json=made.headers,
    )


async def test_one_step_of_an_aggregate_is_applied_once_whatever_its_id(house: House) -> None:
    consumer, seen, applied = house.consumer(), list[Received](), list[int | None]()

    @consumer.on("note")
    async def handle(event: Any, tx: Any, received: Received) -> None:
        seen.append(received)
        if received.aggregate_key and await inbox.once_async(tx, "steps", received.aggregate_key):
            applied.append(received.sequence)

    await house.send(versioned(0, 3), versioned(1, 3), versioned(2, 4), versioned(3, None))
    assert (await consumer.drain_once()).handled == 4
    assert applied == [3, 4]
    assert [received.sequence for received in seen] == [3, 3, 4, None]
    assert seen[0].aggregate_key == derive_key("order", "№ 7", "note", 3)
    assert seen[3].aggregate_key is None


@pytest.mark.parametrize(
    ("wishes", "said"),
    [
        ({"sequence": 1, "aggregate_id": None}, "sequence needs aggregate_type and aggregate_id"),
        ({"sequence": 1, "aggregate_type": None}, "sequence needs aggregate_type and aggregate_id"),
        ({"sequence": -1}, r"sequence must be an int from 0 to 2\*\*63 - 1, not -1"),
        ({"sequence": 2**63}, "sequence must be an int"),
        ({"sequence": True}, "sequence must be an int"),
        ({"sequence": "3"}, "sequence must be an int"),
        ({"sequence": 3, "headers": {"CE-Sequence": "4"}}, "either sequence or the header"),
    ],
)
def test_a_sequence_that_is_refused(wishes: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidMessage, match=said):
        encode(Draft(payload={}, **(VERSIONED | wishes)))
