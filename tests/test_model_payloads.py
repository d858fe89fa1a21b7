"""Payloads of pydantic models and msgspec structs: a naive datetime is refused wherever it stands,
and the bytes of every other model are the library's own JSON form."""

import dataclasses
import datetime as dt
import decimal
import enum
import json
import pathlib
import uuid
from typing import Any

import msgspec
import pydantic
import pytest

from postroom import Draft
from postroom.errors import InvalidMessage
from postroom.messages import encode

NAIVE = dt.datetime(2026, 11, 18, 1, 23, 51, 749319)
UTC = NAIVE.replace(tzinfo=dt.UTC)
EAST = UTC.astimezone(dt.timezone(dt.timedelta(hours=5, minutes=45)))


def payload_of(model: object) -> bytes:
    return encode(Draft(payload=model, type="t")).payload


@dataclasses.dataclass
class Stamp:
    at: dt.datetime


class Line(pydantic.BaseModel):
    at: dt.datetime


class Anything(pydantic.BaseModel):
    value: Any


class Lines(pydantic.RootModel[list[Line]]):
    pass


class Item(msgspec.Struct):
    at: dt.datetime


class Thing(msgspec.Struct):
    value: Any


class Pair(msgspec.Struct, array_like=True, tag=True):
    name: str
    at: dt.datetime


NAIVE_MODELS: dict[str, object] = {
    "pydantic": Line(at=NAIVE),
    "pydantic any": Anything(value=NAIVE),
    "pydantic nested": Anything(value=[1, {"a": (Line(at=NAIVE),)}]),
    "pydantic dataclass": Anything(value=Stamp(NAIVE)),
    "pydantic dict key": Anything(value={NAIVE: 1}),
    "pydantic set": Anything(value={NAIVE, *(UTC + dt.timedelta(n) for n in range(9))}),
    "pydantic set of tuples": Anything(value={(n, NAIVE) for n in range(9)}),
    "pydantic root": Lines([Line(at=UTC), Line(at=NAIVE)]),
    "msgspec": Item(NAIVE),
    "msgspec any": Thing(NAIVE),
    "msgspec nested": Thing([1, {"a": (Item(NAIVE),)}]),
    "msgspec dataclass": Thing({"a": Stamp(NAIVE)}),
    "msgspec dict key": Thing({NAIVE: 1}),
    "msgspec array": Pair("a", NAIVE),
}


@pytest.mark.parametrize("model", NAIVE_MODELS.values(), ids=NAIVE_MODELS)
def test_a_naive_datetime_is_refused(model: object) -> None:
    with pytest.raises(InvalidMessage, match=r"naive datetime .* give it a time zone"):
        payload_of(model)


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Address(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(serialize_by_alias=True)

    zip_code: str = pydantic.Field(serialization_alias="zipCode")


class Order(pydantic.BaseModel):
    """One field of each kind whose JSON form differs from its Python form."""

    id: uuid.UUID
    total: decimal.Decimal
    at: dt.datetime
    east: dt.datetime
    day: dt.date
    time: dt.time
    lasts: dt.timedelta
    colour: Colour
    level: Level
    secret: pydantic.SecretStr
    raw: bytes
    tags: frozenset[int]
    pair: tuple[int, str]
    path: pathlib.PurePosixPath
    address: Address
    by_level: dict[Level, dt.datetime]
    hidden: str = pydantic.Field(default="x", exclude=True)
    url: pydantic.HttpUrl = pydantic.HttpUrl("https://a.example/")
    # Naive inside the process; their own serializers write an unambiguous form.
    local: dt.datetime = NAIVE
    opened: dt.datetime = NAIVE
    closed: dt.datetime = NAIVE

    @pydantic.field_serializer("local")
    def local_as_utc(self, value: dt.datetime) -> str:
        return value.isoformat() + "Z"

    @pydantic.field_serializer("opened", when_used="json")
    def opened_as_utc(self, value: dt.datetime) -> str:
        return value.isoformat() + "Z"

    @pydantic.field_serializer("closed", when_used="json")
    def closed_as_number(self, value: dt.datetime) -> int:
        return int(value.replace(tzinfo=dt.UTC).timestamp())

    @pydantic.computed_field  # type: ignore[prop-decorator]
    @property
    def doubled(self) -> decimal.Decimal:
        return self.total * 2


def test_the_bytes_of_a_pydantic_model_are_its_json_form() -> None:
    order = Order(
        id=uuid.UUID(int=5),
        total=decimal.Decimal("1.10"),
        at=UTC,
        east=EAST,
        day=UTC.date(),
        time=UTC.time(),
        lasts=dt.timedelta(days=1, seconds=2),
        colour=Colour.RED,
        level=Level.HIGH,
        secret=pydantic.SecretStr("s3cret"),
        raw=b"raw",
        tags=frozenset({3}),
        pair=(1, "é"),
        path=pathlib.PurePosixPath("/a/b"),
        address=Address(zip_code="8000"),
        by_level={Level.HIGH: UTC},
    )
    assert payload_of(order).decode() == (
        '{"id":"00000000-0000-0000-0000-000000000005","total":"1.10",'
        '"at":"2026-11-18T01:23:51.749319Z","east":"2026-11-18T07:08:51.749319+05:45",'
        '"day":"2026-11-18","time":"01:23:51.749319","lasts":"P1DT2S","colour":"red","level":3,'
        '"secret":"**********","raw":"raw","tags":[3],"pair":[1,"é"],"path":"/a/b",'
        '"address":{"zipCode":"8000"},"by_level":{"3":"2026-11-18T01:23:51.749319Z"},'
        '"url":"https://a.example/","local":"2026-11-18T01:23:51.749319Z",'
        '"opened":"2026-11-18T01:23:51.749319Z","closed":1794965031,"doubled":"2.20"}'
    )
    assert json.loads(payload_of(order)) == json.loads(order.model_dump_json())


@pytest.mark.filterwarnings("ignore:`json_encoders` is deprecated")
def test_json_encoders_of_a_model_are_used() -> None:
    class Seconds(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(
            json_encoders={dt.datetime: lambda at: int(at.replace(tzinfo=dt.UTC).timestamp())}
        )

        at: dt.datetime

    assert payload_of(Seconds(at=NAIVE)) == b'{"at":1794965031}'


def test_models_inside_other_payloads_have_the_same_form() -> None:
    inside = {"line": Line(at=UTC), "items": [Item(UTC)]}
    assert payload_of(inside) == (
        b'{"line":{"at":"2026-11-18T01:23:51.749319Z"},'
        b'"items":[{"at":"2026-11-18T01:23:51.749319Z"}]}'
    )
    for naive in (Line(at=NAIVE), Item(NAIVE)):
        with pytest.raises(InvalidMessage, match="naive datetime"):
            payload_of({"inside": [naive]})


def test_the_bytes_of_a_msgspec_struct_are_its_json_form() -> None:
    class Parcel(msgspec.Struct, rename="camel", tag="parcel", omit_defaults=True):
        order_id: uuid.UUID
        total: decimal.Decimal
        sent_at: dt.datetime
        lasts: dt.timedelta
        colour: Colour
        raw: bytes
        pairs: list[Pair]
        tags: set[int]
        at: dt.datetime = EAST

    parcel = Parcel(
        uuid.UUID(int=5),
        decimal.Decimal("1.10"),
        UTC,
        dt.timedelta(days=1, seconds=2),
        Colour.RED,
        b"raw",
        [Pair("é", UTC)],
        {3},
    )
    assert payload_of(parcel).decode() == (
        '{"type":"parcel","orderId":"00000000-0000-0000-0000-000000000005","total":"1.10",'
        '"sentAt":"2026-11-18T01:23:51.749319Z","lasts":"P1DT2S","colour":"red","raw":"cmF3",'
        '"pairs":[["Pair","é","2026-11-18T01:23:51.749319Z"]],"tags":[3]}'
    )
    assert json.loads(payload_of(parcel)) == json.loads(msgspec.json.encode(parcel))


def test_a_model_without_a_json_form_is_refused() -> None:
    with pytest.raises(InvalidMessage):
        payload_of(Anything(value=object()))
    with pytest.raises(InvalidMessage):
        payload_of(Thing(object()))
