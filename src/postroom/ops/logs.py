"""Log lines for people and for programs; neither ever shows a secret or a payload.

    handler.setFormatter(JsonFormatter())      # one JSON document a line
    handler.setFormatter(TextFormatter())

Signals bring their fields; what other libraries log passes through with the same care.
"""

from __future__ import annotations

import datetime as dt
import json
import logging

from postroom.signals import is_signal, redact

__all__ = ["JsonFormatter", "TextFormatter", "set_up"]


class TextFormatter(logging.Formatter):
    """Time, level and message, as one line and a traceback if there is one."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """The line, without secrets."""
        line = super().format(record)
        return line if is_signal(record) else redact(line)


class JsonFormatter(logging.Formatter):
    """One JSON document a line: `at`, `level`, `logger`, `message`, and the fields of a signal."""

    def format(self, record: logging.LogRecord) -> str:
        """The document, without secrets."""
        document = {
            "at": dt.datetime.fromtimestamp(record.created, dt.UTC).isoformat(
                timespec="milliseconds"
            ),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage() if is_signal(record) else redact(record.getMessage()),
        }
        fields = getattr(record, "postroom", None)
        if isinstance(fields, dict):
            # What a record has of its own wins, whatever a signal's field is called. A message's id
            # is the key under which whoever receives it applies it once.
            key = {"idempotency_key": fields["id"]} if "id" in fields else {}
            document = {**key, **fields, **document}
        if record.exc_info and not record.exc_text:
            record.exc_text = self.formatException(record.exc_info)
        if record.exc_text:
            document["traceback"] = redact(record.exc_text)
        return json.dumps(document, ensure_ascii=False, default=lambda value: redact(str(value)))


def set_up(log_format: str, level: int) -> None:
    """Log to standard error: ours from `level` up, of other libraries warnings and worse."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("postroom").setLevel(level)
