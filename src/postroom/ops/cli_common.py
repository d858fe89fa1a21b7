"""What all commands share: their options, their settings, and how they answer.

People get sentences and tables, programs get one JSON document with `--json`; both on stdout.
Either way a terminal gets nothing that it would take for a command, whatever others have written
into a key or an error. Errors are for `cli.main` alone: a command raises, it never prints one.
Nothing here imports a database library, so that `postroom --help` stays quick.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

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
    "run",
    "shown",
]

T = TypeVar("T")

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

    def table(
        self, document: Any, columns: Sequence[str], rows: Iterable[Sequence[object]]
    ) -> None:
        """Many things to say: a document for programs, a table for people."""
        if self.as_json:
            print(in_json(document))
            return
        from rich.console import Console as Terminal
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in columns:
            # An id is there to be copied, so it stays in one piece.
            table.add_column(column, overflow="fold", no_wrap=column == "id")
        for row in rows:
            # As Text: a key or an error of somebody else's is never read as markup.
            table.add_row(
                *(
                    Text("" if cell is None else shown(str(cell)), style=_style(column, cell))
                    for column, cell in zip(columns, row, strict=True)
                )
            )
        # What is read by no terminal is not folded to the width of one.
        Terminal(width=None if sys.stdout.isatty() else 250).print(table)


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
