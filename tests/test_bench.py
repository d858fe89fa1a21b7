"""The benchmark at its smallest, without peers, so that it cannot rot."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HOME = Path(__file__).parent.parent
# The rest starts many more processes: it is run with the guarantees at full size.
EVERYDAY = ["hot-key", "backlog"]
MORE = ["drain", "nats", "latency", "tax", "publish", "pinned", "memory", "two-relays"]
SECTIONS = EVERYDAY + (MORE if os.environ.get("POSTROOM_GUARANTEES") == "big" else [])


@pytest.mark.skipif(sys.platform != "linux", reason="a relay's memory is read from /proc")
def test_every_postgres_nats_section_runs_and_draws(tmp_path: Path) -> None:
    figures, pictures = tmp_path / "figures.json", tmp_path / "pictures"
    page = tmp_path / "performance.md"
    page.write_text((HOME / "docs" / "performance.md").read_text())
    options = ["--quick", "--no-peers", "--json", str(figures), "--pictures", str(pictures)]
    options += ["--page", str(page)]
    environment = {**os.environ, "PYTHONPATH": str(HOME / "src")}
    command = [sys.executable, "-m", "bench", *options, *SECTIONS]
    done = subprocess.run(command, cwd=HOME, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(figures.read_text())
    assert list(found) == SECTIONS
    for name, section in found.items():
        assert section["lines"], name
        assert all(line["figure"] in done.stdout for line in section["lines"]), name
    assert found["hot-key"]["numbers"]["rates"]["postroom"] > 0
    assert found["hot-key"]["lines"][1]["figure"] in page.read_text()
    for picture in ("throughput.svg", "backlog.svg"):
        assert (pictures / picture).read_text().endswith("</svg>\n")
