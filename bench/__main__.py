"""The runner: chooses what is measured, shows progress, prints tables, writes JSON and pictures."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from bench import page, picture
from bench.figures import Figures
from bench.room import PEERS, Room, System, install_others, install_peers
from bench.sections import (
    archive,
    backlog,
    brokers,
    consume,
    drain,
    gateway,
    keys,
    latency,
    publish,
    scale,
)

SECTIONS: dict[str, Callable[[Room], Figures]] = {
    "drain": drain.noop,
    "nats": drain.nats,
    "brokers": brokers.brokers,
    "hot-key": drain.hot_key,
    "latency": latency.latency,
    "tax": latency.tax,
    "publish": publish.publish,
    "backlog": backlog.backlog,
    "pinned": backlog.pinned,
    "archive": archive.archive,
    "memory": scale.memory,
    "two-relays": scale.two,
    "consume": consume.consume,
    "keys": keys.keys,
    "gateway": gateway.gateway,
}

MOST_LOAD = 1.0


def main(arguments: list[str] | None = None) -> dict[str, Figures]:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("sections", nargs="*", help=f"of {', '.join(SECTIONS)}; none: all")
    parser.add_argument("--quick", action="store_true", help="smallest sizes: shows that it runs")
    parser.add_argument("--no-peers", action="store_true", help="measure only ourselves")
    parser.add_argument("--any-load", action="store_true", help="measure on a busy machine too")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--pictures", type=Path, help="write the pictures into this directory")
    parser.add_argument("--page", type=Path, help="write the tables into this page")
    options = parser.parse_args(arguments)
    chosen = options.sections or list(SECTIONS)
    if unknown := set(chosen) - set(SECTIONS):
        parser.error(f"no section {', '.join(sorted(unknown))}: there are {', '.join(SECTIONS)}")
    console = Console()
    _require_rest(parser, options, console)
    begun = time.monotonic()
    others: tuple[System, ...] = ()
    if not options.no_peers:
        install_peers(console.print)
        others = install_others(console.print)
    found = _measure(chosen, options, console, others)
    _write(found, options, console)
    unmet = [line for each in found.values() for line in each.lines if line.met is False]
    minutes = (time.monotonic() - begun) / 60
    console.print(f"{len(unmet)} bars not met; {minutes:.1f} minutes")
    return found


def _require_rest(
    parser: argparse.ArgumentParser, options: argparse.Namespace, console: Console
) -> None:
    """Refuse a run whose figures would be those of other processes as well."""
    load = os.getloadavg()[0]
    console.print(f"load of the machine: {load:.2f} on {os.cpu_count()} cores")
    if load > MOST_LOAD and not options.any_load:
        parser.error(
            f"the load of the machine is above {MOST_LOAD:g}; wait until other processes have"
            " ended, or measure all the same with --any-load"
        )


def _measure(
    chosen: list[str],
    options: argparse.Namespace,
    console: Console,
    others: tuple[System, ...],
) -> dict[str, Figures]:
    found: dict[str, Figures] = {}
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    peers = () if options.no_peers else PEERS
    with Room(options.quick, peers, console, others) as room:
        for number, name in enumerate(chosen, 1):
            with Progress(*columns, console=console, transient=True) as progress:
                task = progress.add_task(name)

                def tick(what: str, task=task, progress=progress, at=number, name=name) -> None:
                    progress.update(task, description=f"{at}/{len(chosen)} {name}: {what}")

                room.tick = tick
                found[name] = SECTIONS[name](room)
            found[name].show(console)
    return found


def _write(found: dict[str, Figures], options: argparse.Namespace, console: Console) -> None:
    if options.json:
        whole = {name: figures.as_json() for name, figures in found.items()}
        options.json.write_text(json.dumps(whole, indent=2) + "\n")
    if options.page:
        page.write(found, options.page, list(SECTIONS))
    if options.pictures:
        for path in picture.draw(found, options.pictures):
            console.print(f"wrote {path}")


if __name__ == "__main__":
    main()
