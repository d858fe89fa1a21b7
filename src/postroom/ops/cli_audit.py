"""`postroom audit`: the entries that commands, rebinds and redrive rules have left."""

from __future__ import annotations

from typing import Annotated

import typer

from postroom.ops.cli_common import (
    ConfigOption,
    Console,
    DatabaseOption,
    JsonOption,
    LimitOption,
    run,
)

__all__ = ["audit"]

audit = typer.Typer(no_args_is_help=True, help="The audit: who changed what, when and why.")


@audit.command("list")
def list_entries(
    context: typer.Context,
    who: Annotated[
        str | None, typer.Option("--who", metavar="NAME", help="Only of this user@host or rule.")
    ] = None,
    what: Annotated[
        str | None,
        typer.Option(
            "--what", metavar="ACTION", help="Only this action, such as dead.retry or dead."
        ),
    ] = None,
    subject: Annotated[
        str | None,
        typer.Option(
            "--subject", metavar="TEXT", help="Only subjects with this text, such as an id."
        ),
    ] = None,
    since: Annotated[
        str | None, typer.Option("--since", metavar="TIME", help="Not before: a time, or 2h ago.")
    ] = None,
    until: Annotated[
        str | None, typer.Option("--until", metavar="TIME", help="Before: a time, or 2h ago.")
    ] = None,
    before: Annotated[
        int | None, typer.Option("--before", metavar="ENTRY", help="Older than this entry.")
    ] = None,
    limit: LimitOption = 100,
    database: DatabaseOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """List audit entries, newest first."""
    from postroom.ops import actions
    from postroom.ops.desk import moment

    console = Console.of(context, database=database, config=config, as_json=as_json)
    found = run(
        actions.audit_list(
            console.settings().require_database(),
            who=who,
            what=what,
            subject=subject,
            since=moment(since, "--since"),
            until=moment(until, "--until"),
            before=before,
            rows=limit,
        )
    )
    if not found and not console.as_json:
        print("The audit has no such entries.")
        return
    columns = ("entry", "at", "who", "what", "subject", "why")
    console.table(found, columns, [[one[name] for name in columns] for one in found])
