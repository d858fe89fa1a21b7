"""A house of each kind for every test of consumers."""

from collections.abc import Iterator

import pytest
from consuming import House, make_house

from postroom.brokers import memory_receiving
from stages import Stages


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drain ends when the broker has had nothing for so long."""
    monkeypatch.setattr(memory_receiving, "TAKE_SECONDS", 0.2)


@pytest.fixture(params=["postgresql", "mariadb", "sqlite"])
def house(request: pytest.FixtureRequest, stages: Stages) -> Iterator[House]:
    """The test runs once on each kind of database."""
    yield from make_house(stages[request.param])
