"""`postroom gateway --simulate` ends well: with nothing at hand but the command."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from postroom.errors import ConfigurationError
from postroom.gateway import tokens_from
from postroom.gateway.exchange import Manners


def test_the_books_agree_in_the_end(tmp_path: Path) -> None:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("POSTROOM_")}
    done = subprocess.run(
        [sys.executable, "-m", "postroom.ops.cli", "gateway", "--simulate", "--orders", "30"],
        cwd=tmp_path,
        env=clean | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for line in (
        "✓ every order was accepted once",
        "✓ no order is in the exchange's book twice",
        "✓ what the ledger calls succeeded is in its book",
        "✓ clients always got a true answer",
    ):
        assert line in done.stdout, done.stdout
    assert "deaths: exchange" in done.stdout


def test_manners_are_spelled_as_they_are_read() -> None:
    manners = Manners(latency_seconds=0.5, rejects=0.1, refuses_copies=False, seed=7)
    assert Manners.parse(manners.spelled()) == manners
    assert Manners.parse("") == Manners()
    with pytest.raises(ConfigurationError, match="must be a number"):
        Manners.parse("rejects=often")


def test_tokens_are_read_and_never_shown() -> None:
    assert tokens_from("ada=s3cr3t bob=x=y") == {"ada": "s3cr3t", "bob": "x=y"}
    assert tokens_from(None) == {}
    with pytest.raises(ConfigurationError) as error:
        tokens_from("ada=ok canary")
    assert "canary" not in str(error.value)
