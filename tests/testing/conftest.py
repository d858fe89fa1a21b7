"""Fixtures of the tests of `postroom.testing`."""

from collections.abc import Iterator

import pytest

from stages import Stages


@pytest.fixture(scope="module")
def stages(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stages]:
    stages = Stages(request, tmp_path_factory.mktemp("stages"))
    yield stages
    stages.close()
