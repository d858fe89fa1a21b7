"""A consumer and CloudEvents in structured mode: handled once by the event's own id, or buried."""

import json
from typing import Any

from consuming import House

from helpers_messages import make_message
from postroom.messages import Message

JSON = "application/cloudevents+json"


def event(id: str, number: int) -> dict[str, Any]:
    return {
        "specversion": "1.0",
        "id": id,
        "source": "/the/mill",
        "type": "note",
        "partitionkey": "k",
        "data": {"key": "k", "n": number},
    }


def structured(document: object, content_type: str = JSON) -> Message:
    return make_message(json.dumps(document).encode(), content_type=content_type, type="outer")


async def test_an_event_is_handled_once_by_its_own_id_and_type(house: House) -> None:
    consumer = house.applying()
    await house.send(*(structured(event(f"e-{n}", n)) for n in (1, 2, 1)))
    done = await consumer.drain_once()
    await consumer.close()
    assert (done.handled, done.duplicates) == (2, 1)
    assert house.effects() == [("k", 1), ("k", 2)]
    assert sorted(house.inbox()) == ["e-1", "e-2"]


async def test_a_batch_is_buried_with_the_reason_also_where_unknown_types_are_skipped(
    house: House,
) -> None:
    consumer = house.applying(unknown="skip")
    batch = structured([event("e-1", 1)], "application/cloudevents-batch+json")
    await house.send(batch, structured({"id": "e-2"}), make_message(type="unknown"))
    done = await consumer.drain_once()
    await consumer.close()
    assert (done.handled, done.skipped, done.buried) == (0, 1, 2)
    letters = sorted(house.letters(), key=lambda each: str(each["error"]))
    assert [each["error_code"] for each in letters] == ["unreadable"] * 2
    assert "batch mode" in letters[0]["error"]
    assert "has no text for source, specversion, type" in letters[1]["error"]
