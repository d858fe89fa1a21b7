"""What was encoded is decoded to an equal object; what does not fit is refused."""

import dataclasses
import datetime as dt
import decimal
import enum
import uuid
from typing import Any, Literal

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.errors import InvalidMessage
from postroom.inbox.decoding import decode, plain
from postroom.payloads import encode_payload


class Colour(enum.Enum):
    red = "red"
    blue = 7


@dataclasses.dataclass
class Item:
    name: str
    price: decimal.Decimal


@dataclasses.dataclass
class Everything:
    id: uuid.UUID
    at: dt.datetime
    day: dt.date
    hour: dt.time
    colour: Colour
    items: list[Item]
    by_number: dict[int, str]
    pair: tuple[int, str]
    many: tuple[int, ...]
    tags: frozenset[str]
    ratio: float
    maybe: int | None
    either: int | str
    kind: Literal["a", "b"]
    anything: Any
    count: int = 3
    more: list[str] = dataclasses.field(default_factory=list)


ITEMS = st.builds(Item, st.text(max_size=5), st.decimals(allow_nan=False, allow_infinity=False))
EVERYTHING = st.builds(
    Everything,
    id=st.uuids(),
    at=st.datetimes(timezones=st.just(dt.UTC)),
    day=st.dates(),
    hour=st.times(),
    colour=st.sampled_from(Colour),
    items=st.lists(ITEMS, max_size=3),
    by_number=st.dictionaries(st.integers(), st.text(max_size=5), max_size=3),
    pair=st.tuples(st.integers(), st.text(max_size=5)),
    many=st.lists(st.integers(), max_size=3).map(tuple),
    tags=st.just(frozenset()),
    ratio=st.floats(allow_nan=False, allow_infinity=False),
    maybe=st.none() | st.integers(),
    either=st.integers() | st.text(max_size=5),
    kind=st.sampled_from(["a", "b"]),
    anything=st.none() | st.integers() | st.lists(st.text(max_size=3), max_size=2),
)


@given(EVERYTHING)
def test_a_dataclass_comes_back_as_it_was(thing: Everything) -> None:
    sent = dataclasses.asdict(thing) | {"tags": sorted(thing.tags), "items": thing.items}
    payload, content_type = encode_payload(sent, None)
    assert decode(Everything, plain(payload, content_type)) == thing


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"name": 1, "price": "2"}, "Item.name is not str"),
        ({"name": "a"}, "Item lacks price"),
        ({"name": "a", "price": "canary"}, "Item.price is not Decimal"),
        ([], "Item is not an object for Item"),
        (None, "Item is not an object for Item"),
    ],
)
def test_what_does_not_fit_is_named_without_its_content(value: Any, said: str) -> None:
    with pytest.raises(InvalidMessage, match=said) as caught:
        decode(Item, value)
    assert "canary" not in str(caught.value)


def test_unknown_fields_are_passed_over() -> None:
    assert decode(Item, {"name": "a", "price": "1", "new": 1}) == Item("a", decimal.Decimal(1))


class Model(pydantic.BaseModel):
    id: uuid.UUID
    n: int


class Struct(msgspec.Struct):
    id: uuid.UUID
    n: int


@pytest.mark.parametrize("cls", [Model, Struct])
def test_models_of_libraries(cls: Any) -> None:
    id = uuid.uuid4()
    made = cls(id=id, n=1)
    payload, content_type = encode_payload(made, None)
    assert decode(cls, plain(payload, content_type)) == made
    with pytest.raises(InvalidMessage, match=cls.__name__) as caught:
        decode(cls, {"id": "canary", "n": 1})
    assert "canary" not in str(caught.value)


def test_content_types() -> None:
    assert plain(b"[1]", "application/json") == [1]
    assert plain(b"[1]", "application/cloudevents+json; charset=utf-8") == [1]
    assert plain(b"[1]", "text/plain") == b"[1]"
    with pytest.raises(InvalidMessage, match="JSON"):
        plain(b"[" * 100_000, "application/json")


@dataclasses.dataclass
class Picky:
    amount: float | None = None
    wide: float | str = ""
    counts: dict[int, int] = dataclasses.field(default_factory=dict)
    tags: frozenset[Any] = frozenset()
    colour: Colour = Colour.red
    error: str = ""

    def __post_init__(self) -> None:
        if self.error:
            raise {"key": KeyError, "system": OSError, "depth": RecursionError}[self.error]("why")


@pytest.mark.parametrize(
    "value",
    [
        {"amount": 10**400},
        {"wide": 10**400},
        {"counts": {"canary": 1}},
        {"tags": [{"canary": 1}]},
        {"colour": ["canary"]},
        *({"error": each} for each in ("key", "system", "depth")),
    ],
    ids=lambda value: str(value)[:24],
)
def test_whatever_goes_wrong_the_payload_does_not_fit(value: Any) -> None:
    with pytest.raises(InvalidMessage, match="Picky") as caught:
        decode(Picky, value)
    assert "canary" not in str(caught.value)
