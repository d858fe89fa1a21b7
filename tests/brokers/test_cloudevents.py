"""CloudEvents in structured mode, read without a broker."""

import base64
import json
from typing import Any

import pytest

from postroom.brokers.cloudevents import UNREADABLE
from postroom.brokers.receiving import Delivery, delivery

EVENT = {"specversion": "1.0", "id": "e-7", "source": "/mill", "type": "flour.ground.v1"}
JSON = "application/cloudevents+json"


def received(payload: object, content_type: str = JSON, **headers: str) -> Delivery:
    body = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    return delivery(
        {"content-type": content_type, **headers},
        body,
        topic="t",
        source="s",
        claim=1,
        receipt=None,
        unnamed="from the broker",
        key="k",
    )


@pytest.mark.parametrize(
    ("more", "payload", "content_type"),
    [
        ({"data": {"a": [1.5, "\u20ac"]}}, b'{"a":[1.5,"\\u20ac"]}', "application/json"),
        ({"data": None}, b"null", "application/json"),
        ({"data": "text"}, b'"text"', "application/json"),
        ({"data": "<a/>", "datacontenttype": "text/xml"}, b"<a/>", "text/xml"),
        ({"data": [1], "datacontenttype": "text/csv"}, b"[1]", "text/csv"),
        ({"data": "x", "datacontenttype": "a/b+json; v=1"}, b'"x"', "a/b+json; v=1"),
        (
            {"data_base64": base64.b64encode(b"\x00\xff").decode(), "datacontenttype": "a/b"},
            b"\x00\xff",
            "a/b",
        ),
        ({}, b"", "application/octet-stream"),
        ({"datacontenttype": "a/b"}, b"", "a/b"),
    ],
)
def test_data_as_in_binary_mode(more: dict[str, Any], payload: bytes, content_type: str) -> None:
    came = received({**EVENT, **more})
    assert (came.id, came.type) == ("e-7", "flour.ground.v1")
    assert (came.payload, came.content_type) == (payload, content_type)
    assert UNREADABLE not in came.headers


def test_attributes_as_in_binary_mode() -> None:
    more = {"time": "2026-01-01T00:00:00Z", "urgent": True, "count": -3, "Subject": "s", "no": None}
    came = received({**EVENT, **more}, "Application/CloudEvents+JSON;charset=utf-8")
    expected = {"time": more["time"], "urgent": "true", "count": "-3", "subject": "s", **EVENT}
    assert came.headers == {"content-type": "application/octet-stream"} | {
        f"ce-{name}": value for name, value in expected.items()
    }
    assert came.key == "k"  # the broker's own, since the event has no partitionkey
    assert received({**EVENT, "partitionkey": "p"}).key == "p"


def test_attributes_of_the_event_win_over_headers() -> None:
    came = received({**EVENT, "data": 1}, **{"ce-id": "outer", "ce-type": "outer", "own": "kept"})
    assert (came.id, came.type, came.headers["own"]) == ("e-7", "flour.ground.v1", "kept")


@pytest.mark.parametrize(
    ("payload", "content_type", "reason"),
    [
        ([EVENT], "application/cloudevents-batch+json", "batch mode .* are not read; send each"),
        (EVENT, "application/cloudevents+protobuf", r"format application/cloudevents\+protobuf"),
        (EVENT, "application/cloudevents", "in the format application/cloudevents are not read"),
        (b"{", JSON, "the payload is not a JSON object"),
        (b"[" * 100_000, JSON, "the payload is not a JSON object"),
        ([EVENT], JSON, "the payload is not a JSON object"),
        (b"\xff\xfe\x00", JSON, "the payload is not a JSON object"),
        ({}, JSON, "has no text for id, source, specversion, type"),
        ({**EVENT, "id": 7, "type": ""}, JSON, "has no text for id, type"),
        ({**EVENT, "specversion": "0.3"}, JSON, "specversion of the CloudEvent is not 1.0"),
        ({**EVENT, "datacontenttype": 7}, JSON, "datacontenttype of the CloudEvent is not a text"),
        ({**EVENT, "data": 1, "data_base64": "AA=="}, JSON, "both data and data_base64"),
        ({**EVENT, "data_base64": "no!"}, JSON, "data_base64 of the CloudEvent is not base64"),
        ({**EVENT, "data_base64": 7}, JSON, "data_base64 of the CloudEvent is not base64"),
    ],
)
def test_an_event_that_cannot_be_read(payload: object, content_type: str, reason: str) -> None:
    came = received(payload, content_type, **{"ce-type": "order.placed.v1", "event_type": "x"})
    assert (came.id, came.type, came.content_type) == ("from the broker", "", content_type)
    with pytest.raises(ValueError, match=reason):
        raise ValueError(came.headers[UNREADABLE])


@pytest.mark.parametrize("kind", ["application/cloudeventsx+json", "application/json", "x/y+json"])
def test_other_media_types_stay_as_they_are(kind: str) -> None:
    came = received(EVENT, kind, **{"ce-id": "outer", "ce-type": "outer"})
    assert (came.id, came.type, came.content_type) == ("outer", "outer", kind)
    assert json.loads(came.payload) == EVENT
