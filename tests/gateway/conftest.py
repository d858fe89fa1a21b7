"""A gateway over real HTTP, on each kind of database, and an exchange beside it."""

from collections.abc import Iterator

import pytest
from gateway_tools import House, make_house

from stages import Stages


@pytest.fixture(params=["postgresql", "mariadb", "sqlite"])
def house(
    request: pytest.FixtureRequest,
    stages: Stages,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[House]:
    """The test runs once on each kind of database."""
    yield from make_house(stages[request.param], tmp_path_factory.mktemp("house"), monkeypatch)


@pytest.fixture
def sqlite_house(
    stages: Stages, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[House]:
    """For what has nothing to do with the kind of database."""
    yield from make_house(stages["sqlite"], tmp_path_factory.mktemp("house"), monkeypatch)
