"""`postroom jobs`, and how `dead redrive` and `messages replay` run theirs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from postroom.errors import Refused
from postroom.ops.cli_common import (
    ConfigOption,
    Console,
    DatabaseOption,
    JsonOption,
    LimitOption,
    ReasonOption,
    run,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from postroom.ops.jobs import Job, Wish

__all__ = ["carry_out", "jobs"]

jobs = typer.Typer(no_args_is_help=True, help="Redrives and replays of many messages.")

JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="Its id.")]


@jobs.command("list")
def list_jobs(
    context: typer.Context,
    limit: LimitOption = 20,
    database: DatabaseOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """The newest jobs, and how they stand."""
    from postroom.ops.jobs import jobs as newest

    console = Console.of(context, database=database, config=config, as_json=as_json)
    found = [job.told() for job in run(newest(console.settings().require_database(), rows=limit))]
    if not found and not console.as_json:
        print("No jobs.")
        return
    columns = ("job", "kind", "state", "queued", "total", "who", "created_at", "note")
    console.table(found, columns, [[job[name] for name in columns] for job in found])


@jobs.command()
def show(
    context: typer.Context,
    job: JobArgument,
    database: DatabaseOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """One job: what it is about, how far it has come, what became of its messages."""
    from postroom.ops.jobs import show as look

    console = Console.of(context, database=database, config=config, as_json=as_json)
    console.record(run(look(console.settings().require_database(), job)).told())


@jobs.command()
def stop(
    context: typer.Context,
    job: JobArgument,
    reason: ReasonOption = None,
    database: DatabaseOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Stop a job, wherever it runs; it may be resumed."""
    from postroom.ops.jobs import stop as end

    console = Console.of(context, database=database, config=config, as_json=as_json)
    told = run(end(console.settings().require_database(), job, why=reason)).told()
    console.answer(told, f"{job} is stopped after {told['queued']} of {told['total']}.")


def carry_out(
    console: Console,
    kind: str,
    wish: Callable[[], Wish],
    *,
    dry_run: bool,
    resume: str | None,
    why: str | None,
) -> None:
    """Count, begin or resume a job, and show how it goes until it ends."""
    from postroom.ops import jobs as room

    url = console.settings().require_database()
    if not resume:
        _tell_left_out(console, run(room.left_out(url, kind, wish())))
    if dry_run:
        _tell_count(console, run(room.count(url, kind, wish())))
        return
    job = run(room.show(url, resume) if resume else room.begin(url, kind, wish(), why=why))
    if job.kind != kind:
        raise Refused(f"job {job.id} is a {job.kind}, not a {kind}.")
    with _bar(console, job) as progress:
        job = run(room.work(url, job.id, progress=progress))
    told = job.told()
    died = f", {told['died_again']} died again" if told["died_again"] else ""
    sentence = f"job {job.id} is {job.state}: {job.queued} of {job.total} queued{died}"
    console.answer(told, f"{sentence}; {job.note}." if job.note else f"{sentence}.")
    if job.state != "done":
        raise typer.Exit(1)


def _tell_left_out(console: Console, count: int) -> None:
    if count and not console.as_json:
        print(
            f"{count} requests of the ledger are left out: they were carried out, and --requests "
            "sends them again."
        )


def _tell_count(console: Console, groups: list[dict[str, Any]]) -> None:
    total = sum(group["count"] for group in groups)
    columns = ["topic", "type", "error_code", "count"]
    if any(group["source"] not in (None, "outbox") for group in groups):
        columns.append("source")
    rows = [[group[name] for name in columns] for group in groups]
    console.table({"total": total, "groups": groups}, columns, rows)
    if not console.as_json:
        print(f"{total} messages; nothing was changed.")
    if not total:
        raise typer.Exit(1)


@contextmanager
def _bar(console: Console, job: Job) -> Iterator[Callable[[Job], None]]:
    """A bar on a terminal; nothing where a program reads."""
    if console.as_json or not sys.stderr.isatty():
        yield lambda now: None
        return
    from rich.console import Console as Terminal
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Terminal(stderr=True)) as bar:
        task = bar.add_task(job.kind, total=job.total, completed=job.queued, note="")

        def show(now: Job) -> None:
            outcomes = now.outcomes
            note = f"{outcomes.get('resolved', 0)} delivered, {outcomes.get('dead', 0)} died again"
            bar.update(task, completed=now.queued, note=note)

        yield show
