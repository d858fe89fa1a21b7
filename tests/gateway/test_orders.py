"""What an order is: every fault names its field, and one order has one digest."""

import json
import os
import time
from contextlib import suppress
from typing import Any

import pytest
from gateway_tools import LIMIT, ORDER
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from postroom.gateway.orders import BODY_BYTES, BadBody, checked, parse
from postroom.ledger.rules import fingerprint

EXAMPLES = 1000 if os.environ.get("POSTROOM_GUARANTEES") == "big" else 40
# However slow the machine is.
SLOWLY = settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"symbol": ""}, "symbol"),
    ({"symbol": "A" * 33}, "symbol"),
    ({"symbol": 7}, "symbol"),
    ({"side": "hold"}, "side"),
    ({"side": None}, "side"),
    ({"quantity": 0}, "quantity"),
    ({"quantity": -1}, "quantity"),
    ({"quantity": 1.5}, "quantity"),
    ({"quantity": True}, "quantity"),
    ({"quantity": "100"}, "quantity"),
    ({"quantity": 10**13}, "quantity"),
    ({"order_type": "stop"}, "order_type"),
    ({"order_type": "limit"}, "limit_price"),
    ({"limit_price": "5"}, "limit_price"),
    ({"order_type": "limit", "limit_price": 5}, "limit_price"),
    ({"order_type": "limit", "limit_price": "0.00"}, "limit_price"),
    ({"order_type": "limit", "limit_price": "-1"}, "limit_price"),
    ({"order_type": "limit", "limit_price": "1e5"}, "limit_price"),
    ({"account": ""}, "account"),
    ({"account": "a b"}, "account"),
    ({"time_in_force": "forever"}, "time_in_force"),
    ({"client_note": "x" * 201}, "client_note"),
    ({"client_note": None}, "client_note"),
    ({"price": "1"}, "price"),
]


@pytest.mark.parametrize(("change", "field"), FAULTS, ids=lambda value: json.dumps(value)[:40])
def test_a_fault_names_its_field(change: dict[str, Any], field: str) -> None:
    _, faults = checked(parse(json.dumps(ORDER | change).encode()))
    assert [fault.field for fault in faults] == [field]
    assert all(fault.detail for fault in faults)


@pytest.mark.parametrize("name", ["symbol", "side", "quantity", "order_type"])
def test_a_missing_field_is_named(name: str) -> None:
    _, faults = checked({key: value for key, value in ORDER.items() if key != name})
    assert [fault.field for fault in faults] == [name]


def digest(text: str) -> str:
    order, faults = checked(parse(text.encode()))
    assert not faults
    return fingerprint(order)


@pytest.mark.parametrize(
    "spelled",
    [
        '{"quantity": 100.0, "order_type": "limit", "limit_price": "101.5", "side": "buy",'
        ' "symbol": "AAPL"}',
        '{"symbol":"aapl","side":"buy","quantity":1e2,"order_type":"limit","limit_price":"101.50"}',
        '{"symbol":"AAPL","side":"buy","quantity":100,"order_type":"limit",'
        '"limit_price":"0101.500","time_in_force":"day"}',
    ],
)
def test_spellings_of_one_order_have_one_digest(spelled: str) -> None:
    assert digest(spelled) == digest(json.dumps(LIMIT))


@pytest.mark.parametrize(
    "change",
    [
        {"quantity": 101},
        {"side": "sell"},
        {"limit_price": "101.51"},
        {"account": "a"},
        {"time_in_force": "gtc"},
        {"client_note": "hi"},
    ],
)
def test_other_orders_have_other_digests(change: dict[str, Any]) -> None:
    assert digest(json.dumps(LIMIT | change)) != digest(json.dumps(LIMIT))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b'"x"',
        b"{",
        b"\xff",
        b'{"quantity": NaN}',
        b'{"a": 1, "a": 2}',
        b"[" * 16_000,
        b'{"client_note": "\\ud800"}',
        b'{"\\uDFFF": 1}',
        b'{"quantity": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda body: repr(body[:20]),
)
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(BadBody):
        parse(body)


DEEP = b'{"symbol": "A", "client_note": ' + b"[" * 500 + b"1" + b"]" * 500 + b"}"
DEEPER = DEEP.replace(b"[" * 500, b"[" * 900).replace(b"]" * 500, b"]" * 900)
HUGE = b"9" * 5000


@pytest.mark.parametrize(
    ("body", "field", "said"),
    [
        (b'{"symbol": "A", "side": "buy", "symbol": "B"}', "symbol", "symbol stands in it twice"),
        (b'{"x": {"a": {"b": 1, "b": 2}}}', "x", "x holds b twice"),
        (b'{"x": [{"a": 1, "a": 2}]}', "x", "x holds a twice"),
        (b'{"\\ud800": 1, "\\ud800": 2}', "\\ud800", "\\ud800 stands in it twice"),
        (b'{"x": {"\\ud800": 1, "\\ud800": 2}}', "x", "x holds \\ud800 twice"),
        ('{"ä": 1, "ä": 2}'.encode(), "ä", "ä stands in it twice"),
        ('{"ä": "\\ud800"}'.encode(), "ä", "ä holds half of a character"),
        (b'{"x": {"\\ud800": 1}}', "x", "x holds half of a character"),
        (b'{"symbol": "A", "quantity": NaN}', "quantity", "NaN, which is no number in JSON"),
        (b'{"quantity": -Infinity}', "quantity", "-Infinity, which is no number in JSON"),
        (b'{"x": [Infinity]}', "x", "Infinity, which is no number in JSON"),
        (b'{"quantity": ' + HUGE + b"}", "quantity", "a number that is too large"),
        (b'{"quantity": -' + HUGE + b"}", "quantity", "a number that is too large"),
        (b'{"x": {"y": ' + HUGE + b"}}", "x", "a number that is too large"),
        (DEEP, "client_note", "client_note is nested too deeply"),
        (DEEPER, "client_note", "client_note is nested too deeply"),
        (DEEP.replace(b"1", b"1e99999999999999999999"), "client_note", "nested too deeply"),
        (b'{"a":' * 500 + b"1" + b"}" * 500, "a", "a is nested too deeply"),
        (b"[" * 16_000, None, "the body is nested too deeply"),
        (b'["x", ' + b"[" * 500, None, "the body is nested too deeply"),
        (b"{" * 500, None, "the body is nested too deeply"),
        (b'{"a":' * 3000 + b"1" + b"}" * 3000, "a", "a is nested too deeply"),
        (b'{"\\ud800":' + b"[" * 500, "\\ud800", "\\ud800 is nested too deeply"),
        (b'{"\\q":' + b"[" * 500, None, "the body is not JSON"),
        (b"NaN", None, "must be a JSON object"),
        (HUGE, None, "must be a JSON object"),
        (b'{"quantity": 01}', None, "the body is not JSON"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_bad_body_is_told_its_true_reason_and_field(
    body: bytes, field: str | None, said: str
) -> None:
    with pytest.raises(BadBody) as error:
        parse(body)
    assert (error.value.field, said in str(error.value)) == (field, True), error.value
    str(error.value).encode()  # it can be sent


def test_the_worst_bodies_take_no_time() -> None:
    names = b",".join(b'"%d":[]' % number for number in range(1500))
    pairs = b",".join([b'"a":1'] * 2500)
    worst = [b'{"x":[' + pairs.replace(b'"a":1', b"NaN") + b"]}", b"{" + pairs + b"}"]
    worst += [b"{" + names + b"}", b'{"x":' + b"[" * 400 + b"]" * 400 + b"}"]
    worst += [
        b"[]" * 8000,
        b'{"' + b'\\"' * 8000,
        b'"' * 16_000,
        b'{"x":' + b"[" * 30 + b'"[' * 8000,
    ]
    worst += [b"[" + b"1" * 16_000 + b"]", b'{"x":1.' + b"1" * 16_000 + b"}"]
    began = time.perf_counter()
    for body in worst:
        assert len(body) <= BODY_BYTES
        with suppress(BadBody):
            parse(body)
    assert time.perf_counter() - began < 2  # a few hundredths, however slow the machine is


@SLOWLY
@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_no_body_breaks_it(body: bytes) -> None:
    try:
        document = parse(body)
    except BadBody:
        return
    checked(document)


@SLOWLY
@given(st.dictionaries(st.sampled_from([*LIMIT, "account", "x"]), st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))))  # fmt: skip
def test_no_document_breaks_it(document: dict[str, Any]) -> None:
    order, faults = checked(parse(json.dumps(document).encode()))
    assert faults or fingerprint(order)


def test_a_number_too_large_to_write_down_takes_no_time() -> None:
    _, faults = checked(parse(b'{"quantity": 1e999999999}'))
    assert "quantity" in [fault.field for fault in faults]
