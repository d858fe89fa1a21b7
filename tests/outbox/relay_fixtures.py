"""The fixtures of the relay's tests; a plugin, so that a test names only what it uses."""

import uuid
from collections.abc import Iterator

import pytest
from relaying import Post, make_post

from servers import PostgresServer


@pytest.fixture
def post(database_url: str) -> Iterator[Post]:
    """The test runs once on each database."""
    yield from make_post(database_url)


@pytest.fixture
def postgres15_post(postgres15: PostgresServer) -> Iterator[Post]:
    name = f"test_{uuid.uuid4().hex[:12]}"
    yield from make_post(postgres15.create_database(name))
    postgres15.drop_database(name)
