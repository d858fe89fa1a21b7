"""The relay's tools serve here too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "outbox"))

pytest_plugins = ("relay_fixtures",)
