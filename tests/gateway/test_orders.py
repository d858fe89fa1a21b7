"""What an order is: every fault names its field, and one order has one digest."""

import json
import os
from typing import Any

import pytest
from gateway_tools import LIMIT, ORDER
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from postroom.gateway.orders import BadBody, checked, parse
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
