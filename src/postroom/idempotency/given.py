"""What a session of ours is made of: an engine. Anything else would fail at each request, and look
like a database that is away."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncEngine

from postroom.errors import ConfigurationError

__all__ = ["checked_engine"]


def checked_engine(given: Any, *, or_async: bool) -> Any:
    """Refuse a sessionmaker, a session or a URL where it is given."""
    if isinstance(given, Engine) or (or_async and isinstance(given, AsyncEngine)):
        return given
    wanted = "Engine or AsyncEngine" if or_async else "Engine"
    raise ConfigurationError(
        f"a keyed session cannot be made of what is a {type(given).__name__}: give the {wanted} "
        "itself, not a URL or a sessionmaker."
    )
