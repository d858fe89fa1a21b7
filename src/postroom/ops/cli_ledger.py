"""`postroom ledger …`: requests sent through the outbox, and what became of them."""

from __future__ import annotations

from typing import Annotated

import typer

from postroom.ops.cli_common import (
    ConfigOption,
    Console,
    DatabaseOption,
    JsonOption,
    LimitOption,
    NeededReasonOption,
    run,
)

__all__ = ["ledger"]

ledger = typer.Typer(no_args_is_help=True, help="Requests, and what became of them.")

NameArgument = Annotated[str, typer.Argument(metavar="KEY", help="The request's key, or its id.")]
ScopeOption = Annotated[
    str | None, typer.Option("--scope", metavar="NAME", help="Whose key it is, if several have it.")
]


@ledger.command("list")
def list_ledger(
    context: typer.Context,
    state: Annotated[
        str | None,
        typer.Option("--state", help="accepted, succeeded, failed or unknown; else all."),
    ] = None,
    limit: LimitOption = 100,
    database: DatabaseOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Requests, newest first."""
    from postroom.ops import register

    console = Console.of(context, database=database, config=config, as_json=as_json)
    url = console.settings().require_database()
    found = run(register.ledger_list(url, state=state, rows=limit))
    if not found and not console.as_json:
        print("The ledger has no such request.")
        return
    columns = ["id", "scope", "key", "state", "attempts", "error_code", "accepted_at"]
    console.table(found, columns, [[one[name] for name in columns] for one in found])


@ledger.command("show")
def show_ledger(
    context: typer.Context,
    name: NameArgument,
    scope: ScopeOption = None,
    database: DatabaseOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Everything the ledger knows of one request."""
    from postroom.ops import register

    console = Console.of(context, database=database, config=config, as_json=as_json)
    url = console.settings().require_database()
    console.record(run(register.ledger_show(url, name, scope=scope)))


@ledger.command("resolve")
def resolve_ledger(
    context: typer.Context,
    name: NameArgument,
    reason: NeededReasonOption,
    state: Annotated[str, typer.Option("--as", help="succeeded or failed.")],
    scope: ScopeOption = None,
    database: DatabaseOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what became of a request that is unknown, once you have found out.

    Its dead letter is discarded, so that it is not sent again.
    """
    from postroom.ops import register

    console = Console.of(context, database=database, config=config, as_json=as_json)
    url = console.settings().require_database()
    done = run(register.resolve(url, name, state, why=reason, scope=scope))
    console.answer(done, f"request {done['key']} is {done['state']}.")
