"""Messages: what passes `encode` is stored byte for byte, what cannot is refused with a remedy."""

import dataclasses
import datetime as dt
import decimal
import enum
import json
import math
import uuid
from typing import Any

import msgspec
import pydantic
import pytest
import uuid_utils
from hypothesis import given
from hypothesis import strategies as st

from postroom import Draft, Outbox, message
from postroom.errors import ConfigurationError, InvalidMessage, MessageTooLarge
from postroom.messages import LANES, Encoded, Message, encode, lane_of, new_id, wire_headers

LANE_VECTORS = {
    ("orders", "k-1"): 10,
    ("orders", "00000000-0000-0000-0000-000000000000"): 9,
    ("events.default", "a"): 11,
    ("t", "a b"): 3,
    ("t", "😀"): 12,
    ("заказы", "ключ"): 9,
}
ID_VECTORS = {
    "018f0000-0000-7000-8000-000000000000": 12,
    "018f0000-0000-7000-8000-000000000001": 10,
}
NOON = dt.datetime(2030, 6, 1, 12, tzinfo=dt.timezone(dt.timedelta(hours=5, minutes=45)))


def encoded(payload: Any, **wishes: Any) -> Encoded:
    return encode(Draft(payload=payload, **({"type": "t"} | wishes)))


def test_lanes_never_change() -> None:
    """A lane that moved would let two relays own one key: these numbers are for ever."""
    assert LANES == 16
    for (topic, key), lane in LANE_VECTORS.items():
        assert lane_of(topic, key, new_id()) == lane
    for id, lane in ID_VECTORS.items():
        assert lane_of("any", None, id) == lane


@message("order.placed.v1", topic="orders", key_field="order_id")
@dataclasses.dataclass
class Placed:
    order_id: int
    total: decimal.Decimal
    at: dt.datetime = NOON


@message("order.paid.v1", aggregate_type="order", aggregate_field="order_id")
class Paid(pydantic.BaseModel):
    order_id: uuid.UUID
    amount: decimal.Decimal


@message("order.sent.v1", key_field="parcel", aggregate_field="order_id")
class Sent(msgspec.Struct):
    order_id: str
    parcel: str | None = None


def test_a_dataclass() -> None:
    made = encode(Draft(payload=Placed(7, decimal.Decimal("1.10"))))
    assert (made.type, made.topic, made.key, made.aggregate_id) == (
        "order.placed.v1", "orders", "7", None,
    )  # fmt: skip
    assert made.payload == b'{"order_id":7,"total":"1.10","at":"2030-06-01T12:00:00+05:45"}'
    assert made.content_type == "application/json"


def test_a_pydantic_model_whose_aggregate_is_its_key() -> None:
    id = uuid.UUID(int=1)
    made = encode(Draft(payload=Paid(order_id=id, amount=decimal.Decimal("2"))))
    assert (made.aggregate_type, made.aggregate_id, made.key) == ("order", str(id), str(id))
    assert made.topic == "events.default"
    assert json.loads(made.payload) == {"order_id": str(id), "amount": "2"}


def test_a_msgspec_struct_and_a_key_that_is_absent() -> None:
    made = encode(Draft(payload=Sent("o1", "p1")))
    assert (made.key, made.aggregate_id) == ("p1", "o1")
    assert encode(Draft(payload=Sent("o1"))).key == "o1"
    assert encode(Draft(payload=Sent("o1", "p1"), key="mine", type="other")).key == "mine"
    assert json.loads(made.payload) == {"order_id": "o1", "parcel": "p1"}


def test_a_subclass_is_of_its_bases_type() -> None:
    @dataclasses.dataclass
    class Express(Placed):
        rush: bool = True

    assert encode(Draft(payload=Express(1, decimal.Decimal(1)))).type == "order.placed.v1"


def test_a_declaration_that_cannot_work() -> None:
    with pytest.raises(ConfigurationError, match=r"Placed has no field 'nr'; it has at, order_id"):
        message("x", key_field="nr")(Placed)
    with pytest.raises(ConfigurationError, match="put @message above the decorator"):
        message("x")(dict)
    with pytest.raises(InvalidMessage, match="bad topic"):
        message("x", topic="a/b")
    with pytest.raises(ConfigurationError, match=r"routes\['order\.\*'\]: bad topic 'a b'"):
        Outbox(routes={"order.*": "a b"})


def test_two_classes_of_one_type_name_are_told(recwarn: pytest.WarningsRecorder) -> None:
    def declare(name: str) -> None:
        made = type(name, (), {"__annotations__": {"n": int}, "__module__": "shop"})
        message("told.twice.v1")(dataclasses.dataclass(made))

    declare("Told")
    declare("Told")  # the module was imported again
    assert not recwarn.list
    with pytest.warns(UserWarning, match=r"shop\.Other, and shop\.Told has the same type name"):
        declare("Other")


def test_a_message_without_a_type_is_named_in_good_english() -> None:
    for name, article in (("M", "an"), ("Order", "an"), ("Placed", "a"), ("UUID", "a")):
        with pytest.raises(InvalidMessage, match=f"^{article} {name} has no message type"):
            encode(Draft(payload=type(name, (), {})()))


def test_topics_go_from_the_nearest_wish_to_the_default() -> None:
    outbox = Outbox(routes={"order.*": "routed", "*.v1": "later", "order.placed.v1": "never"})

    def topic(payload: Any, **wishes: Any) -> str:
        return outbox._item(Draft(payload=payload, **wishes), False).message.topic

    placed = Placed(1, decimal.Decimal(1))
    assert topic(placed, topic="explicit") == "explicit"
    assert topic(placed) == "orders"
    assert topic(Sent("1")) == "routed"
    assert topic({}, type="user.v1") == "later"
    assert topic({}, type="user") == "events.default"


def test_ids_are_time_ordered_uuids_of_version_7() -> None:
    ids = [new_id() for _ in range(100)]
    assert ids == sorted(ids)
    assert {uuid.UUID(id).version for id in ids} == {7}
    chosen = uuid.uuid4()
    assert encoded(b"", id=chosen).id == encoded(b"", id=str(chosen).upper()).id == str(chosen)
    with pytest.raises(InvalidMessage, match="id must be a UUID, not 'x'"):
        encoded(b"", id="x")


def test_times_keep_every_microsecond() -> None:
    exact = dt.datetime(2038, 1, 19, 3, 14, 8, 1, tzinfo=dt.UTC)
    assert encoded(b"", deliver_at=exact).deliver_us == 2_147_483_648_000_001
    assert encoded(b"", expires_at=NOON).expires_us == 1_906_524_900_000_000
    for wish in ("deliver_at", "expires_at"):
        with pytest.raises(InvalidMessage, match=rf"{wish} must be a datetime with a time zone"):
            encoded(b"", **{wish: dt.datetime(2030, 1, 1)})
        with pytest.raises(InvalidMessage, match=r"datetime\.now\(timezone\.utc\) \+ timedelta"):
            encoded(b"", **{wish: 1_900_000_000})


class Colour(enum.Enum):
    RED = "red"


@pytest.mark.parametrize(
    ("payload", "stored"),
    [
        ({"a": [1, 2.5, None, True]}, b'{"a":[1,2.5,null,true]}'),
        ("\x00\u2028é😀", '"\\u0000\u2028é😀"'.encode()),
        (2**64 + 1, b"18446744073709551617"),
        (-0.0, b"-0.0"),
        (decimal.Decimal("0.10"), b'"0.10"'),
        (dt.date(2030, 1, 2), b'"2030-01-02"'),
        (uuid.UUID(int=5), b'"00000000-0000-0000-0000-000000000005"'),
        (uuid_utils.UUID(int=5), b'"00000000-0000-0000-0000-000000000005"'),
        (Colour.RED, b'"red"'),
        (b"\xff\x00", b"\xff\x00"),
        (bytearray(b"ab"), b"ab"),
        (memoryview(b"abcd")[1:3], b"bc"),
    ],
)
def test_what_is_stored(payload: Any, stored: bytes) -> None:
    assert encoded(payload).payload == stored


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        (float("nan"), "NaN and Infinity are not JSON; send None or a string instead"),
        ({"a": [float("-inf")]}, "NaN and Infinity are not JSON"),
        (decimal.Decimal("NaN"), "is not a number"),
        ("\ud800", "payload holds a lone surrogate: it is not text"),
        ({"\udfff": 1}, "payload holds a lone surrogate"),
        ({1, 2}, "a set is not JSON: pass a str, number, list or dict, or bytes"),
        ({(1, 2): 3}, "keys must be str"),
        (dt.datetime(2030, 1, 1), "naive datetime .* give it a time zone"),
        (object(), "an object is not JSON"),
    ],
)
def test_what_is_refused(payload: Any, said: str) -> None:
    with pytest.raises(InvalidMessage, match=said):
        encoded(payload)


def test_what_holds_itself_or_is_too_deep() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(InvalidMessage, match="payload"):
        encoded(loop)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InvalidMessage, match="nested too deeply, or holds itself"):
        encoded(deep)


def test_the_size_limit_is_exact() -> None:
    for size, limit in ((9, 10), (10, 10)):
        assert encode(Draft(payload=b"x" * size, type="t"), max_bytes=limit).size == size
    with pytest.raises(MessageTooLarge, match=r"t is 11 bytes, the limit is 10: .*a reference"):
        encode(Draft(payload=b"x" * 11, type="t"), max_bytes=10)
    with pytest.raises(MessageTooLarge):
        encode(Draft(payload=b"x" * 10, type="t", headers={"a": "b"}), max_bytes=10)


@pytest.mark.parametrize("topic", ["a", "a.b", "A-1_b.c-d", "0", "x" * 255])
def test_good_topics(topic: str) -> None:
    assert encoded(b"", topic=topic).topic == topic


@pytest.mark.parametrize(
    "topic", ["", " ", "a b", "a..b", ".a", "a.", "a/b", "a*", "a>", "-a", "ä", "a\n", "x" * 256, 5]
)
def test_bad_topics(topic: Any) -> None:
    with pytest.raises(InvalidMessage, match=r"bad topic .*as in 'orders\.created'"):
        encoded(b"", topic=topic)


@pytest.mark.parametrize("wish", ["key", "type", "aggregate_type", "aggregate_id", "dedup_key"])
def test_names(wish: str) -> None:
    longest = "😀" * 255
    assert encoded(b"", **{wish: longest})
    for value, said in (
        ("", "1 to 255 characters, not 0; leave it out for none"),
        ("x" * 256, "1 to 255 characters, not 256"),
        ("a\x00b", "holds a control character: remove it"),
        ("\ud800", "lone surrogate: it is not text"),
        (5, r"must be a str, not int: pass str\(\.\.\.\)"),
    ):
        with pytest.raises(InvalidMessage, match=said):
            encoded(b"", **{wish: value})


@pytest.mark.parametrize("wish", ["topic", "type", "aggregate_type"])
def test_an_empty_name_does_not_stand_for_the_declared_one(wish: str) -> None:
    with pytest.raises(InvalidMessage, match=wish):
        encode(Draft(payload=Paid(order_id=uuid.uuid4(), amount=decimal.Decimal(1)), **{wish: ""}))


@pytest.mark.parametrize(
    "headers", [{"a b": "x"}, {"": "x"}, {"ä": "x"}, {5: "x"}, {"a": 5}, {"a": "x\ny"}]
)
def test_bad_headers(headers: Any) -> None:
    with pytest.raises(InvalidMessage, match="header"):
        encoded(b"", headers=headers)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters()), inner),
    max_leaves=20,
)


def is_sound(value: Any) -> bool:
    """Whether a value is JSON in the strict sense and text in the strict sense."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, str):
        return not any("\ud800" <= char <= "\udfff" for char in value)
    if isinstance(value, list):
        return all(map(is_sound, value))
    if isinstance(value, dict):
        return all(map(is_sound, value)) and all(map(is_sound, value.values()))
    return True


@given(JSON)
def test_any_json_comes_back_or_is_refused(payload: Any) -> None:
    if not is_sound(payload):
        with pytest.raises(InvalidMessage):
            encoded(payload)
        return
    back = json.loads(encoded(payload).payload)
    assert repr(back) == repr(payload)


@given(st.text(alphabet=st.characters(codec=None), min_size=1, max_size=300))
def test_any_name_is_kept_or_refused(name: str) -> None:
    try:
        made = encoded(b"", key=name)
    except InvalidMessage:
        return
    assert made.key == name
    assert len(name) <= 255
    assert name.encode().decode() == name
    assert 0 <= made.lane < LANES


@given(st.dictionaries(st.text(min_size=1), st.text()))
def test_any_headers_come_back_or_are_refused(headers: dict[str, str]) -> None:
    try:
        made = encoded(b"", headers=headers)
    except InvalidMessage:
        return
    assert json.loads(made.headers or "{}") == headers


def test_the_wire_names_what_the_reader_needs() -> None:
    stored = Message(
        lane=3, position=9, id="i", topic="t", key="k", type="x", aggregate_type="order",
        aggregate_id="7", content_type="text/plain", headers_json='{"mine":"1"}', payload=b"",
        size=0, redrives=2, created_us=1_000_001, expired=0, held=0, attempts=1, history=None,
    )  # fmt: skip
    headers = wire_headers(stored, source="shop", epoch=4)
    assert headers["mine"] == "1"
    assert (headers["event_id"], headers["event_type"]) == ("i", "x")
    assert (headers["aggregate_type"], headers["aggregate_id"]) == ("order", "7")
    assert headers["ce-time"] == "1970-01-01T00:00:01.000001+00:00"
    assert headers["ce-partitionkey"] == "k"
    assert stored.broker_id == "i:r2"
    assert stored.order == ("t", "k")
    assert stored._replace(key=None).order != stored._replace(key=None, id="j").order
