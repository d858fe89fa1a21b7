"""`--help`: a flag looks like a flag, and a command names the extra it needs."""

import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from commands import Here

from postroom.ops.cli import command


def commands(found: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield words
    for name, inner in getattr(found, "commands", {}).items():
        yield from commands(inner, (*words, name))


def test_no_flag_of_any_command_asks_for_a_value(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERMINAL_WIDTH", "200")
    listed = list(commands(command()))
    assert len(listed) > 40
    for words in listed:
        done = here(*words, "--help")
        assert done.returncode == 0
        assert "--help" in done.stdout
        assert re.findall(r"<bool>|BOOLEAN|--(?:json|help) +<?\w*bool\w*>?", done.stdout) == [], (
            words
        )


def test_the_gateway_names_its_extra(here: Here) -> None:
    assert "pip install 'postroom[gateway]'" in " ".join(here("gateway", "--help").stdout.split())


def test_help_imports_no_database_library() -> None:
    code = (
        "import sys; from postroom.ops.cli import command; command();"
        "print([name for name in sys.modules if name in ('sqlalchemy', 'asyncpg', 'psycopg')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
