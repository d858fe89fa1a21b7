"""A stage of each kind for every test of keys."""

import pytest

from stages import Stage, Stages


@pytest.fixture(params=["postgresql", "mariadb", "sqlite"])
def stage(request: pytest.FixtureRequest, stages: Stages) -> Stage:
    """The test runs once on each kind of database."""
    return stages[request.param]
