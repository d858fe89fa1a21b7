"""The digest of a request: one for all spellings of it, another for every other request."""

import decimal
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from postroom.errors import InvalidMessage
from postroom.ledger.rules import canonical, checked_name, fingerprint

# However slow the machine is.
SLOWLY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
NUMBERS = st.integers() | st.decimals(allow_nan=False, allow_infinity=False, places=4)
SCALARS = st.none() | st.booleans() | st.text() | NUMBERS
DOCUMENTS = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"quantity": 100}, {"quantity": 100.0}),
        ({"quantity": 100}, {"quantity": decimal.Decimal("1E+2")}),
        ({"x": 0}, {"x": -0.0}),
        ({"x": decimal.Decimal("1.50")}, {"x": 1.5}),
        ([1, [2]], (1, (2.0,))),
    ],
)
def test_spellings_of_one_request_have_one_digest(one: object, other: object) -> None:
    assert fingerprint(one) == fingerprint(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1}, {"a": "1"}),
        ({"a": None}, {}),
        ({"a": [1, 2]}, {"a": [2, 1]}),
        ({"a": 1}, {"a": True}),
        ({"a": 10}, {"a": 1}),
        ({"a": 12}, {"a": decimal.Decimal("1.2")}),
        ({"a": 1.5}, {"a": "15e-1"}),
        ({"a": 10**50}, {"a": 10**51}),
    ],
)
def test_other_requests_have_other_digests(one: object, other: object) -> None:
    assert fingerprint(one) != fingerprint(other)


@SLOWLY
@given(DOCUMENTS)
def test_the_one_spelling_is_json_and_spells_itself(document: object) -> None:
    spelled = canonical(document)
    read = json.loads(spelled, parse_float=decimal.Decimal)
    assert canonical(read) == spelled
    assert b" " not in spelled or any(" " in text for text in _texts(document))


def _texts(value: object) -> list[str]:
    if isinstance(value, dict):
        return [t for name, each in value.items() for t in [name, *_texts(each)]]
    if isinstance(value, list | tuple):
        return [t for each in value for t in _texts(each)]
    return [value] if isinstance(value, str) else []


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), b"bytes", {"a": object()}])
def test_what_json_cannot_hold_is_refused(wrong: object) -> None:
    with pytest.raises(InvalidMessage):
        canonical(wrong)


@pytest.mark.parametrize("name", ["", "x" * 256, "a\nb", "a\x00b", None, 7])
def test_a_name_can_be_kept_everywhere(name: object) -> None:
    with pytest.raises(InvalidMessage):
        checked_name("key", name)
