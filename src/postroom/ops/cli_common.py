"""What all commands share: their options, their settings, and how they answer.

People get sentences and tables, programs get one JSON document with `--json`; both on stdout.
Either way a terminal gets nothing that it would take for a command, whatever others have written
into a key or an error. Errors are for `cli.main` alone: a command raises, it never prints one.
Nothing here imports a database library, so that `postroom --help` stays quick.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from postroom import framework
from postroom.errors import ConfigurationError

if TYPE_CHECKING:
    from postroom.config import Settings

__all__ = [
    "BrokerOption",
    "ConfigOption",
    "Console",
    "DatabaseOption",
    "JsonOption",
    "LimitOption",
    "NeededReasonOption",
    "ReasonOption",
    "in_json",
    "localized",
    "run",
    "shown",
]

T = TypeVar("T")

WIDE_COLUMNS = 100_000
_NEEDS_DATABASE = re.compile("`postroom (db install|db upgrade|db grants|relay)`")

# The colours of what needs a look, wherever it stands in a table.
STYLES = {
    "dead": "bold red",
    "indeterminate": "bold red",
    "stopped": "red",
    "held": "yellow",
    "paused": "yellow",
    "queued": "cyan",
    "running": "cyan",
    "delivered": "green",
    "resolved": "green",
    "done": "green",
    "accepted": "cyan",
    "sending": "cyan",
    "aborted": "bold red",
    "succeeded": "green",
    "failed": "red",
    "unknown": "bold yellow",
    "discarded": "dim",
}

DatabaseOption = Annotated[
    str | None,
    typer.Option("--database", metavar="URL", help="The database; else POSTROOM_DATABASE_URL."),
]
BrokerOption = Annotated[
    str | None,
    typer.Option("--broker", metavar="URL", help="The default broker; else POSTROOM_BROKER_URL."),
]
ConfigOption = Annotated[
    str | None,
    typer.Option("--config", metavar="FILE", help="Settings file; else postroom.toml here."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Answer in JSON, for programs.")]
ReasonOption = Annotated[str | None, typer.Option("--reason", help="Why, for the audit.")]
NeededReasonOption = Annotated[str, typer.Option("--reason", help="Why, for the audit.")]
LimitOption = Annotated[int, typer.Option("--limit", min=1, max=10_000, help="Most to show.")]


@dataclass(frozen=True, slots=True)
class Console:
    """The options given before the command, and the way to answer.

    Every option may stand before or after the command's name; what stands after it wins. `base`
    gives the settings of a framework the command was started by, in place of a file.
    """

    database: str | None = None
    broker: str | None = None
    config: str | None = None
    as_json: bool = False
    base: Callable[[], Mapping[str, Any]] | None = None

    @classmethod
    def of(
        cls,
        context: typer.Context,
        *,
        database: str | None = None,
        broker: str | None = None,
        config: str | None = None,
        as_json: bool = False,
    ) -> Console:
        """The console of a command: its own options over those before its name."""
        outer = context.find_object(cls) or cls()
        return cls(
            database=database or outer.database,
            broker=broker or outer.broker,
            config=config or outer.config,
            as_json=as_json or outer.as_json,
            base=outer.base,
        )

    def settings(
        self, relay: dict[str, Any] | None = None, consumer: dict[str, Any] | None = None
    ) -> Settings:
        """All settings, merged; `relay` and `consumer` hold options of their own."""
        from postroom.config import load

        return load(
            database_url=self.database,
            broker_url=self.broker,
            config=self.config,
            relay=relay,
            consumer=consumer,
            base=self.base() if self.base else None,
        )

    def answer(self, document: Any, sentence: str, *, lines: bool = False) -> None:
        """One thing to say: a document for programs, a sentence for people; with `lines` a text of
        ours that has several."""
        print(in_json(document) if self.as_json else sentence if lines else shown(sentence))

    def record(self, fields: dict[str, Any]) -> None:
        """Everything about one thing: a document for programs, a line a field for people."""
        if self.as_json:
            print(in_json(fields))
            return
        history = fields.pop("history", None) or []
        rows = [(name, _text(value)) for name, value in fields.items() if value not in (None, "")]
        self.table(None, ("field", "value"), rows)
        if history:
            print("\nattempts")
            columns = ("attempt", "at", "code", "error", "worker")
            self.table(None, columns, [[one.get(name) for name in columns] for one in history])
        if where := (history[-1].get("where") if history else None):
            print("\nthe last attempt failed in")
            for place in where:
                print(f"  {shown(place)}")

    def table(
        self, document: Any, columns: Sequence[str], rows: Iterable[Sequence[object]]
    ) -> None:
        """Many things to say: a document for programs, a table for people."""
        if self.as_json:
            print(in_json(document))
            return
        from rich.console import Console as Terminal

        from postroom.ops.listing import listing

        cells = [["" if cell is None else shown(str(cell)) for cell in row] for row in rows]
        # Output that no terminal reads is not folded to the width of one.
        terminal = Terminal(width=None if sys.stdout.isatty() else WIDE_COLUMNS)
        terminal.print(listing(columns, cells, terminal.width, _style))


def localized(text: str) -> str:
    """Return text with our commands as they work here: with `--database` if no URL is configured.

    The URL may stand in an option, or in the code of a consumer, which other commands do not read.
    """
    needs = _NEEDS_DATABASE.search(text) and framework.present() is None
    if needs and not _is_configured():
        text = _NEEDS_DATABASE.sub(r"`postroom \1 --database …`", text)
    return framework.localized(text)


def _is_configured() -> bool:
    from postroom.config import load

    try:
        return load().database_url is not None
    except (ConfigurationError, OSError):
        return True  # the file that cannot be read may hold it


def shown(text: str) -> str:
    """Somebody else's text for a terminal: what cannot be printed, such as an escape or a newline,
    is spelled out."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def in_json(document: Any) -> str:
    """One line of JSON; beyond what JSON wants, it escapes whatever a terminal might act on."""
    text = json.dumps(document, ensure_ascii=False)
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else json.dumps(each)[1:-1] for each in text)


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _style(column: str, cell: object) -> str:
    return STYLES.get(str(cell), "") if column in ("state", "status", "") else ""


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a command's work on an event loop that every driver can use."""
    factory = asyncio.SelectorEventLoop if sys.platform == "win32" else None
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(work)
