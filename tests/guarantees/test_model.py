"""The models of `models/`: searched through to the end, and each broken variant must be found."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from servers import leave_out

MODELS = Path(__file__).parents[2] / "models"
DEPTH = 100_000
MOST_MEGABYTES = 600

BROKEN = [
    ("lanes", "NO_FENCE"),
    ("lanes", "NO_FENCE OUTCOMES"),
    ("lanes", "TWO_STEPS"),
    ("lanes", "TWO_STEPS OUTCOMES"),
    ("lanes", "SETTLE_FIRST"),
    ("lanes", "NOT_HELD"),
    ("watermark", "LAST_READ"),
    ("watermark", "NO_SECOND_READ"),
]


def search(model: str, folder: Path, *switches: str) -> str:
    """Everything Spin's verifier says after it has searched the whole model."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if shutil.which("spin") is None or compiler is None:
        leave_out("the models need spin and a C compiler: apt-get install spin gcc")
    defined = [f"-D{switch}" for switch in switches]
    text = _run("spin", *defined, "-a", str(MODELS / f"{model}.pml"), folder=folder)
    assert "syntax error" not in text, text
    limits = ["-DSAFETY", f"-DMEMLIM={MOST_MEGABYTES}"]
    _run(compiler, "-O0", "-w", *limits, "-o", "pan", "pan.c", folder=folder)
    # -E: a relay that waits for ever is no error here, what counts are the assertions.
    return _run("./pan", f"-m{DEPTH}", "-E", folder=folder)


def _run(*command: str, folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def errors(text: str) -> int:
    found = re.search(r"errors: (\d+)", text)
    assert found is not None, text
    return int(found[1])


@pytest.mark.parametrize("model", ["lanes", "watermark"])
def test_the_model_keeps_its_promise_in_every_order_of_steps(model: str, tmp_path: Path) -> None:
    text = search(model, tmp_path)
    assert errors(text) == 0, text
    # The search came to its end: neither memory nor depth cut it short.
    assert "Search not completed" not in text
    assert "max search depth too small" not in text
    assert "memory limit" not in text


@pytest.mark.parametrize(("model", "switches"), BROKEN)
def test_a_broken_model_is_found_out(model: str, switches: str, tmp_path: Path) -> None:
    text = search(model, tmp_path, *switches.split())
    assert errors(text) == 1, text
    assert "assertion violated" in text
