"""The fingerprint of a call of `@idempotent`: models as arguments, and members in `compare`."""

import dataclasses
import datetime as dt
import enum
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pydantic
import pytest

from postroom.errors import BadKey, ConfigurationError, KeyReused
from postroom.idempotency import SHARED, Keys, idempotent
from postroom.idempotency.arguments import fingerprint_of
from stages import Stages

NOON = dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC)
VIENNA = dt.timezone(dt.timedelta(hours=1))


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass
class Line:
    sku: str
    count: Any = 1


@dataclasses.dataclass
class Order:
    id: Any
    total: Any = Decimal("9.90")
    lines: Any = ()
    at: Any = NOON
    received: Any = dataclasses.field(default=0, compare=False)


@dataclasses.dataclass
class Refund:
    id: Any
    total: Any = Decimal("9.90")
    lines: Any = ()
    at: Any = NOON


class Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    id: Any
    lines: Any = ()
    hidden: Any = pydantic.Field(default=0, exclude=True)


class Struct(msgspec.Struct):
    id: Any
    lines: Any = ()
    note: str | msgspec.UnsetType | None = msgspec.UNSET


@pytest.fixture
def keys(stages: Stages) -> Iterator[Keys]:
    keys = Keys(stages["sqlite"].url, scope=SHARED)
    yield keys
    keys.close()


@pytest.mark.parametrize("kind", [Order, Model, Struct])
def test_a_model_is_compared_by_its_members(keys: Keys, kind: type[Any]) -> None:
    runs: list[Any] = []

    @idempotent("place", key="key", keys=keys)
    def place(key: str, order: Any) -> int:
        runs.append(order)
        return len(runs)

    assert place("k", kind(id=1, lines=[Line("a")])) == 1
    assert place("k", kind(id=1, lines=[Line("a")])) == 1
    refund = Refund(id=1, lines=[Line("a")])
    others = [kind(id=2, lines=[Line("a")]), kind(id=1, lines=[Line("b")]), refund, {"id": 1}, None]
    for other in others:
        with pytest.raises(KeyReused):
            place("k", other)
    assert len(runs) == 1


@pytest.mark.parametrize("kind", [Order, Model, Struct])
def test_compare_key_and_scope_name_members(keys: Keys, kind: type[Any]) -> None:
    @idempotent("place", key="order.id", keys=keys, scope="who.name", compare=["order.lines"])
    def place(order: Any, who: Any) -> str:
        return f"{order.id} {who['name']}"

    ada, eve = {"name": "ada", "age": 1}, {"name": "eve"}
    assert place(kind(id="1", lines=[1]), ada) == "1 ada"
    assert place(kind(id="1", lines=[1]), {**ada, "age": 2}) == "1 ada"
    assert place(kind(id="1", lines=[2]), eve) == "1 eve"
    with pytest.raises(KeyReused):
        place(kind(id="1", lines=[2]), ada)
    with pytest.raises(BadKey):
        place(None, ada)


def test_members_that_do_not_exist(keys: Keys) -> None:
    with pytest.raises(ConfigurationError, match=r"no argument 'order'"):
        idempotent("x", key="k", keys=keys, compare=["order.id"])(lambda k: None)
    with pytest.raises(ConfigurationError, match=r"no argument 'k\.session'"):
        idempotent("x", key="k", tx="k.session")(lambda k: None)
    misspelled = idempotent("x", key="k", keys=keys, compare=["order.lines", "order.idd"])
    for order in (Order(1), {"id": 1, "lines": []}):
        with pytest.raises(ConfigurationError, match=r"x names order\.idd, but .* 'idd'"):
            misspelled(lambda k, order: None)("1", order)
    optional = idempotent("y", key="k", keys=keys, compare=["order.id"])
    assert optional(lambda k, order: "done")("1", None) == "done"


SAME: list[tuple[Any, Any]] = [
    (Order(1, received=1), Order(1, received=2)),
    (Order(1), Order(1.0)),
    (Order(1, Decimal("9.9")), Order(1, Decimal("9.90"))),
    (Order(1, at=NOON), Order(1, at=NOON.astimezone(VIENNA))),
    (Order(1, lines={"b", "a"}), Order(1, lines={"a", "b"})),
    (Order(1, lines={"a": 1, "b": 2}), Order(1, lines={"b": 2, "a": 1})),
    (Order(1, lines={1: "a", 2: "b"}), Order(1, lines={2: "b", 1: "a"})),
    (Order(1, lines=(1, 2)), Order(1, lines=[1, 2])),
    (Order(float("inf")), Order(Decimal("Infinity"))),
    (Order(Decimal("1E+400")), Order(Decimal("10E+399"))),
    (Order(dt.datetime.max.replace(tzinfo=VIENNA)), Order(dt.datetime.max.replace(tzinfo=VIENNA))),
    (Struct(1), Struct(1, note=msgspec.UNSET)),
]
OTHER: list[tuple[Any, Any]] = [
    (Order(1), Refund(1)),
    (Order(1), {"id": 1}),
    (Order(1), Order("1")),
    (Order(1), Order(True)),
    (Order(None), Order("null")),
    (Order(1, Decimal("9.9")), Order(1, "9.9")),
    (Order(1, at=NOON), Order(1, at=NOON.replace(tzinfo=None))),
    (Order(1, at=NOON), Order(1, at="2026-01-01T12:00:00+00:00")),
    (Order(1, at=NOON.date()), Order(1, at=str(NOON.date()))),
    (Order(UUID(int=1)), Order(str(UUID(int=1)))),
    (Order(Color.RED), Order(Color.BLUE)),
    (Order(Color.RED), Order("red")),
    (Order(b"a"), Order("a")),
    (Order(dt.timedelta(1)), Order(dt.timedelta(2))),
    (Order(1, lines=[1, 2]), Order(1, lines=[2, 1])),
    (Order(1, lines=[1, 2]), Order(1, lines={1, 2})),
    (Order(1, lines=[[1], 2]), Order(1, lines=[[1, 2]])),
    (Order(1, lines={1: "a"}), Order(1, lines={"1": "a"})),
    (Order(1, lines=[]), Order(1, lines={})),
    (Struct(1), Struct(1, note=None)),
    (Model(id=1), Model(id=1, extra=1)),
    (Model(id=1), Model(id=1, hidden=1)),
]


def digest(value: Any) -> str:
    return fingerprint_of({"order": value}, "place")


@pytest.mark.parametrize(("one", "two"), SAME)
def test_equal_values_have_equal_fingerprints(one: Any, two: Any) -> None:
    assert digest(one) == digest(two)


@pytest.mark.parametrize(("one", "two"), OTHER)
def test_other_values_have_other_fingerprints(one: Any, two: Any) -> None:
    assert digest(one) != digest(two)


def test_plain_arguments_keep_the_fingerprint_of_stored_records() -> None:
    given = {"b": [1, 2.50, None], "a": UUID(int=1), "at": dt.datetime(2026, 1, 1)}
    text = (
        '{"a": "00000000-0000-0000-0000-000000000001", "at": "2026-01-01 00:00:00", '
        '"b": [1, 2.5, null]}'
    )
    assert fingerprint_of(given, "place") == hashlib.sha256(text.encode()).hexdigest()


def test_a_fingerprint_is_the_same_in_every_process() -> None:
    """The order of a set of text depends on the hash seed of the process."""
    script = (
        "from test_arguments import Model, digest\n"
        "print(digest(Model(id=1, lines={'a', 'b', 'c', 'd', 'e'})))"
    )
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), *sys.path])
    found = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert found == {digest(Model(id=1, lines=set("abcde"))) + "\n"}


def test_values_that_cannot_be_compared_are_named() -> None:
    secret = Model(id=1, lines=[Line("a", pydantic.SecretStr("s"))])
    with pytest.raises(
        ConfigurationError, match=r"order\.lines\[0\]\.count, .* a SecretStr: .*comp"
    ):
        digest(secret)
    looped = Order(1)
    looped.lines = [looped]
    with pytest.raises(ConfigurationError, match="place has arguments that hold themselves"):
        digest(looped)
    with pytest.raises(ConfigurationError, match="order, which is a type: "):
        digest(Order)
