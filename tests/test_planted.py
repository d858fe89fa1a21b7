"""Each bug of `planted` turns the suite red: the tests that guard against it fail, by assertion.

The same tests run without the bug in their own files, and pass there.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from planted import BUGS
from planted import bugs as functions
from servers import MariaDBServer, PostgresServer

ROOT = Path(__file__).parent.parent
RUNNER = ROOT / "tests" / "planted" / "runner.py"
# Of a promise that was not kept. Anything else, such as a bug that cannot be planted, is no proof.
ASSERTION = re.compile("AssertionError|assert |Failed: DID NOT RAISE")

Answers = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def answers(
    request: pytest.FixtureRequest, postgres: PostgresServer, mariadb: MariaDBServer
) -> Iterator[Answers]:
    """Starts the runs of all bugs that were asked for, some at a time; gives each when it is over.

    They use the servers of this process, and a database each.
    """
    chosen = [
        item.callspec.params["bug"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.function is test_the_suite_turns_red
    ]
    environment = os.environ | {
        "POSTROOM_TEST_POSTGRES_URL": postgres.url,
        "POSTROOM_TEST_MARIADB_URL": mariadb.url,
    }
    with subprocess.Popen(
        [sys.executable, str(RUNNER)],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as runner:
        assert runner.stdin is not None
        assert runner.stdout is not None
        json.dump({bug: BUGS[bug].red for bug in chosen}, runner.stdin)
        runner.stdin.close()
        known: dict[str, dict[str, Any]] = {}

        def answer(bug: str) -> dict[str, Any]:
            while bug not in known:
                one = json.loads(runner.stdout.readline())
                known[one["bug"]] = one
            return known[bug]

        yield answer
        runner.terminate()


@pytest.mark.parametrize("bug", BUGS)
def test_the_suite_turns_red(bug: str, answers: Answers) -> None:
    answer = answers(bug)
    assert answer["code"] == pytest.ExitCode.TESTS_FAILED, answer["log"]
    assert not answer["broken"], answer["log"]
    assert sorted(answer["failed"]) == sorted(BUGS[bug].red), answer["log"]
    for test, message in answer["failed"].items():
        assert ASSERTION.match(message), f"{test}: {message}"


def test_every_bug_has_its_function() -> None:
    assert [name for name in BUGS if not callable(getattr(functions, name, None))] == []
