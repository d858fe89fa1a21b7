"""Keys that were used before a fork, as under `gunicorn --preload`: each process has its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

from stages import Stage


def test_children_share_no_connection_and_keep_their_leases(stage: Stage) -> None:
    """Two on one socket would be told each other's secrets; a thread does not survive a fork."""
    script = Path(__file__).with_name("forking.py")
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, str(script), stage.url],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said == {"children": [0, 0, 1], "meanwhile": "KeyInProgress"}, done.stderr
