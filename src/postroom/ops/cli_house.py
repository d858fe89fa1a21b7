"""`postroom verify`, `postroom doctor` and `postroom prune`: look after the house."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from postroom.errors import ConfigurationError
from postroom.ops.cli_common import (
    BrokerOption,
    ConfigOption,
    Console,
    DatabaseOption,
    JsonOption,
    in_json,
    localized,
    run,
    shown,
)
from postroom.signals import quoted

if TYPE_CHECKING:
    from postroom.ops.doctor import Check
    from postroom.ops.verify import Balance, Finding, Report

__all__ = ["doctor", "prune", "verify"]

EXIT_WRONG = 1
SHOWN = 10

ReasonOption = Annotated[str | None, typer.Option("--reason", help="Why, for the audit.")]


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[str, int, int | None], None]]:
    """A bar on standard error, for people at a terminal."""
    from rich.console import Console as Terminal
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    terminal = Terminal(stderr=True)
    if console.as_json or not terminal.is_terminal:
        yield lambda *_: None
        return
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=terminal,
        transient=True,
    )
    tasks: dict[str, Any] = {}
    with bar:

        def tell(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)

        yield tell


# ── verify ─────────────────────────────────────────────────────────────────────────────────────


def verify(
    context: typer.Context,
    committed: Annotated[
        str | None,
        typer.Option(
            "--committed",
            metavar="FILE",
            help="Ids that were committed, one a line; -: stdin.",
        ),
    ] = None,
    committed_sql: Annotated[
        str | None,
        typer.Option("--committed-sql", metavar="SELECT", help="A query for those ids, run here."),
    ] = None,
    invented: Annotated[
        bool, typer.Option("--invented", help="What the application does not know is wrong too.")
    ] = False,
    mend: Annotated[
        bool, typer.Option("--mend", help="Give stuck keys their turn, and look again.")
    ] = False,
    reason: ReasonOption = None,
    database: DatabaseOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check that every committed message is somewhere, and that the tables agree."""
    from postroom.ops import verify as work

    console = Console.of(context, database=database, config=config, as_json=as_json)
    url = console.settings().require_database()
    if committed is not None and committed_sql is not None:
        raise ConfigurationError("use --committed or --committed-sql, not both.")
    if invented and committed is None and committed_sql is None:
        raise ConfigurationError("--invented needs --committed or --committed-sql to compare with.")
    if mend and committed == "-":
        raise ConfigurationError("--mend looks twice, and standard input can be read once.")
    truth = work.Truth(committed, committed_sql, invented)
    mended = 0
    with _progress(console) as tell:
        report = run(work.verify(url, truth, tell))
        if mend and any(finding.check == "stuck_heads" for finding in report.findings):
            mended = run(work.mend(url, report, why=reason))
            report = run(work.verify(url, truth, tell))
    if console.as_json:
        print(in_json({**report.document, "mended": mended}))
    else:
        _tell_report(report, mended)
    if not report.ok:
        raise typer.Exit(EXIT_WRONG)


_MEANINGS = {
    "delivered": "in the archive",
    "pending": "to be sent",
    "delayed": "not due yet",
    "held": "waiting behind a failure or a dead letter",
    "dead": "dead letters that need a person",
    "queued": "dead letters that are sent again",
    "resolved": "dead letters that were delivered after all",
    "discarded": "given up by a person",
    "expired": "not delivered in their time",
}


def _tell_report(report: Report, mended: int) -> None:
    from rich.console import Console as Terminal
    from rich.table import Table
    from rich.text import Text

    terminal = Terminal(highlight=False)
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(justify="right", min_width=10)
    for name, meaning in _MEANINGS.items():
        table.add_row(f"{report.counts[name]:,}", name, meaning)
    terminal.print(table)
    terminal.print(Text(_memory(report)), soft_wrap=True)
    if report.balance is not None:
        for line in _equation(report.balance):
            terminal.print(Text(line), soft_wrap=True)
    if mended:
        terminal.print(Text(f"{mended} stuck keys got their turn.", style="green"))
    for finding in report.findings:
        _tell_finding(terminal, finding)
    wrong = sum(finding.level == "wrong" for finding in report.findings)
    if wrong:
        things = "1 thing is" if wrong == 1 else f"{wrong} things are"
        terminal.print(Text(f"{things} wrong.", style="bold red"))
    else:
        terminal.print(Text("Nothing is wrong.", style="bold green"))


def _memory(report: Report) -> str:
    """What is known of delivered messages, and what is not."""
    kept = report.kept_seconds
    if kept is None:
        return "No relay has worked here yet, so nothing was delivered."
    if kept == 0:
        return (
            "Delivered messages are not kept (keep_delivered_seconds is 0): "
            "of one that is nowhere, delivered or lost cannot be told."
        )
    return (
        f"Delivered messages are kept for {_span(kept)}: "
        "of one that is older and nowhere, delivered or lost cannot be told."
    )


def _span(seconds: int) -> str:
    for size, unit in ((86_400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size and seconds % size == 0:
            return f"{seconds // size} {unit}"
    return f"{seconds:,} seconds"


def _equation(balance: Balance) -> list[str]:
    always = ("delivered", "pending", "held", "dead", "discarded")
    parts = [
        f"{count:,} {place}" for place, count in balance.places.items() if count or place in always
    ]
    parts.append(f"{balance.missing:,} missing")
    if balance.untold:
        parts.append(f"{balance.untold:,} that cannot be told")
    lines = [f"{balance.committed:,} committed = {' + '.join(parts)}"]
    if balance.repeated:
        lines.append(f"{balance.repeated:,} ids were named more than once, and count once.")
    if balance.unknown:
        lines.append(f"{balance.unknown:,} messages are not among the application's ids.")
    return lines


def _tell_finding(terminal: Any, finding: Finding) -> None:
    from rich.text import Text

    style = "red" if finding.level == "wrong" else "yellow"
    line = Text(f"{finding.level}: ", style=style)
    line.append(shown(f"{finding.text}."), style="default")
    terminal.print(line, soft_wrap=True)
    for example in finding.examples[:SHOWN]:
        told = {name: value for name, value in example.items() if value is not None}
        facts = " ".join(f"{name}={quoted(value)}" for name, value in told.items())
        terminal.print(Text(shown(f"  {facts}")), soft_wrap=True)
    if finding.count > SHOWN:
        terminal.print(Text(f"  … and {finding.count - SHOWN:,} more (--json shows up to 100)"))
    terminal.print(Text(f"  {finding.remedy}."), soft_wrap=True)


# ── prune ──────────────────────────────────────────────────────────────────────────────────────


def prune(
    context: typer.Context,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only",
            metavar="KIND",
            help="archive, dedup, dead, inbox, keys, jobs, workers; may repeat.",
        ),
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option("--older-than", metavar="AGE", help="90s, 15m, 24h, 7d; else the settings."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would go, and delete nothing.")
    ] = False,
    reason: ReasonOption = None,
    database: DatabaseOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete now what is finished and old. Nothing that is undecided ever goes."""
    from dataclasses import asdict

    from postroom.ops import prune as work

    console = Console.of(context, database=database, config=config, as_json=as_json)
    settings = console.settings()
    url = settings.require_database()
    wanted = work.plan(settings.relay, only or (), older_than)
    with _progress(console) as tell:
        done = run(
            work.prune(
                url,
                wanted,
                given=older_than is not None,
                dry_run=dry_run,
                why=reason,
                tell=tell,
            )
        )
    if console.as_json:
        print(in_json({"dry_run": dry_run, "pruned": [asdict(one) for one in done]}))
        return
    verb = "would go" if dry_run else "deleted"
    console.table(
        None,
        (verb, "what", "older than", ""),
        [
            (
                f"{one.count:,}{'+' if one.more else ''}",
                f"{one.kind}: {one.what}",
                _span(one.older_than_seconds),
                "" if dry_run or not one.left else f"{one.left:,} left: in use, try again",
            )
            for one in done
        ],
    )


# ── doctor ─────────────────────────────────────────────────────────────────────────────────────


def doctor(
    context: typer.Context,
    max_age: Annotated[
        str,
        typer.Option("--max-age", metavar="AGE", help="A message that waits longer is wrong."),
    ] = "15m",
    readable: Annotated[
        list[str] | None,
        typer.Option(
            "--readable",
            metavar="MODULE:CONSUMER",
            help="Only see whether this code can read all that waits; may repeat.",
        ),
    ] = None,
    database: DatabaseOption = None,
    broker: BrokerOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Look for what could go wrong here, and say what to do about it."""
    import sys

    from postroom.ops import doctor as work
    from postroom.ops.prune import duration

    console = Console.of(context, database=database, broker=broker, config=config, as_json=as_json)
    settings = console.settings()
    url = settings.require_database()
    if readable:
        _read_all(console, url, readable)
        return
    limits = work.Limits(age_seconds=duration(max_age))
    # As with the relay: what call:module:function names may lie in the working directory.
    sys.path.insert(0, "")
    checks = run(work.examine(url, settings.relay, settings.routes, limits, settings.brokers))
    ok = not any(check.level == "wrong" for check in checks)
    if console.as_json:
        from dataclasses import asdict

        document = {"ok": ok, "checks": [asdict(check) for check in checks]}
        print(in_json(document))
    else:
        _tell_checks(checks)
    if not ok:
        raise typer.Exit(EXIT_WRONG)


def _read_all(console: Console, url: str, where: list[str]) -> None:
    """Whether the code named here can read all that waits; ends with 1 if not."""
    from dataclasses import asdict

    from postroom.ops.consumers import find_consumers
    from postroom.ops.readable import read_all

    with _progress(console) as tell:

        async def look() -> Any:
            found = [one for each in where for one in find_consumers(each)]
            return await read_all(url, found, tell)

        reading = run(look())
    if console.as_json:
        print(in_json({"ok": reading.ok, **asdict(reading)}))
    else:
        total = sum(reading.read.values())
        parts = ", ".join(f"{count:,} {place}" for place, count in reading.read.items() if count)
        print(f"{total:,} messages were read{f': {parts}' if parts else ''}.")
        for type, count in sorted(reading.foreign.items()):
            print(shown(f"{count:,} of type {type} are nobody's here."))
        for one in reading.examples:
            print(shown(f"wrong: {one['place']} {one['id']} {one['type']}: {one['error']}."))
        print("All can be read." if reading.ok else f"{reading.unreadable:,} cannot be read.")
    if not reading.ok:
        raise typer.Exit(EXIT_WRONG)


_STYLES = {"ok": "green", "warning": "yellow", "wrong": "bold red"}


def _tell_checks(checks: list[Check]) -> None:
    from rich.console import Console as Terminal
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        remedy = f"; {check.remedy}" if check.remedy else ""
        style = _STYLES[check.level]
        text = Text(localized(shown(f"{check.text}{remedy}.")))
        table.add_row(Text(check.level, style=style), Text(check.name), text)
    terminal = Terminal(highlight=False)
    terminal.print(table)
    counts = {level: sum(check.level == level for check in checks) for level in _STYLES}
    warned = "1 warning" if counts["warning"] == 1 else f"{counts['warning']} warnings"
    terminal.print(Text(f"{counts['ok']} ok, {warned}, {counts['wrong']} wrong."))
