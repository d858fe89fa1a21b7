"""The `postroom` command: its groups, the options they share, and how it ends.

Exit codes: 0 all is well; 1 refused, or something was found wrong; 2 wrong usage or configuration;
3 a server cannot be reached. An error is one sentence on stderr, without secrets and without a
traceback; POSTROOM_DEBUG=1 adds the traceback.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NoReturn

import typer

from postroom.errors import ConfigurationError, PostroomError, Unreachable
from postroom.ops import (
    cli_audit,
    cli_consume,
    cli_db,
    cli_gateway,
    cli_house,
    cli_inbox,
    cli_jobs,
    cli_keys,
    cli_lanes,
    cli_ledger,
    cli_messages,
    cli_relay,
    cli_status,
)
from postroom.ops.cli_common import (
    BrokerOption,
    ConfigOption,
    Console,
    DatabaseOption,
    JsonOption,
    localized,
    run,
    shown,
)
from postroom.signals import redact

__all__ = ["app", "command", "main"]

EXIT_REFUSED, EXIT_USAGE, EXIT_UNREACHABLE, EXIT_INTERRUPTED = 1, 2, 3, 130

app = typer.Typer(
    name="postroom",
    help="Transactional messaging: a committed fact is never lost and never invented.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(cli_db.app, name="db")
app.command("relay")(cli_relay.relay)
app.command("consume")(cli_consume.consume)
app.command("status")(cli_status.status)
app.command("verify")(cli_house.verify)
app.command("doctor")(cli_house.doctor)
app.command("prune")(cli_house.prune)
app.add_typer(cli_messages.messages, name="messages")
app.add_typer(cli_messages.dead, name="dead")
app.add_typer(cli_lanes.lanes, name="lanes")
app.add_typer(cli_lanes.keys_held, name="keys-held")
app.add_typer(cli_jobs.jobs, name="jobs")
app.add_typer(cli_inbox.inbox, name="inbox")
app.add_typer(cli_keys.keys, name="keys")
app.add_typer(cli_ledger.ledger, name="ledger")
app.add_typer(cli_audit.audit, name="audit")
app.command("gateway")(cli_gateway.gateway)


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"postroom {version('postroom')}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    database: DatabaseOption = None,
    broker: BrokerOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    outer = context.obj or Console()
    context.obj = Console(database, broker, config, as_json, outer.base)


@app.command()
def demo() -> None:
    """Play an order service through good days and bad ones: no servers, under a minute."""
    from rich.console import Console as Terminal

    from postroom.ops.demo import play

    if not run(play(Terminal(highlight=False))):
        raise typer.Exit(EXIT_REFUSED)


def command() -> Any:
    """Return the whole command line, with flags shown as flags.

    Typer 0.29 shows `--json <bool>` in its help, which reads as if a flag took a value.
    """
    found = typer.main.get_command(app)
    _show_flags(found)
    return found


def _show_flags(found: Any) -> None:
    params = found.get_params(found.context_class(found))  # with --help
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    for inner in getattr(found, "commands", {}).values():
        _show_flags(inner)


def main(
    arguments: Sequence[str] | None = None,
    *,
    name: str | None = None,
    base: Callable[[], Mapping[str, Any]] | None = None,
) -> NoReturn:
    """Run the command line; the one place where an error becomes a sentence and an exit code.

    Without arguments those of the process. A framework that offers these commands as its own gives
    the `name` people call them by, and its settings as `base`.
    """
    try:
        code = command()(
            list(arguments) if arguments is not None else None,
            prog_name=name,
            standalone_mode=False,
            obj=Console(base=base),
        )
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        # Whoever read our output has gone; stop the interpreter from complaining at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_REFUSED)
    except Exception as error:
        sys.exit(_fail(error))
    sys.exit(code if isinstance(code, int) else 0)


def _fail(error: Exception) -> int:
    if os.environ.get("POSTROOM_DEBUG"):
        print(redact(traceback.format_exc()), file=sys.stderr)
    sentence, code = _explain(error)
    if sentence:
        said = localized(" ".join(sentence.split()))
        print("postroom: " + shown(redact(said)), file=sys.stderr)
    return code


def _explain(error: Exception) -> tuple[str, int]:
    if isinstance(error, ConfigurationError):
        return str(error), EXIT_USAGE
    if isinstance(error, Unreachable):
        return str(error), EXIT_UNREACHABLE
    if isinstance(error, PostroomError):
        return str(error), EXIT_REFUSED
    if isinstance(error, typer.Abort):
        return "Stopped.", EXIT_REFUSED
    # Typer brings its own copy of Click since some version: its errors are known by what they can.
    message = getattr(error, "format_message", None)
    if callable(message):
        return str(message()), EXIT_USAGE
    if isinstance(error, OSError):
        return f"{error.strerror or error}.", EXIT_UNREACHABLE
    return (
        f"Unexpected {type(error).__name__}: {error} (POSTROOM_DEBUG=1 shows where).",
        EXIT_REFUSED,
    )


if __name__ == "__main__":
    main()
