"""The framework that this process runs in, if an app of ours is installed in it.

Its own settings then stand in place of `postroom.toml`, and remedies name the commands that its
users type. The app registers itself when the framework starts, so that nothing here imports one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Framework", "localized", "present", "register"]


@dataclass(frozen=True, slots=True)
class Framework:
    """A framework with our app in it.

    `document` returns the settings as `postroom.toml` would hold them, for the database with an
    alias of the framework's own, or for the default one. `alias` resolves and checks such a name.
    """

    name: str
    command: str  # such as "manage.py postroom"
    migrate: str  # the command that brings the tables up to date
    document: Callable[[str | None], Mapping[str, Any]]
    alias: Callable[[str | None], str]


_present: Framework | None = None


def register(framework: Framework) -> None:
    """Announce the framework of this process."""
    global _present
    _present = framework


def present() -> Framework | None:
    """The framework of this process, or None."""
    return _present


def localized(text: str) -> str:
    """Text with our commands as they are typed here: `postroom …`, or `manage.py postroom …`."""
    if _present is None:
        return text
    for installing in ("`postroom db install`", "`postroom db upgrade`"):
        text = text.replace(installing, f"`{_present.migrate}`")
    return text.replace("`postroom ", f"`{_present.command} ")
