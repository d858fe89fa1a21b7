"""`postroom keys …`: what became of requests with idempotency keys, and the end of a doubt."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from postroom.ops.cli_common import (
    ConfigOption,
    Console,
    DatabaseOption,
    JsonOption,
    LimitOption,
    NeededReasonOption,
    ReasonOption,
    run,
)

__all__ = ["keys"]

keys = typer.Typer(no_args_is_help=True, help="Idempotency keys: what became of requests.")

OperationArgument = Annotated[
    str, typer.Argument(metavar="OPERATION", help='What it is about, such as "POST /orders".')
]
KeyArgument = Annotated[str, typer.Argument(metavar="KEY", help="The client's key.")]
ScopeOption = Annotated[
    str | None, typer.Option("--scope", metavar="SCOPE", help="Whose key, if several have it.")
]


@keys.command("list")
def list_keys(
    context: typer.Context,
    status: Annotated[
        str | None,
        typer.Option("--status", help="pending, completed, failed or indeterminate."),
    ] = None,
    operation: Annotated[
        str | None, typer.Option("--operation", metavar="NAME", help="Of this operation only.")
    ] = None,
    scope: ScopeOption = None,
    limit: LimitOption = 100,
    database: DatabaseOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Keys and what became of their requests."""
    from postroom.ops import keys as work

    console = Console.of(context, database=database, config=config, as_json=as_json)
    url = console.settings().require_database()
    found = run(work.keys_list(url, status=status, operation=operation, scope=scope, rows=limit))
    if not found and not console.as_json:
        print("There are no such keys." if status or operation or scope else "There are no keys.")
        return
    columns = [
        *("operation", "key", "scope", "status", "mode", "attempts", "response_status"),
        *("recovery_point", "error"),
    ]
    console.table(found, columns, [[one[name] for name in columns] for one in found])


@keys.command("show")
def show_key(
    context: typer.Context,
    operation: OperationArgument,
    key: KeyArgument,
    scope: ScopeOption = None,
    body: Annotated[bool, typer.Option("--body", help="Show the answer's body too.")] = False,
    database: DatabaseOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """All that is known of one key."""
    from postroom.ops import keys as work

    console = Console.of(context, database=database, config=config, as_json=as_json)
    url = console.settings().require_database()
    console.record(run(work.keys_show(url, operation, key, scope=scope, body=body)))


@keys.command("resolve")
def resolve_key(
    context: typer.Context,
    operation: OperationArgument,
    key: KeyArgument,
    reason: NeededReasonOption,
    done: Annotated[
        bool, typer.Option("--done", help="It was carried out: with what to answer.")
    ] = False,
    not_done: Annotated[
        bool, typer.Option("--not-done", help="It was not: the next request is carried out.")
    ] = False,
    status: Annotated[
        int | None,
        typer.Option("--status", min=200, max=499, help="With --done: the answer's status; 200."),
    ] = None,
    content: Annotated[
        str | None, typer.Option("--body", metavar="TEXT", help="With --done: the answer's body.")
    ] = None,
    content_type: Annotated[
        str | None,
        typer.Option("--content-type", metavar="TYPE", help="Of the body; application/json."),
    ] = None,
    scope: ScopeOption = None,
    database: DatabaseOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Decide about a request of which nobody knows whether it was carried out."""
    from postroom.errors import ConfigurationError
    from postroom.idempotency.rules import Answer
    from postroom.ops import keys as work

    if done and not_done:
        raise ConfigurationError("say one of --done and --not-done.")
    if not done and not not_done:
        raise ConfigurationError("say --done, with what to answer, or --not-done.")
    given = {"--status": status, "--body": content, "--content-type": content_type}
    said = [name for name, value in given.items() if value is not None]
    if said and not done:
        raise ConfigurationError(f"{said[0]} is for --done: what was not done has no answer.")
    if content and content_type is None and not _is_json(content):
        raise ConfigurationError("the --body is not JSON: mend it, or say its --content-type.")
    headers = (("content-type", content_type or "application/json"),) if content else ()
    answer = Answer(status or 200, headers, (content or "").encode()) if done else None
    console = Console.of(context, database=database, config=config, as_json=as_json)
    url = console.settings().require_database()
    told = run(work.keys_resolve(url, operation, key, answer=answer, why=reason, scope=scope))
    sentence = (
        f"{operation} with key {key!r} is answered {answer.status} from now on."
        if answer
        else f"{operation} with key {key!r} was not done: the next request with it is carried out."
    )
    console.answer(told, sentence)


def _is_json(text: str) -> bool:
    def refuse(constant: str) -> None:
        raise ValueError(constant)  # NaN and its like, which Python alone reads

    try:
        json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return False
    return True


@keys.command("prune")
def prune_keys(
    context: typer.Context,
    older_than: Annotated[
        str | None,
        typer.Option("--older-than", metavar="AGE", help="Expired so long ago: 15m, 24h, 7d."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would go, and delete nothing.")
    ] = False,
    reason: ReasonOption = None,
    database: DatabaseOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Forget answers that have expired; never what is pending, half done or in doubt."""
    from postroom.ops.cli_house import prune

    prune(
        context,
        only=["keys"],
        older_than=older_than,
        dry_run=dry_run,
        reason=reason,
        database=database,
        config=config,
        as_json=as_json,
    )
