"""Processes that know nothing of the settings of whoever starts them."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["environment_apart"]


def environment_apart() -> dict[str, str]:
    """The environment without settings of Postroom's, and with paths that mean the same elsewhere:
    the package may be imported from the working directory, or from `PYTHONPATH=src`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("POSTROOM_")}
    here, home = Path.cwd(), Path(__file__).resolve().parents[2]
    paths = [str(here / each) for each in kept.get("PYTHONPATH", "").split(os.pathsep) if each]
    if home == here.resolve():
        paths.append(str(home))
    return kept | ({"PYTHONPATH": os.pathsep.join(paths)} if paths else {})
