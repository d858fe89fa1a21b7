"""`postroom status`, `postroom messages` and `postroom dead`: see how it stands, and decide."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from postroom.errors import Refused
from postroom.ops.cli_common import ConfigOption, Console, DatabaseOption, JsonOption, run

if TYPE_CHECKING:
    from postroom.dead_letters.store import Decided

__all__ = ["dead", "messages", "status"]

messages = typer.Typer(no_args_is_help=True, help="Look at single messages.")
dead = typer.Typer(no_args_is_help=True, help="Messages that need a person.")

IdArgument = Annotated[str, typer.Argument(metavar="ID", help="The message's id.")]
IdsArgument = Annotated[list[str], typer.Argument(metavar="ID…", help="The messages' ids.")]


class State(StrEnum):
    """What became of a dead letter."""

    dead = "dead"
    queued = "queued"
    resolved = "resolved"
    discarded = "discarded"


def status(
    context: typer.Context,
    database: DatabaseOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """How the outbox stands: backlog, age, lanes and who works them."""
    from postroom.ops import actions

    console = Console.of(context, database=database, config=config, as_json=as_json)
    state = run(actions.status(console.settings().require_database()))
    if console.as_json:
        print(json.dumps(state, ensure_ascii=False))
        return
    limit = state["count_limit"]
    for name, what in (
        ("pending", "to be sent"),
        ("held", "waiting behind a failure or a dead letter"),
        ("delayed", "not due yet"),
        ("dead", "dead letters that need a person"),
    ):
        more = "+" if state[name] >= limit else ""
        print(f"{state[name]:>8}{more} {name:8} {what}")
    oldest = state["oldest_pending_seconds"]
    print("oldest pending: " + ("none" if oldest is None else f"{oldest:.1f} s"))
    console.table(
        None,
        ("lane", "worked by", "epoch", "lease", ""),
        [
            (
                lane["lane"],
                lane["owner_name"] or lane["owner"] or "nobody",
                lane["epoch"],
                _lease(lane["lease_seconds"]),
                "paused" if lane["paused"] else "",
            )
            for lane in state["lanes"]
        ],
    )


def _lease(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds:.0f} s" if seconds > 0 else "over"


@messages.command("show")
def show_message(
    context: typer.Context,
    id: IdArgument,
    database: DatabaseOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """One message, wherever it is: its state, its content, its attempts."""
    from postroom.ops import actions

    console = Console.of(context, database=database, config=config, as_json=as_json)
    _tell(console, run(actions.message(console.settings().require_database(), id)))


@dead.command("list")
def list_dead(
    context: typer.Context,
    state: Annotated[State, typer.Option("--state", help="What became of them.")] = State.dead,
    limit: Annotated[int, typer.Option("--limit", min=1, max=10_000)] = 100,
    database: DatabaseOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Dead letters, newest first."""
    from postroom.ops import actions

    console = Console.of(context, database=database, config=config, as_json=as_json)
    url = console.settings().require_database()
    found = run(actions.dead_list(url, state=state.value, rows=limit))
    if not found and not console.as_json:
        print(f"No {state.value} letters.")
        return
    columns = ("id", "topic", "key", "type", "attempts", "error_code", "error", "died_at")
    console.table(found, columns, [[letter[name] for name in columns] for letter in found])


@dead.command("show")
def show_dead(
    context: typer.Context,
    id: IdArgument,
    database: DatabaseOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """One dead letter with its payload and all its attempts."""
    from postroom.ops import actions

    console = Console.of(context, database=database, config=config, as_json=as_json)
    _tell(console, run(actions.dead_show(console.settings().require_database(), id)))


@dead.command("retry")
def retry_dead(
    context: typer.Context,
    ids: IdsArgument,
    reason: Annotated[str | None, typer.Option("--reason", help="Why, for the audit.")] = None,
    database: DatabaseOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send dead letters again, with the same id."""
    from postroom.ops import actions

    console = Console.of(context, database=database, config=config, as_json=as_json)
    url = console.settings().require_database()

    def tell(done: Decided) -> None:
        order = (
            "it goes before what waits behind it"
            if done.in_order
            else "later messages of its key may have gone before it: order was given up"
        )
        console.answer(
            {"id": done.id, "state": "queued", "in_order": done.in_order},
            f"{done.id} is queued; {order}.",
        )

    _each(ids, lambda id: actions.retry(url, id, why=reason), tell)


@dead.command("discard")
def discard_dead(
    context: typer.Context,
    ids: IdsArgument,
    reason: Annotated[str, typer.Option("--reason", help="Why, for the audit.")],
    database: DatabaseOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Give dead letters up; if one holds its key, the next message of the key goes on."""
    from postroom.ops import actions

    console = Console.of(context, database=database, config=config, as_json=as_json)
    url = console.settings().require_database()

    def tell(done: Decided) -> None:
        console.answer({"id": done.id, "state": "discarded"}, f"{done.id} is discarded.")

    _each(ids, lambda id: actions.discard(url, id, why=reason), tell)


def _each(
    ids: list[str],
    decide: Callable[[str], Coroutine[Any, Any, Decided]],
    tell: Callable[[Decided], None],
) -> None:
    """Decide on each letter by itself and say so; those that cannot be are named at the end."""
    refused: list[str] = []
    for id in ids:
        try:
            tell(run(decide(id)))
        except Refused as error:
            refused.append(str(error))
    if refused:
        raise Refused(" ".join(refused))


def _tell(console: Console, fields: dict[str, Any]) -> None:
    """Everything about one thing: a document for programs, a line a field for people."""
    if console.as_json:
        print(json.dumps(fields, ensure_ascii=False))
        return
    history = fields.pop("history", None) or []
    shown = [(name, _text(value)) for name, value in fields.items() if value not in (None, "")]
    console.table(None, ("field", "value"), shown)
    if history:
        print("\nattempts")
        columns = ("attempt", "at", "code", "error", "worker")
        console.table(None, columns, [[one.get(name) for name in columns] for one in history])


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
