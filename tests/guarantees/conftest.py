"""Worlds to break: a database, relays and writers in processes of their own, their records."""

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from nursery import Nursery
from tables import Tables
from worlds import KINDS, World


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with Nursery(tmp_path_factory.mktemp("nursery")) as made:
        yield made


@pytest.fixture
def new_world(
    request: pytest.FixtureRequest, nursery: Nursery, tmp_path: Path
) -> Iterator[Callable[[str], World]]:
    """Makes worlds on databases of a kind, each a fresh one."""
    made: list[World] = []
    clean_up: list[Callable[[], None]] = []

    def make(kind: str) -> World:
        folder = tmp_path / f"world-{len(made)}"
        folder.mkdir()
        url = f"sqlite:///{folder / 'postroom.db'}"
        if kind != "sqlite":
            server = request.getfixturevalue(KINDS[kind])
            name = f"world_{uuid.uuid4().hex[:12]}"
            url = server.create_database(name)
            clean_up.append(lambda: server.drop_database(name))
        tables = Tables(url)
        tables.install()
        made.append(World(nursery, tables, folder))
        return made[-1]

    yield make
    for world in made:
        world.close()
    for step in clean_up:
        step()


@pytest.fixture(params=list(KINDS))
def world(request: pytest.FixtureRequest, new_world: Callable[[str], World]) -> World:
    """The test runs once on each kind of database."""
    return new_world(request.param)


@pytest.fixture
def seed() -> str:
    """The seed of all dice of a run; printed, so that a failure can be had again."""
    chosen = os.environ.get("POSTROOM_SEED") or uuid.uuid4().hex[:8]
    print(f"POSTROOM_SEED={chosen}")
    return chosen
