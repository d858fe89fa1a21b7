"""The pytest plugin, loaded by its entry point: the fixtures `mailroom` and `postroom_url`.

Importing it imports no more of Postroom, since every run of pytest in the environment does so.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from postroom.testing.mailroom import Mailroom

__all__ = ["mailroom", "postroom_url", "pytest_runtest_call"]


@pytest.fixture
def postroom_url() -> str:
    """The database of the tests. Define a fixture of this name to give another."""
    url = os.environ.get("POSTROOM_DATABASE_URL")
    if not url:
        pytest.fail(
            "mailroom needs a database here: define a fixture `postroom_url` in conftest.py that "
            "returns its URL, or set POSTROOM_DATABASE_URL.",
            pytrace=False,
        )
    return url


@pytest.fixture
def mailroom(request: pytest.FixtureRequest) -> Mailroom:
    """What was published, what arrives, and time that passes: see docs/testing.md."""
    from postroom.testing.mailroom import Mailroom

    return Mailroom(lambda: str(request.getfixturevalue("postroom_url")))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """From here on, messages are the test's own. Who has not loaded `looking` does not ask."""
    if (looking := sys.modules.get("postroom.testing.looking")) is not None:
        looking.begin_test()
    return (yield)
