"""The name and fields of everything observable. Logs, metrics and alerts listen here.

A signal is a name from `SIGNALS` with the fields listed there; ids and errors may be fields, a
payload never is. Listeners are plain callables; one that fails is logged and does not disturb work.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any, TypeAlias

__all__ = ["SIGNALS", "Listener", "emit", "listen", "redact"]

Listener: TypeAlias = Callable[[str, dict[str, Any]], None]

SIGNALS: dict[str, tuple[int, str]] = {
    "relay.started": (logging.INFO, "incarnation, database, brokers"),
    "relay.stopped": (logging.INFO, "incarnation, delivered"),
    "relay.unsettled": (logging.WARNING, "incarnation, lanes"),
    "lane.acquired": (logging.INFO, "lane, epoch, incarnation"),
    "lane.released": (logging.INFO, "lane, epoch, incarnation"),
    "lane.lost": (logging.WARNING, "lane, epoch, incarnation, reason"),
    "lane.late": (logging.ERROR, "lane, position, id"),
    "message.delivered": (logging.DEBUG, "lane, count"),
    "message.missing": (logging.WARNING, "lane, count"),
    "message.held": (logging.WARNING, "id, topic, key, attempts, error_code, delay_seconds"),
    "message.buried": (logging.ERROR, "id, topic, key, attempts, error_code, holds_key"),
    "message.expired": (logging.WARNING, "id, topic, key"),
    "message.suspect": (logging.WARNING, "id, lane, position, deaths"),
    "destination.down": (logging.ERROR, "destination, error_code, error, retry_in_seconds"),
    "destination.up": (logging.INFO, "destination"),
    "destination.unclosed": (logging.WARNING, "error"),
    "database.lost": (logging.ERROR, "error, retry_in_seconds"),
    "database.back": (logging.INFO, "incarnation"),
    "archive.overflow": (logging.ERROR, "count"),
    "notify.lost": (logging.WARNING, "error"),
}

_log = logging.getLogger("postroom")
# A library is silent unless the application has set logging up.
_log.addHandler(logging.NullHandler())
_listeners: list[Listener] = []


def emit(name: str, /, **fields: Any) -> None:
    """Tell every listener, and the log, that something happened."""
    level = SIGNALS[name][0]
    if _log.isEnabledFor(level):
        text = " ".join(f"{key}={value}" for key, value in fields.items())
        _log.log(level, "%s %s", name, text, extra={"postroom": {"signal": name, **fields}})
    for listener in _listeners:
        try:
            listener(name, fields)
        except Exception:
            _log.exception("a listener failed on %s", name)


def listen(listener: Listener) -> Callable[[], None]:
    """Call `listener(name, fields)` for every signal; returns a function that ends it."""
    _listeners.append(listener)
    return lambda: _listeners.remove(listener) if listener in _listeners else None


# Up to the last @ before the path: a password may hold one itself.
_USERINFO = re.compile(r"(?P<scheme>[a-zA-Z][a-zA-Z0-9+.-]*)://(?P<who>[^/\s?#]*)@")
_OPTION = re.compile(
    r"(?i)\b(?P<name>password|passwd|passfile|pwd|secret|token|api_?key|sslpassword)"
    r"(?P<sep>\s*[=:]\s*)(?:'[^']*'|\"[^\"]*\"|[^\s&;,'\"]+)"
)
_DATABASES = ("postgres", "mysql", "mariadb", "sqlite")


def redact(text: str) -> str:
    """The text without passwords and tokens: in URLs, in options and in query strings."""
    return _OPTION.sub(r"\g<name>\g<sep>***", _USERINFO.sub(_hide, text))


def _hide(match: re.Match[str]) -> str:
    scheme, who = match["scheme"], match["who"]
    user, colon, _ = who.partition(":")
    if colon:
        return f"{scheme}://{user}:***@"
    # A lone name is a user to a database, and a token to a broker.
    return match[0] if scheme.startswith(_DATABASES) else f"{scheme}://***@"
