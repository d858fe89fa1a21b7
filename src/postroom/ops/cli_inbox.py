"""`postroom inbox …`: what consumers have handled, and what waits in them."""

from __future__ import annotations

from typing import Annotated

import typer

from postroom.ops.cli_common import (
    ConfigOption,
    Console,
    DatabaseOption,
    JsonOption,
    LimitOption,
    ReasonOption,
    run,
)

__all__ = ["inbox"]

inbox = typer.Typer(no_args_is_help=True, help="What consumers have handled, and what waits.")

ConsumerOption = Annotated[
    str | None, typer.Option("--consumer", metavar="NAME", help="Of this consumer only.")
]


@inbox.command("list")
def list_inbox(
    context: typer.Context,
    consumer: ConsumerOption = None,
    held: Annotated[
        bool, typer.Option("--held", help="What failed, waits behind it, or died.")
    ] = False,
    limit: LimitOption = 100,
    database: DatabaseOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """What consumers have taken on, newest first; or what waits in them."""
    from postroom.ops import consumers as work

    console = Console.of(context, database=database, config=config, as_json=as_json)
    url = console.settings().require_database()
    look = work.waiting_list if held else work.inbox_list
    found = run(look(url, consumer=consumer, rows=limit))
    if not found and not console.as_json:
        print("Nothing waits." if held else "Nothing was handled yet.")
        return
    columns = ["consumer", "message_id", "at"]
    if held:
        columns = [
            *("consumer", "message_id", "state", "topic", "key", "type", "attempts"),
            *("error_code", "error", "retry_in_seconds"),
        ]
    console.table(found, columns, [[one[name] for name in columns] for one in found])


@inbox.command("show")
def show_inbox(
    context: typer.Context,
    consumer: Annotated[str, typer.Argument(metavar="CONSUMER", help="The consumer's name.")],
    message_id: Annotated[str, typer.Argument(metavar="ID", help="The message's id.")],
    database: DatabaseOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """What one consumer knows of one message: handled, or waiting, with all its attempts."""
    from postroom.ops import consumers as work

    console = Console.of(context, database=database, config=config, as_json=as_json)
    url = console.settings().require_database()
    console.record(run(work.inbox_show(url, consumer, message_id)))


@inbox.command("prune")
def prune_inbox(
    context: typer.Context,
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
    """Forget what was handled long ago. A copy that comes later is handled again."""
    from postroom.ops.cli_house import prune

    prune(
        context,
        only=["inbox"],
        older_than=older_than,
        dry_run=dry_run,
        reason=reason,
        database=database,
        config=config,
        as_json=as_json,
    )
