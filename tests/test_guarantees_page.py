"""docs/guarantees.md tells the truth: every test it names exists, and no promise is without one."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from planted import BUGS

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
# Of our catalogue of failures, those that must hold before anyone uses Postroom.
MUST_HOLD = {
    "F01", "F02", "F03", "F04", "F05", "F06", "F13", "F15", "F18",
    "F24", "F25", "F26", "F27", "F28", "F29", "F30", "F31", "F35",
    *(f"F{number}" for number in range(46, 68)),  # brokers, consumers, idempotency keys
}  # fmt: skip
# A failure may have a row in several tables, and all of them count.
ROWS: list[tuple[str, str]] = re.findall(r"^\| (F\d\d) \|.*\| ([^|]+) \|$", PAGE, re.MULTILINE)
TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


@cache
def functions_in(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in tree.body if isinstance(node, functions)}


def test_what_must_hold_has_a_test() -> None:
    assert {number for number, tests in ROWS if TEST.search(tests)} >= MUST_HOLD


@pytest.mark.parametrize(("number", "tests"), ROWS, ids=[number for number, _ in ROWS])
def test_the_tests_of_a_row_exist(number: str, tests: str) -> None:
    named = TEST.findall(tests)
    # Nothing but tests stands there: one that is misspelt would not be seen.
    assert TEST.sub("", tests).strip(", ") == ""
    assert [f"{file}::{test}" for file, test in named if test not in functions_in(file)] == []


def test_planted_bugs_are_explained() -> None:
    explained = re.findall(r"^\| `(\w+)` \| ([^|]+) \|$", PAGE, re.MULTILINE)
    assert dict(explained) == {name: bug.breaks for name, bug in BUGS.items()}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_names_tests_that_exist(bug: str) -> None:
    named = [test.partition("[")[0].partition("::") for test in BUGS[bug].red]
    assert named
    assert [test for file, _, test in named if test not in functions_in(file)] == []
