"""`manage.py postroom …`: the `postroom` command with the database and the settings of Django."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import connections

from postroom.django import settings
from postroom.django.addresses import url_of
from postroom.ops.cli import main

__all__ = ["Command"]


class Command(BaseCommand):
    """Hands its arguments to the command line of Postroom, whose errors are sentences already."""

    help = "Postroom: relay, status, messages, dead letters and tables."
    requires_system_checks: Sequence[str] = ()  # settings are checked as they are read

    def run_from_argv(self, argv: list[str]) -> NoReturn:
        """From a shell: the arguments as they are, and the exit code of the command."""
        common, arguments = _common_options().parse_known_args(argv[2:])
        if common.traceback:
            os.environ["POSTROOM_DEBUG"] = "1"
        _main(arguments, f"{Path(argv[0]).name} {argv[1]}")

    def add_arguments(self, parser: CommandParser) -> None:
        """For `call_command("postroom", "relay", "--once")`."""
        parser.add_argument("arguments", nargs=argparse.REMAINDER)

    def handle(self, *_: Any, **options: Any) -> None:
        """From Python: an exit code other than 0 is a `CommandError`."""
        try:
            with contextlib.redirect_stdout(options.get("stdout") or sys.stdout):
                _main(options["arguments"], "manage.py postroom")
        except SystemExit as end:
            if end.code:
                code = end.code if isinstance(end.code, int) else 1
                raise CommandError(
                    f"postroom {' '.join(options['arguments'])} ended with {code}", returncode=code
                ) from None

    def print_help(self, prog_name: str, subcommand: str) -> None:
        """For `manage.py help postroom`."""
        _main(["--help"], f"{Path(prog_name).name} {subcommand}")


def _main(arguments: list[str], name: str) -> NoReturn:
    main(_with_urls(arguments), name=name, base=settings.document)


def _common_options() -> argparse.ArgumentParser:
    """What every command of Django takes, and Django has seen to before us."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in ("--settings", "--pythonpath"):
        parser.add_argument(option)
    for option in ("--traceback", "--no-color", "--force-color", "--skip-checks"):
        parser.add_argument(option, action="store_true")
    return parser


def _with_urls(arguments: Sequence[str]) -> list[str]:
    """`--database` takes an alias here, as it does in Django's own commands, besides a URL."""
    words: list[str] = []
    for word in arguments:
        option, equals, value = word.partition("=")
        if option == "--database" and equals and value in connections:
            word = f"{option}={url_of(connections[value])}"
        elif words and words[-1] == "--database" and word in connections:
            word = url_of(connections[word])
        words.append(word)
    return words
