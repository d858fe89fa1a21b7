"""What `manage.py check` says of POSTROOM: every mistake at once, each with what to do."""

from __future__ import annotations

from typing import Any

from django.core import checks
from django.utils.module_loading import import_string

from postroom.django import settings

__all__ = ["check_settings"]


def check_settings(app_configs: Any, **_: Any) -> list[checks.CheckMessage]:
    """Errors are what `publish` or the relay would refuse."""
    if problems := settings.problems():
        return [checks.Error(problem, id="postroom.E001") for problem in problems]
    if lost := _lost_keys(settings.chosen().keys):
        return [checks.Error(lost, id="postroom.E001")]
    return _poor_charset(settings.connection())


def _lost_keys(keys: Any) -> str | None:
    """Whether the name of the Keys leads nowhere."""
    if not isinstance(keys, str):
        return None
    try:
        import_string(keys)
    except ImportError as error:
        return f"POSTROOM['keys'] cannot be imported: {error}."
    return None


def _poor_charset(connection: Any) -> list[checks.CheckMessage]:
    """Django before 5.0 talks to MariaDB in a charset that has no emoji."""
    if connection.vendor != "mysql":
        return []
    charset = connection.get_connection_params().get("charset")
    if charset == "utf8mb4":
        return []
    return [
        checks.Warning(
            f"The connection {connection.alias!r} speaks {charset}, so the database refuses keys "
            "and headers with characters that need four bytes.",
            hint="Set OPTIONS = {'charset': 'utf8mb4'} in DATABASES.",
            id="postroom.W001",
        )
    ]
