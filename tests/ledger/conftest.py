"""The relay's tools serve here too, on databases that are emptied instead of made anew."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "outbox"))

from relaying import Post, watch_post

from stages import Stages


@pytest.fixture(params=["postgresql", "mariadb", "sqlite"])
def post(request: pytest.FixtureRequest, stages: Stages) -> Iterator[Post]:
    """The test runs once on each database."""
    stage = stages[request.param]
    for change in (
        "DELETE FROM {p}meta WHERE name = 'routes'",
        "DELETE FROM {p}lane_batch",
        "DELETE FROM {p}worker",
        "UPDATE {p}lane SET owner = NULL, lease_until = NULL",
    ):
        stage.query(change)
    yield from watch_post(stage.url)
