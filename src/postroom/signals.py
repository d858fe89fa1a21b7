"""The name and fields of everything observable. Logs, metrics and alerts listen here.

A signal is a name from `SIGNALS` with the fields listed there; ids and errors may be fields, a
payload never is, and secrets are taken out of every text before anybody hears it. Listeners are
plain callables; one that fails is logged and does not disturb work.
"""

from __future__ import annotations

import json
import logging
import re
import traceback
from collections.abc import Callable, Iterable
from functools import lru_cache
from sys import _getframe
from types import FrameType, FunctionType, TracebackType
from typing import Any, TypeAlias

__all__ = [
    "SIGNALS",
    "Listener",
    "check_fields",
    "emit",
    "heard",
    "is_signal",
    "listen",
    "names_secret",
    "quoted",
    "redact",
    "redact_url",
]

Listener: TypeAlias = Callable[[str, dict[str, Any]], None]

SIGNALS: dict[str, tuple[int, str]] = {
    "relay.started": (logging.INFO, "incarnation, database, brokers"),
    "relay.failed": (logging.ERROR, "incarnation, error"),
    "relay.stopped": (logging.INFO, "incarnation, delivered"),
    "relay.unsettled": (logging.WARNING, "incarnation, lanes"),
    "lanes.acquired": (logging.INFO, "lanes, incarnation"),
    "lanes.released": (logging.INFO, "lanes, incarnation"),
    "lane.acquired": (logging.DEBUG, "lane, epoch, incarnation"),
    "lane.released": (logging.DEBUG, "lane, epoch, incarnation"),
    "lane.lost": (logging.WARNING, "lane, epoch, incarnation, reason"),
    "lane.late": (logging.ERROR, "lane, position, id"),
    "message.committed": (logging.DEBUG, "count"),
    "message.attempted": (
        logging.DEBUG,
        "adapter, delivered, transient, permanent, unknown, down",
    ),
    "message.delivered": (logging.DEBUG, "lane, status, count, ages_seconds"),
    "message.missing": (logging.WARNING, "lane, count"),
    "message.held": (
        logging.WARNING,
        "id, topic, key, lane, status, attempts, last_error_code, adapter, delay_seconds",
    ),
    "message.buried": (
        logging.ERROR,
        "id, topic, key, lane, status, attempts, last_error_code, adapter, holds_key, incarnation",
    ),
    "message.expired": (logging.WARNING, "id, topic, key, lane, status, attempts, last_error_code"),
    "message.suspect": (logging.WARNING, "id, lane, position, deaths"),
    "request.accepted": (
        logging.INFO,
        "id, idempotency_key, status, attempts, last_error_code, adapter",
    ),
    "request.settled": (
        logging.INFO,
        "id, idempotency_key, status, attempts, last_error_code, adapter",
    ),
    "gateway.trouble": (logging.ERROR, "path, error"),
    "gateway.unasked": (logging.WARNING, "adapter, advice"),
    "destination.down": (logging.ERROR, "destination, error_code, error, retry_in_seconds"),
    "destination.retried": (logging.DEBUG, "destination, error_code, error, retry_in_seconds"),
    "destination.up": (logging.INFO, "destination"),
    "destination.unclosed": (logging.WARNING, "error"),
    "database.lost": (logging.ERROR, "error, retry_in_seconds"),
    "database.back": (logging.INFO, "incarnation"),
    "prune.failed": (logging.WARNING, "error"),
    "letter.redriven": (logging.INFO, "source, count"),
    "redrive.failed": (logging.WARNING, "source, error"),
    "archive.overflow": (logging.ERROR, "count"),
    "notify.lost": (logging.WARNING, "error"),
    "notify.pooled": (logging.WARNING, "database, pooling, advice"),
    "outbox.measured": (
        logging.DEBUG,
        "incarnation, pending, oldest_pending_seconds, held, held_keys, blocked_keys, delayed, "
        "dead, lanes_unowned, workers_silent, oldest_open_publisher_seconds",
    ),
    "outbox.unmeasured": (logging.DEBUG, "incarnation"),
    "consumer.started": (logging.INFO, "consumer, incarnation, database, topics"),
    "consumer.failed": (logging.ERROR, "consumer, incarnation, error"),
    "consumer.stopped": (logging.INFO, "consumer, incarnation, handled"),
    "consumer.broker_lost": (logging.ERROR, "consumer, error, retry_in_seconds"),
    "consumer.broker_back": (logging.INFO, "consumer"),
    "consumer.joining": (logging.WARNING, "consumer, seconds, reason"),
    "consumer.unacknowledged": (logging.WARNING, "consumer, count, error"),
    "seat.taken": (logging.INFO, "consumer, source, epoch"),
    "seat.lost": (logging.WARNING, "consumer, source, epoch"),
    "delivery.received": (logging.DEBUG, "consumer, count"),
    "delivery.handled": (logging.DEBUG, "consumer, count, ages_seconds"),
    "delivery.duplicate": (logging.DEBUG, "consumer, count"),
    "delivery.skipped": (logging.INFO, "consumer, type, count"),
    "delivery.failed": (
        logging.WARNING,
        "consumer, id, type, topic, key, attempts, last_error_code, error, delay_seconds",
    ),
    "delivery.buried": (
        logging.ERROR,
        "consumer, id, type, topic, key, attempts, last_error_code, error, incarnation",
    ),
    "inbox.measured": (
        logging.DEBUG,
        "consumer, incarnation, held, blocked, oldest_held_seconds, held_keys, lag, workers_silent",
    ),
    "inbox.unmeasured": (logging.DEBUG, "consumer, incarnation"),
    "key.executed": (logging.DEBUG, "operation, mode, status, attempts"),
    "key.replayed": (logging.DEBUG, "operation, status"),
    "key.refused": (logging.ERROR, "operation, error"),
    "key.lost": (logging.WARNING, "operation, idempotency_key, epoch"),
    "key.indeterminate": (logging.ERROR, "operation, idempotency_key, error"),
    "key.unprotected": (logging.ERROR, "operation, error"),
    "key.unreturned": (logging.WARNING, "operation, idempotency_key"),
    "key.unverified": (logging.WARNING, "operation, idempotency_key, error"),
    "key.unserved": (logging.WARNING, "operation, advice"),
    "key.failed": (
        logging.WARNING,
        "operation, idempotency_key, attempts, error, retry_in_seconds",
    ),
    "key.resumed": (logging.INFO, "operation, idempotency_key, attempts"),
    "key.worker_failed": (logging.ERROR, "error, retry_in_seconds"),
    "log.dropped": (logging.WARNING, "count"),
    "alert.raised": (logging.ERROR, "alert, text, count"),
    "alert.resolved": (logging.INFO, "alert, text"),
    "alert.lost": (logging.WARNING, "receiver, error, count"),
}

_log = logging.getLogger("postroom")
_listeners: list[tuple[Listener, frozenset[str] | None]] = []
_checked = False
LONGEST_LIST = 20


def emit(name: str, cause: BaseException | None = None, /, **fields: Any) -> None:
    """Tell every listener, and the log, that something happened; the log also where `cause` came
    from, for an error of somebody else's code that nobody will see raised."""
    if _checked:
        _check(name, fields)
    level = SIGNALS[name][0]
    logged, listeners = _log.isEnabledFor(level), _who_wants(name)
    if not logged and not listeners:
        return
    fields = {key: _safe(value) for key, value in fields.items()}
    if logged:
        shown = {key: _short(value) for key, value in fields.items()}
        text = " ".join(f"{key}={quoted(value)}" for key, value in shown.items())
        extra = {"postroom": {"signal": name, **shown}}
        exc_info = None if cause is None else _without_values(cause, str(shown.get("error", "")))
        _log.log(level, "%s %s", name, text, extra=extra, exc_info=exc_info)
    for listener in listeners:
        try:
            listener(name, fields)
        except Exception:
            _log.exception("a listener failed on %s", name)


def heard(name: str) -> bool:
    """Whether anybody would notice this signal: what only it needs can be left out otherwise."""
    return bool(_who_wants(name)) or _log.isEnabledFor(SIGNALS[name][0])


def check_fields(wanted: bool = True) -> None:
    """For tests: from now on a signal with other fields than those of `SIGNALS` is an error."""
    global _checked
    _checked = wanted


def _check(name: str, fields: dict[str, Any]) -> None:
    wrong = set(SIGNALS[name][1].split(", ")) ^ set(fields)
    if wrong:
        raise TypeError(f"{name} was emitted with wrong or missing fields: {sorted(wrong)}")


def _safe(value: Any) -> Any:
    if isinstance(value, str):
        # Names and addresses come again and again; an error's text hardly does.
        return _safe_name(value) if len(value) <= 200 else redact(value)
    if isinstance(value, list) and value and isinstance(value[0], str):
        return [redact(each) for each in value]
    return value


def _short(value: Any) -> Any:
    if isinstance(value, list) and len(value) > LONGEST_LIST:
        return f"[{len(value)} values]"
    return value


def quoted(value: Any) -> str:
    """A value as it stands in a line of text, without secrets. What somebody else has written is
    quoted if it could be read as more fields, or holds what a terminal acts on."""
    if value is None or isinstance(value, int | float):
        return str(value)
    text = value if isinstance(value, str) else redact(str(value))
    if _BARE.fullmatch(text if isinstance(value, str) else text.replace("'", "")):
        return text
    spelled = json.dumps(text, ensure_ascii=False)
    if spelled.isprintable():
        return spelled
    return "".join(each if each.isprintable() else json.dumps(each)[1:-1] for each in spelled)


def is_signal(record: logging.LogRecord) -> bool:
    """Whether a log record is of a signal: its text is without secrets already, and to take any out
    of it once more could take a quotation mark along."""
    return isinstance(getattr(record, "postroom", None), dict)


def listen(listener: Listener, only: Iterable[str] | None = None) -> Callable[[], None]:
    """Call `listener(name, fields)` for every signal, or for those named in `only`; returns a
    function that ends it."""
    entry = (listener, None if only is None else frozenset(only))
    _listeners.append(entry)
    return lambda: _listeners.remove(entry) if entry in _listeners else None


def _who_wants(name: str) -> list[Listener]:
    return [listener for listener, only in _listeners if only is None or name in only]


# The whole word, since a password may hold whatever else would end a URL. A scheme is short and an
# option begins where its word does, so that a long text costs no more than its length.
_ADDRESS = re.compile(r"(?P<scheme>[a-zA-Z][a-zA-Z0-9+.-]{0,30})://(?P<rest>\S*)")
_ALONE = re.compile(r"(?s)(?P<scheme>[a-zA-Z][a-zA-Z0-9+.-]{0,30})://(?P<rest>.*)")
_WEB = re.compile(r"(?i)https?://")
_SECRET_NAME = re.compile(r"(?i)pass|pwd|secret|token|key|cred|jwt|seed")
_TELLING = r"(?:passw(?:or)?d|passfile|pwd|secret|token|api[-_]?key|access[-_]?key)"
_TELLING_NAME = re.compile(_TELLING, re.IGNORECASE)
_OPTION = re.compile(
    rf"(?i)(?<![\w-])(?P<name>[\w-]*{_TELLING}[\w-]*)(?P<sep>['\"]?\s*[=:]\s*)"
    r"(?P<value>'[^']*'|\"(?:[^\"\\]|\\[\s\S])*\"|\"[^\"]*\"|[^\s&;,'\"]+)"
)
_BEARER = re.compile(r"(?i)\b(?P<kind>bearer|basic)\s+[^\s'\"]+")
_BARE = re.compile(r"[\w!#-&(-<>-\[\]-~]+")
_DATABASES = ("postgres", "mysql", "mariadb", "sqlite")


@lru_cache(maxsize=1000)
def _safe_name(text: str) -> str:
    return redact(text)


def redact(text: str) -> str:
    """The text without passwords and tokens: in URLs, in options and in query strings."""
    text = _OPTION.sub(_hide_value, _ADDRESS.sub(_hide, text))
    return _BEARER.sub(r"\g<kind> ***", text)


def names_secret(name: str) -> bool:
    """Whether what is called so is a password or a token, by its name."""
    return _TELLING_NAME.search(name) is not None


def _hide_value(match: re.Match[str]) -> str:
    """What is around a secret stays, so that a document is still one."""
    value = match["value"]
    quote = value[0] if value[0] in "'\"" else ""
    # Only at its end: a password may hold a bracket itself.
    closing = "" if quote else value[len(value.rstrip("}]")) :]
    return f"{match['name']}{match['sep']}{quote}***{quote}{closing}"


@lru_cache(maxsize=1000)
def redact_url(url: str) -> str:
    """A URL that stands alone, as the name of a place: nothing that its password, its query or
    its fragment hides is shown. What is no URL is a text like any other."""
    match = _ALONE.fullmatch(url)
    if match is None:
        return redact(url)
    place, mark, query = _hide(match).partition("?")
    query, hash_, fragment = query.partition("#")
    if query:
        known = [] if _WEB.match(url) else re.split(r"[&;]", query)
        query = "&".join(_hide_in_query(part) for part in known) or "***"
    return redact(f"{place}{mark}{query}{hash_}{fragment}")


def _hide_in_query(part: str) -> str:
    name, equals, _ = part.partition("=")
    if not equals:
        return "***"  # perhaps the rest of a password that holds a question mark
    return f"{name}=***" if _SECRET_NAME.search(name) else part


def _hide(match: re.Match[str]) -> str:
    scheme, rest = match["scheme"], match["rest"]
    hidden = ""
    if web := _WEB.search(match[0]):
        # What stands behind the # is for us alone: secrets to sign with.
        start = max(0, web.end() - len(scheme) - 3)
        place, hash_, fragment = rest[start:].partition("#")
        if hash_:
            rest, hidden = rest[:start] + place, "#***"
            if "@" in fragment and "@" not in place:
                return f"{scheme}://***{hidden}"  # a password that holds a #
    # Several servers, each with who we are there, or one whose password holds a comma.
    parts = rest.split(f",{scheme}://")
    parts = parts if all("@" in part for part in parts) else [rest]
    shown = f",{scheme}://".join(_without_userinfo(scheme, each) for each in parts)
    return f"{scheme}://{shown}{hidden}"


def _without_userinfo(scheme: str, rest: str) -> str:
    who, at, place = rest.rpartition("@")  # the last one: a password may hold one itself
    if not at:
        return rest
    user, colon, _ = who.partition(":")
    if colon:
        return f"{user}:***@{place}"
    # A lone name is a user to a database, and a token to a broker.
    return rest if scheme.startswith(_DATABASES) else f"***@{place}"


def _traceback(record: logging.LogRecord) -> str:
    """Of a signal's cause only where it came from: what its own text holds nobody knows, and a line
    of source may hold the same."""
    assert record.exc_info
    if not is_signal(record):
        return logging.Formatter().formatException(record.exc_info)
    frames = traceback.walk_tb(record.exc_info[2])
    places = (f'  File "{each.f_code.co_filename}", line {line}, in {each.f_code.co_name}'
              for each, line in frames)  # fmt: skip
    return "\n".join(("Traceback (most recent call last):", *places))


ExcInfo: TypeAlias = tuple[type[BaseException], BaseException, TracebackType | None]


def _without_values(cause: BaseException, text: str) -> ExcInfo:
    """Return `cause` for handlers that report exceptions: a class of its name, `text` for its
    message, and frames at the same places that have no local variables."""
    kind = type(cause)
    copy = type(kind.__name__, (Exception,), {"__module__": kind.__module__})
    trace: TracebackType | None = None
    for frame, line in reversed(list(traceback.walk_tb(cause.__traceback__))):
        made = _empty_frame(frame, line)
        trace = TracebackType(trace, made, made.f_lasti, line)
    return copy, copy(text), trace


def _empty_frame(frame: FrameType, line: int) -> FrameType:
    """Return a frame of the same file, line, function and module, and of nothing else. Only code
    that runs has a frame, so a copy of `_here` runs under the name of the other."""
    code = _here.__code__.replace(
        co_filename=frame.f_code.co_filename, co_name=frame.f_code.co_name, co_firstlineno=line
    )
    names = {"__name__": frame.f_globals.get("__name__"), "_getframe": _getframe}
    made: FrameType = FunctionType(code, names)()
    return made


def _here() -> FrameType:
    return _getframe()


class _Redacting(logging.Filter):
    """Takes secrets out of whatever is logged, a traceback too, before any handler sees it."""

    def filter(self, record: logging.LogRecord) -> bool:
        if not is_signal(record):
            record.msg, record.args = redact(record.getMessage()), None
        if record.exc_info:
            # A formatter prints this text. The exception itself would bring its secrets along,
            # unless it is that of a signal, which has none.
            record.exc_text = redact(_traceback(record))
            if not is_signal(record):
                record.exc_info = None
        return True


_log.addFilter(_Redacting())
