"""What an exchange has said of an order is shown as it was spelled, and to everybody alike."""

import json
from typing import Any

import pytest
from gateway_tools import WAIT, House, place

from postroom.brokers import Delivered
from postroom.messages import Message

SAYS = {"now": ""}


def say(message: Message) -> Delivered:
    """An adapter whose exchange says what the test wants."""
    return Delivered(SAYS["now"])


def told(house: House, answer: str) -> bytes:
    """The body of an order that got this answer: the same however it is asked for."""
    SAYS["now"] = answer
    with house.gateway(f"call:{__name__}:say") as client:
        asked = [place(client, params=WAIT), place(client), client.get("/do/order/k1")]
    assert [each.status_code for each in asked] == [200, 200, 200]
    assert {each.headers["content-type"] for each in asked} == {"application/json"}
    (body,) = {each.content for each in asked}
    return body


@pytest.mark.parametrize(
    "answer",
    [
        '{"price":12345678901.1234567890123,"qty":100.0,"far":1e999}',
        '{"leg":1,"leg":2}',
        '{ "note":"\\u00e4 ö \\ud83d\\ude00" ,\n"legs": [ ] }\n',
        "-0",
        "null",
        "[" * 60 + "]" * 60,
    ],
    ids=range(6),
)
def test_json_is_shown_as_it_was_spelled(sqlite_house: House, answer: str) -> None:
    body = told(sqlite_house, answer)
    assert f'"result":{answer},"last_error":null}}'.encode() in body
    shown = json.loads(body)
    assert (shown["status"], shown["result"]) == ("succeeded", json.loads(answer))


@pytest.mark.parametrize(
    "answer",
    [
        "",
        'booked, ref 7 \\ "quoted" ü',
        '{"price":NaN}',
        "[-Infinity]",
        '{"text":"\\ud800"}',
        '{"\\udfff":1}',
        '{"price":' + "9" * 5000 + "}",
        "[" * 61 + "]" * 61,
        '{"a":' * 5000 + "1" + "}" * 5000,
        '{"cut":"of',
    ],
    ids=range(10),
)
def test_what_no_client_could_read_as_json_is_shown_as_text(
    sqlite_house: House, answer: str
) -> None:
    shown: dict[str, Any] = json.loads(told(sqlite_house, answer))
    assert (shown["status"], shown["result"]) == ("succeeded", answer)


def test_half_a_character_does_not_hide_an_order(sqlite_house: House) -> None:
    shown = json.loads(told(sqlite_house, "booked \ud800"))
    assert (shown["status"], shown["result"]) == ("succeeded", "booked ?")
