"""`scripts/second-look`: what fails alone is red, and a proof has one chance."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "second-look"
BROKEN = "def test_it():\n    assert False\n"
SHAKY = """
from pathlib import Path

def test_it():
    mark = Path(__file__ + ".ran")
    again = mark.exists()
    mark.touch()
    assert again
"""


def run(place: Path, tests: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    """A run of these tests and the second look after it."""
    (place / "pytest.ini").write_text("[pytest]\n")
    for name, text in tests.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    plain = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    command = [sys.executable, "-m", "pytest", *options]
    first = subprocess.run(command, cwd=place, env=plain, check=False)
    return subprocess.run(
        [sys.executable, SCRIPT, str(first.returncode)],
        cwd=place,
        env=plain,
        check=False,
        capture_output=True,
        text=True,
    )


def test_green_alone_is_a_warning(tmp_path: Path) -> None:
    done = run(tmp_path, {"tests/test_a.py": SHAKY, "tests/test_b.py": "def test_b(): pass\n"})
    assert done.returncode == 0
    assert "1 passed" in done.stdout
    assert "SHAKY" in done.stdout
    assert "tests/test_a.py::test_it" in done.stdout.splitlines()[-1]


def test_red_alone_is_red(tmp_path: Path) -> None:
    done = run(tmp_path, {"tests/test_a.py": SHAKY, "tests/test_b.py": BROKEN})
    assert done.returncode == 1
    assert "1 failed, 1 passed" in done.stdout


@pytest.mark.parametrize(
    ("tests", "options", "why"),
    [
        ({"tests/guarantees/test_a.py": SHAKY}, (), "a proof failed"),
        ({"tests/simulation/test_a.py": SHAKY}, (), "a proof failed"),
        ({"tests/test_planted.py": SHAKY}, (), "a proof failed"),
        ({f"tests/test_{n}.py": SHAKY for n in range(4)}, (), "4 tests failed, more than 3"),
        ({"tests/test_a.py": SHAKY}, ("--no-such-option",), "pytest ended with status 4"),
        (
            {"tests/a/test_a.py": SHAKY, "tests/b/test_a.py": SHAKY},
            ("--continue-on-collection-errors",),
            "tests/b/test_a.py could not be collected",
        ),
    ],
)
def test_no_second_look(
    tmp_path: Path, tests: dict[str, str], options: tuple[str, ...], why: str
) -> None:
    done = run(tmp_path, tests, *options)
    assert done.returncode != 0
    assert f"No second look: {why}" in done.stdout
