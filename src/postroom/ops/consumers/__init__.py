"""What an operator can see of consumers: what they have handled, and what waits in them."""

from __future__ import annotations

import importlib
import sys
import traceback
from typing import TYPE_CHECKING, Any

from postroom.errors import ConfigurationError, PostroomError, Refused
from postroom.ops.desk import desk, readable

if TYPE_CHECKING:
    from postroom.inbox.consumer import Consumer

__all__ = ["ROOM", "find_consumers", "inbox_list", "inbox_show", "waiting_list"]

ROOM = __package__ or "postroom.ops.consumers"

_WAITING = (
    *("topic", "key", "type", "attempts", "error_code", "error", "blocked", "aside", "at"),
    "retry_in_seconds",
)
_MORE = ("content_type", "headers", "payload", "history", "redrives", "position")


async def inbox_list(
    url: str, *, consumer: str | None = None, rows: int = 100
) -> list[dict[str, Any]]:
    """What consumers have taken on, newest first: handled, or waiting to be."""
    async with desk(url) as link:
        found = await link.query(ROOM, "inbox_list", consumer=consumer, rows=rows)
    names = ("consumer", "message_id", "at")
    return [readable(dict(zip(names, row, strict=True))) for row in found]


async def waiting_list(
    url: str, *, consumer: str | None = None, rows: int = 100
) -> list[dict[str, Any]]:
    """What waits in consumers: failed messages, what stands behind them, and dead letters."""
    async with desk(url) as link:
        found = await link.query(ROOM, "waiting_list", consumer=consumer, rows=rows)
    return [
        {"consumer": row[0], "message_id": row[1], "state": _state(told), **told}
        for row in found
        if (told := _told(_WAITING, row[2:]))
    ]


async def inbox_show(url: str, consumer: str, message_id: str) -> dict[str, Any]:
    """What one consumer knows of one message."""
    names = {"consumer": consumer, "message_id": message_id}
    async with desk(url) as link:
        known = await link.query(ROOM, "inbox_show", **names)
        waiting = await link.query(ROOM, "waiting_show", **names)
    if waiting:
        told = _told(_WAITING + _MORE, waiting[0])
        return {**names, "state": _state(told), **told}
    if not known:
        raise Refused(
            f"consumer {consumer} knows no message {message_id}: it never came, or was pruned."
        )
    _, _, at, digest = known[0]
    return {**names, "state": "handled", **readable({"at": at}), "digest": digest}


def find_consumers(where: str) -> list[Consumer]:
    """The consumers that `module:name` names: one, or several in a list."""
    from postroom.inbox.consumer import Consumer

    module_name, _, name = where.partition(":")
    if not module_name or module_name.startswith("."):
        raise ConfigurationError(
            f"{where!r} names no module: write module:variable, with the module as `import` takes "
            "it."
        )
    # As with `python -m`: the module may lie in the working directory.
    sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except PostroomError:
        raise
    except ImportError as error:
        raise ConfigurationError(f"{module_name} cannot be imported: {error}.") from error
    except (Exception, SystemExit) as error:
        # The module's own code runs here, and may raise anything.
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        raise ConfigurationError(
            f"{module_name} cannot be imported: {said} ({_place(error)})."
        ) from error
    names = [name] if name else [key for key in vars(module) if not key.startswith("_")]
    found: list[Consumer] = []
    for each in names:
        thing = getattr(module, each, None)
        things = thing if isinstance(thing, list | tuple) else [thing]
        found += [one for one in things if isinstance(one, Consumer) and one not in found]
    if name and not found:
        raise ConfigurationError(f"{where} is no Consumer: name one as module:variable.")
    return found


def _place(error: BaseException) -> str:
    """The file and line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, SyntaxError) or not frames:
        return "that is not Python"
    return f"{frames[-1].filename}, line {frames[-1].lineno}"


def _told(names: tuple[str, ...], row: Any) -> dict[str, Any]:
    told = dict(zip(names, row, strict=True))
    wait = told["retry_in_seconds"]
    told["retry_in_seconds"] = None if wait is None else max(0, wait) / 1000
    told["aside"] = bool(told["aside"])
    return readable(told)


def _state(told: dict[str, Any]) -> str:
    if told["blocked"]:
        return "dead"
    return "held" if told["retry_in_seconds"] is not None else "waiting"
