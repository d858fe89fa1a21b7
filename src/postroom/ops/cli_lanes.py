"""`postroom lanes` and `postroom keys-held`: see what is held up, and let it go on."""

from __future__ import annotations

from typing import Annotated

import typer

from postroom.errors import ConfigurationError
from postroom.messages import LANES
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

__all__ = ["keys_held", "lanes"]

lanes = typer.Typer(no_args_is_help=True, help="The lanes, and who works them.")
keys_held = typer.Typer(no_args_is_help=True, help="Keys that wait behind a failed message.")

LanesArgument = Annotated[
    list[int] | None, typer.Argument(metavar="LANE…", help="Their numbers, 0 to 15.")
]
AllOption = Annotated[bool, typer.Option("--all", help="Every lane.")]
TopicArgument = Annotated[str, typer.Argument(metavar="TOPIC")]
KeyArgument = Annotated[str, typer.Argument(metavar="KEY")]


@lanes.command("list")
def list_lanes(
    context: typer.Context,
    database: DatabaseOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Every lane: who works it, whether it is paused, what waits in it."""
    from postroom.ops import actions

    console = Console.of(context, database=database, config=config, as_json=as_json)
    found = run(actions.lanes(console.settings().require_database()))
    console.table(
        found,
        ("lane", "worked by", "epoch", "lease", "pending", "held", "oldest", ""),
        [
            (
                lane["lane"],
                lane["owner_name"] or lane["owner"] or "nobody",
                lane["epoch"],
                lease(lane["lease_seconds"]),
                many(lane["pending"]),
                many(lane["held"]),
                "" if lane["oldest_seconds"] is None else f"{lane['oldest_seconds']:.1f} s",
                "paused" if lane["paused"] else "",
            )
            for lane in found
        ],
    )


@lanes.command()
def pause(
    context: typer.Context,
    numbers: LanesArgument = None,
    every: AllOption = False,
    reason: ReasonOption = None,
    database: DatabaseOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Stop sending from lanes, and wait until nothing of them is under way."""
    from postroom.ops import actions

    console = Console.of(context, database=database, config=config, as_json=as_json)
    url = console.settings().require_database()
    for told in run(actions.pause(url, _wanted(numbers, every), why=reason)):
        rest = "still sending its last batch" if told["sending"] else "nothing of it is under way"
        now = "is paused" if told["changed"] else "was paused already"
        console.answer(told, f"lane {told['lane']} {now}; {rest}.")


@lanes.command()
def resume(
    context: typer.Context,
    numbers: LanesArgument = None,
    every: AllOption = False,
    reason: ReasonOption = None,
    database: DatabaseOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let paused lanes go on."""
    from postroom.ops import actions

    console = Console.of(context, database=database, config=config, as_json=as_json)
    url = console.settings().require_database()
    for told in run(actions.resume(url, _wanted(numbers, every), why=reason)):
        now = "goes on" if told["changed"] else "was not paused"
        console.answer(told, f"lane {told['lane']} {now}.")


@lanes.command()
def release(
    context: typer.Context,
    numbers: LanesArgument = None,
    every: AllOption = False,
    reason: ReasonOption = None,
    database: DatabaseOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take lanes from the relay that owns them, for one that hangs.

    Another relay, or the same, takes them again. What was under way may be sent twice.
    """
    from postroom.ops import actions

    console = Console.of(context, database=database, config=config, as_json=as_json)
    url = console.settings().require_database()
    for told in run(actions.release_lane(url, _wanted(numbers, every), why=reason)):
        now = "is free" if told["released"] else "had no owner"
        console.answer(told, f"lane {told['lane']} {now}.")


def _wanted(numbers: list[int] | None, every: bool) -> list[int]:
    if bool(numbers) == every:
        raise ConfigurationError("say which lanes by their numbers, or --all.")
    return list(range(LANES)) if every else list(numbers or [])


def lease(seconds: float | None) -> str:
    """How long a lease lasts, for people."""
    if seconds is None:
        return ""
    return f"{seconds:.0f} s" if seconds > 0 else "over"


def many(count: int, limit: int = 1000) -> str:
    """A count that stops at a limit, for people."""
    return f"{count}+" if count >= limit else str(count)


@keys_held.command("list")
def list_keys(
    context: typer.Context,
    limit: LimitOption = 100,
    database: DatabaseOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Keys that wait: behind a dead letter, or behind a message in its back-off."""
    from postroom.ops import actions

    console = Console.of(context, database=database, config=config, as_json=as_json)
    found = run(actions.keys_held(console.settings().require_database(), rows=limit))
    if not found and not console.as_json:
        print("No key is held.")
        return
    console.table(
        found,
        ("id", "topic", "key", "state", "messages", "attempts", "error_code", "next try"),
        [
            (
                one["id"],
                one["topic"],
                one["key"],
                "dead" if one["dead"] else "held",
                many(one["messages"]),
                one["attempts"],
                one["error_code"],
                "by hand" if one["dead"] else f"in {one['retry_in_seconds']:.0f} s",
            )
            for one in found
        ],
    )


@keys_held.command()
def skip(
    context: typer.Context,
    topic: TopicArgument,
    key: KeyArgument,
    reason: NeededReasonOption,
    database: DatabaseOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Give up the message a key waits for, so that the next one goes on."""
    from postroom.ops import actions

    console = Console.of(context, database=database, config=config, as_json=as_json)
    url = console.settings().require_database()
    done = run(actions.skip_key(url, topic, key, why=reason))
    doubt = "; it was tried, so it may have arrived" if done.may_have_arrived else ""
    console.answer(
        {"id": done.id, "state": "discarded", "may_have_arrived": done.may_have_arrived},
        f"{done.id} is discarded, and the next message of {key!r} goes on{doubt}.",
    )


@keys_held.command("release")
def release_key(
    context: typer.Context,
    topic: TopicArgument,
    key: KeyArgument,
    reason: ReasonOption = None,
    database: DatabaseOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Try the message a key waits for now: end its back-off, or retry the dead letter."""
    from postroom.ops import actions

    console = Console.of(context, database=database, config=config, as_json=as_json)
    url = console.settings().require_database()
    id = run(actions.release_key(url, topic, key, why=reason))
    console.answer({"id": id, "state": "queued"}, f"{id} is tried now.")
