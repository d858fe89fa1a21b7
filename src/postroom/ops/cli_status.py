"""`postroom status`: how it stands, once or again and again."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from postroom.errors import ConfigurationError
from postroom.ops.cli_common import ConfigOption, Console, DatabaseOption, JsonOption, in_json, run

if TYPE_CHECKING:
    from rich.console import Console as Terminal
    from rich.console import RenderableType

    from postroom.ops.watch import Frame

__all__ = ["status"]

INTERVAL_SECONDS = 1.0


def status(
    context: typer.Context,
    watch: Annotated[
        bool, typer.Option("--watch", help="Look again and again, until q or Ctrl-C.")
    ] = False,
    interval: Annotated[
        float | None,
        typer.Option("--interval", min=0.1, max=3600, help="Seconds between two looks."),
    ] = None,
    database: DatabaseOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """How the outbox stands: backlog, age, lanes, and who works them."""
    from postroom.ops import actions

    console = Console.of(context, database=database, config=config, as_json=as_json)
    url = console.settings().require_database()
    if interval is not None and not watch:
        raise ConfigurationError("--interval says how often to look, so it needs --watch.")
    if watch:
        run(_watch(console, url, interval or INTERVAL_SECONDS))
        return
    state = run(actions.status(url))
    if console.as_json:
        print(in_json(state))
        return
    from rich.console import Console as Terminal

    from postroom.ops.screen import page

    Terminal(highlight=False).print(page(state))


async def _watch(console: Console, url: str, interval: float) -> None:
    from rich.console import Console as Terminal
    from rich.live import Live

    from postroom.databases.urls import resolve
    from postroom.ops.watch import frames, until_told

    stopping = asyncio.Event()
    terminal = Terminal(highlight=False)
    live = terminal.is_terminal and not console.as_json
    safe = resolve(url).safe
    with until_told(stopping, keys=live):
        looks = frames(url, interval_seconds=interval, stopping=stopping)
        try:
            first = await anext(looks, None)
            if first is None:
                return
            if not live:
                _tell(console, terminal, first, safe, interval)
                async for frame in looks:
                    _tell(console, terminal, frame, safe, interval)
                return
            drawn = _draw(first, safe, interval, terminal)
            with Live(drawn, console=terminal, screen=True, auto_refresh=False) as screen:
                async for frame in looks:
                    screen.update(_draw(frame, safe, interval, terminal), refresh=True)
        finally:
            await looks.aclose()  # type: ignore[attr-defined]


def _tell(console: Console, terminal: Terminal, frame: Frame, safe: str, interval: float) -> None:
    """One look where there is no terminal: a document a line, or a page without control codes."""
    if console.as_json:
        print(in_json(frame.document), flush=True)
        return
    terminal.print(_draw(frame, safe, interval, None))
    terminal.print()
    terminal.file.flush()


def _draw(frame: Frame, safe: str, interval: float, terminal: Terminal | None) -> RenderableType:
    from postroom.ops.screen import screen

    keys = ", q quits" if terminal is not None else ""
    return screen(
        frame.state,
        title=f"{frame.at:%Y-%m-%d %H:%M:%S} UTC, every {interval:g} s{keys}  {safe}",
        rates=frame.rates,
        backlog=frame.backlog,
        height=None if terminal is None else terminal.height,
        error=frame.error,
    )
