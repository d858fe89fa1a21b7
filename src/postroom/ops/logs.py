"""Log lines for people and for programs; neither ever shows a secret or a payload.

    handler.setFormatter(JsonFormatter())      # one JSON document a line
    handler.setFormatter(TextFormatter())

Signals bring their fields; what other libraries log passes through with the same care.

Promise: a pipe that is full or not read delays no worker. Lines that find no room are dropped and
counted (`log.dropped`).
"""

from __future__ import annotations

import datetime as dt
import json
import logging
import os
import queue
import sys
import threading
from typing import TextIO

from postroom import signals
from postroom.signals import is_signal, redact

__all__ = ["BackgroundHandler", "JsonFormatter", "TextFormatter", "set_up"]

WAITING_LINES = 10_000
FLUSH_SECONDS = 2.0


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


class BackgroundHandler(logging.Handler):
    """Writes lines from a thread, so that a blocked stream never blocks a caller that logs."""

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__()
        self._stream = stream or sys.stderr
        self._lines: queue.Queue[str] = queue.Queue(WAITING_LINES)
        self._dropped = 0
        self._thread: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the line, or count it where the queue is full."""
        try:
            self._lines.put_nowait(self.format(record) + "\n")
        except queue.Full:
            self._dropped += 1
            return
        except Exception:
            self.handleError(record)
            return
        if self._thread is None:  # under the handler's lock
            self._thread = threading.Thread(target=self._run, name="postroom log", daemon=True)
            self._thread.start()

    def flush(self) -> None:
        """Wait until all lines are written, for `FLUSH_SECONDS` at most."""
        lines = self._lines
        with lines.all_tasks_done:
            lines.all_tasks_done.wait_for(lambda: not lines.unfinished_tasks, FLUSH_SECONDS)

    def _run(self) -> None:
        while True:
            line = self._lines.get()
            try:
                self._write(line)
            except (OSError, ValueError):
                pass  # the reader has gone, or the stream is closed: logs have no other place
            finally:
                self._lines.task_done()
            if self._dropped and self._lines.empty():
                with self.lock or threading.Lock():
                    dropped, self._dropped = self._dropped, 0
                signals.emit("log.dropped", count=dropped)

    def _write(self, line: str) -> None:
        try:
            target = self._stream.fileno()
        except (AttributeError, OSError):  # a stream in memory
            self._stream.write(line)
            self._stream.flush()
            return
        # Past the stream's own lock, for which the interpreter would wait at its end.
        data = line.encode(errors="backslashreplace")
        while data:
            data = data[os.write(target, data) :]


def set_up(log_format: str, level: int) -> None:
    """Log to standard error: ours from `level` up, of other libraries warnings and worse."""
    handler = BackgroundHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("postroom").setLevel(level)
