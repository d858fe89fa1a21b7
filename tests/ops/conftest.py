"""The command inside the test's own process, in an empty directory and without settings."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from commands import Here
from house_tools import House


@pytest.fixture
def here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Here:
    for name in [name for name in os.environ if name.startswith("POSTROOM_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return Here(monkeypatch, capsys)


@pytest.fixture
def house(database_url: str) -> Iterator[House]:
    """A database with the tables installed; the test runs once on each kind."""
    house = House(database_url)
    # In a thread of its own: the test may be running a loop.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(house.install).result()
    yield house
    house.close()
