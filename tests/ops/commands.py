"""The `postroom` command, run as people run it, and inside this process where that is enough."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from postroom.ops.cli import main

COMMAND = Path(sysconfig.get_path("scripts")) / "postroom"


def postroom(*arguments: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the command in an empty directory, with no settings but those given."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("POSTROOM_")}
    return subprocess.run(
        [COMMAND, *arguments],
        cwd=cwd,
        env={**clean, **environ},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


class Here:
    """The same command inside this process: quicker, since nothing is imported again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._patch, self._capsys = monkeypatch, capsys

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        self._patch.setattr(sys, "argv", ["postroom", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        code = end.value.code
        assert isinstance(code, int)
        out, err = self._capsys.readouterr()
        return subprocess.CompletedProcess(sys.argv, code, out, err)
