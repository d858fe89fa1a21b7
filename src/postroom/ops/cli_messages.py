"""`postroom messages` and `postroom dead`: see what became of a message, and decide."""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from postroom.errors import ConfigurationError, Refused
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
from postroom.ops.cli_jobs import carry_out

if TYPE_CHECKING:
    from postroom.dead_letters.store import Decided
    from postroom.ops.jobs import Wish

__all__ = ["dead", "messages"]

messages = typer.Typer(
    no_args_is_help=True, help="Look for messages, take them back, send them again."
)
dead = typer.Typer(no_args_is_help=True, help="Messages that need a person.")

T = TypeVar("T")

SourceOption = Annotated[
    str | None,
    typer.Option("--source", help="Died here only: 'outbox' or 'consumer:NAME'; else anywhere."),
]
IdArgument = Annotated[str, typer.Argument(metavar="ID", help="The message's id.")]
IdsArgument = Annotated[list[str], typer.Argument(metavar="ID…", help="The messages' ids.")]


TopicOption = Annotated[str | None, typer.Option("--topic", help="Only of this topic.")]
KeyOption = Annotated[str | None, typer.Option("--key", help="Only of this key.")]
TypeOption = Annotated[str | None, typer.Option("--type", help="Only of this type.")]
CodeOption = Annotated[str | None, typer.Option("--error-code", help="Only with this error.")]
SinceOption = Annotated[
    str | None, typer.Option("--since", metavar="TIME", help="From this time on, or 2h ago.")
]
UntilOption = Annotated[
    str | None, typer.Option("--until", metavar="TIME", help="Before this time, or 2h ago.")
]
AggregateTypeOption = Annotated[
    str | None, typer.Option("--aggregate-type", help="Only of this aggregate type.")
]
AggregateIdOption = Annotated[
    str | None, typer.Option("--aggregate-id", help="Only of this aggregate.")
]
ScanOption = Annotated[
    int, typer.Option("--scan", min=1, help="Most rows to look at in each place.")
]
RateOption = Annotated[float, typer.Option("--rate", help="Most messages a second.")]
ErrorsOption = Annotated[
    int, typer.Option("--max-errors", min=0, help="Stop when more than these died again.")
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Only count what would be sent.")]
ResumeOption = Annotated[
    str | None, typer.Option("--resume", metavar="JOB", help="Go on with a job that stopped.")
]
MostOption = Annotated[int | None, typer.Option("--limit", min=1, help="Most messages in all.")]


class MessageState(StrEnum):
    """The five states of a message, and words for the places that narrow one further."""

    pending = "pending"
    sending = "sending"
    succeeded = "succeeded"
    failed = "failed"
    aborted = "aborted"
    held = "held"
    delayed = "delayed"
    delivered = "delivered"
    dead = "dead"
    queued = "queued"
    resolved = "resolved"
    discarded = "discarded"
    expired = "expired"


class State(StrEnum):
    """What became of a dead letter."""

    dead = "dead"
    queued = "queued"
    resolved = "resolved"
    discarded = "discarded"


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
    console.record(run(actions.message(console.settings().require_database(), id)))


StatesOption = Annotated[
    list[MessageState] | None,
    typer.Option(
        "--state",
        metavar="STATE",
        help="pending, sending, succeeded, failed or aborted; or where one is: held, delayed, "
        "delivered, dead, queued, resolved, discarded, expired. May be given more than once.",
    ),
]


@messages.command("list")
def list_messages(
    context: typer.Context,
    state: StatesOption = None,
    topic: TopicOption = None,
    key: KeyOption = None,
    type: TypeOption = None,
    limit: LimitOption = 100,
    scan: ScanOption = 100_000,
    database: DatabaseOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Messages that wait: pending, sending and failed, unless --state names others."""
    from postroom.ops.search import WAITING, Wanted

    console = Console.of(context, database=database, config=config, as_json=as_json)
    states = [one.value for one in state or ()] or list(WAITING)
    _search(console, Wanted(topic=topic, key=key, type=type), states, limit, scan)


@messages.command()
def find(
    context: typer.Context,
    text: Annotated[
        str | None, typer.Argument(metavar="[TEXT]", help="Text that the payload holds.")
    ] = None,
    topic: TopicOption = None,
    key: KeyOption = None,
    type: TypeOption = None,
    aggregate_type: AggregateTypeOption = None,
    aggregate_id: AggregateIdOption = None,
    error_code: CodeOption = None,
    since: SinceOption = None,
    until: UntilOption = None,
    state: StatesOption = None,
    limit: LimitOption = 100,
    scan: ScanOption = 1_000_000,
    database: DatabaseOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Look for messages everywhere, delivered ones and dead letters too."""
    from postroom.ops.desk import moment
    from postroom.ops.search import Wanted
    from postroom.ops.states import OBSERVED

    console = Console.of(context, database=database, config=config, as_json=as_json)
    wanted = Wanted(
        topic=topic,
        key=key,
        type=type,
        aggregate_type=aggregate_type,
        aggregate_id=aggregate_id,
        error_code=error_code,
        since=moment(since, "--since"),
        until=moment(until, "--until"),
        text=text,
    )
    if wanted.is_empty:
        raise ConfigurationError("say what to look for: TEXT, --key, --topic, --type, --since …")
    _search(console, wanted, [one.value for one in state or ()] or list(OBSERVED), limit, scan)


def _search(console: Console, wanted: Any, states: list[str], limit: int, scan: int) -> None:
    from postroom.ops.search import search

    url = console.settings().require_database()
    shown = not console.as_json and sys.stderr.isatty()

    def progress(looked_at: int) -> None:
        if shown:
            print(f"\r{looked_at:,} looked at", end="", file=sys.stderr, flush=True)

    found = run(search(url, wanted, states=states, limit=limit, scan=scan, progress=progress))
    if shown:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    if found.messages or console.as_json:
        columns = ("id", "state", "topic", "key", "type", "attempts", "error_code", "created_at")
        console.table(
            found.messages, columns, [[one[name] for name in columns] for one in found.messages]
        )
    else:
        print("Nothing found.")
    if not found.complete and not console.as_json:
        more = "the first that fit" if len(found.messages) >= limit else "not everything"
        print(f"{found.looked_at:,} looked at, {more}; see --limit and --scan.", file=sys.stderr)


@messages.command()
def cancel(
    context: typer.Context,
    ids: IdsArgument,
    reason: NeededReasonOption,
    database: DatabaseOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take back messages that were not sent yet; they are kept as discarded letters."""
    from postroom.ops import actions

    console = Console.of(context, database=database, config=config, as_json=as_json)
    url = console.settings().require_database()

    def tell(done: Any) -> None:
        doubt = "; it was tried before, so it may have arrived" if done.may_have_arrived else ""
        console.answer(
            {"id": done.id, "state": "discarded", "may_have_arrived": done.may_have_arrived},
            f"{done.id} is taken back{doubt}.",
        )

    _each(ids, lambda id: actions.cancel(url, id, why=reason), tell)


@messages.command()
def replay(
    context: typer.Context,
    since: SinceOption = None,
    until: UntilOption = None,
    topic: TopicOption = None,
    key: KeyOption = None,
    type: TypeOption = None,
    to: Annotated[
        str | None, typer.Option("--to", metavar="TOPIC", help="Send them to this topic instead.")
    ] = None,
    requests: Annotated[
        bool,
        typer.Option("--requests", help="Requests of the ledger too: they are carried out again."),
    ] = False,
    rate: RateOption = 100.0,
    max_errors: ErrorsOption = 10,
    limit: MostOption = None,
    dry_run: DryRunOption = False,
    resume: ResumeOption = None,
    reason: ReasonOption = None,
    database: DatabaseOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send delivered messages again, with the same ids, from the time they were delivered in."""
    console = Console.of(context, database=database, config=config, as_json=as_json)

    def wish() -> Wish:
        from postroom.ops.desk import moment
        from postroom.ops.jobs import Wish

        if since is None:
            raise ConfigurationError("say from when on: --since 2h, or --since 2026-11-15T12:00.")
        return Wish(
            topic=topic,
            key=key,
            type=type,
            since=moment(since, "--since"),
            until=moment(until, "--until"),
            limit=limit,
            rate=rate,
            max_errors=max_errors,
            to=to,
            requests=requests,
        )

    carry_out(console, "replay", wish, dry_run=dry_run, resume=resume, why=reason)


@dead.command("list")
def list_dead(
    context: typer.Context,
    state: Annotated[State, typer.Option("--state", help="What became of them.")] = State.dead,
    source: SourceOption = None,
    limit: LimitOption = 100,
    database: DatabaseOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Dead letters, newest first."""
    from postroom.ops import actions

    console = Console.of(context, database=database, config=config, as_json=as_json)
    url = console.settings().require_database()
    found = run(actions.dead_list(url, state=state.value, rows=limit, source=source))
    if not found and not console.as_json:
        print(f"No {state.value} letters.")
        return
    columns = ["id", "topic", "key", "type", "attempts", "error_code", "error", "died_at"]
    if any(letter["source"] != "outbox" for letter in found):
        columns.append("source")
    console.table(found, columns, [[letter[name] for name in columns] for letter in found])


@dead.command("show")
def show_dead(
    context: typer.Context,
    id: IdArgument,
    source: SourceOption = None,
    database: DatabaseOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """One dead letter with its payload and all its attempts."""
    from postroom.ops import actions

    console = Console.of(context, database=database, config=config, as_json=as_json)
    url = console.settings().require_database()
    console.record(run(actions.dead_show(url, id, source=source)))


@dead.command("retry")
def retry_dead(
    context: typer.Context,
    ids: IdsArgument,
    source: SourceOption = None,
    reason: ReasonOption = None,
    database: DatabaseOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send dead letters again, with the same id, to where they died."""
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

    _each(ids, lambda id: actions.retry(url, id, why=reason, source=source), tell)


@dead.command()
def redrive(
    context: typer.Context,
    topic: TopicOption = None,
    key: KeyOption = None,
    type: TypeOption = None,
    error_code: CodeOption = None,
    since: SinceOption = None,
    until: UntilOption = None,
    every: Annotated[bool, typer.Option("--all", help="Every dead letter.")] = False,
    source: SourceOption = None,
    rate: RateOption = 100.0,
    canary: Annotated[
        int, typer.Option("--canary", min=0, help="Send so many first, and see them delivered.")
    ] = 0,
    canary_seconds: Annotated[
        float, typer.Option("--canary-seconds", min=1, help="How long the canary may take.")
    ] = 60.0,
    max_errors: ErrorsOption = 10,
    limit: MostOption = None,
    dry_run: DryRunOption = False,
    resume: ResumeOption = None,
    reason: ReasonOption = None,
    database: DatabaseOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send many dead letters again, as a job: at a pace, resumable, stopped by errors."""
    console = Console.of(context, database=database, config=config, as_json=as_json)

    def wish() -> Wish:
        from postroom.ops.desk import moment
        from postroom.ops.jobs import Wish

        if every == any((topic, key, type, error_code, since, until)):
            raise ConfigurationError("say which: --topic, --error-code, --since …, or --all.")
        return Wish(
            topic=topic,
            key=key,
            type=type,
            error_code=error_code,
            since=moment(since, "--since"),
            until=moment(until, "--until"),
            limit=limit,
            rate=rate,
            canary=canary,
            canary_seconds=canary_seconds,
            max_errors=max_errors,
            source=source,
        )

    carry_out(console, "redrive", wish, dry_run=dry_run, resume=resume, why=reason)


@dead.command("discard")
def discard_dead(
    context: typer.Context,
    ids: IdsArgument,
    reason: NeededReasonOption,
    source: SourceOption = None,
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

    _each(ids, lambda id: actions.discard(url, id, why=reason, source=source), tell)


def _each(
    ids: list[str],
    decide: Callable[[str], Coroutine[Any, Any, T]],
    tell: Callable[[T], None],
) -> None:
    """Decide on each message by itself and say so; those that cannot be are named at the end."""
    refused: list[str] = []
    for id in ids:
        try:
            tell(run(decide(id)))
        except Refused as error:
            refused.append(str(error))
    if refused:
        raise Refused(" ".join(refused))
