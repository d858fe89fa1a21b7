"""The command inside the test's own process, in an empty directory and without settings."""

import os
from pathlib import Path

import pytest
from commands import Here


@pytest.fixture
def here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Here:
    for name in [name for name in os.environ if name.startswith("POSTROOM_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return Here(monkeypatch, capsys)
