"""`postroom gateway`: the order gateway as a service, and as a show with a simulated exchange."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from postroom.errors import ConfigurationError
from postroom.ops.cli_common import (
    BrokerOption,
    ConfigOption,
    Console,
    DatabaseOption,
    run,
)
from postroom.ops.cli_relay import until_stopped, watched
from postroom.ops.logs import set_up

if TYPE_CHECKING:
    from postroom.config import Settings
    from postroom.outbox.relay import Relay

__all__ = ["gateway"]

# The options of a gateway that is played; all others are those of a real one.
PLAYED = ("orders", "manners", "seed")


def gateway(
    context: typer.Context,
    database: DatabaseOption = None,
    broker: BrokerOption = None,
    config: ConfigOption = None,
    host: Annotated[str, typer.Option(help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="0: any that is free.")] = 8080,
    relay: Annotated[
        bool, typer.Option("--relay/--no-relay", help="Send orders from this process too.")
    ] = True,
    rebind: Annotated[
        bool, typer.Option("--rebind", help="The routes differ from those on record: record these.")
    ] = False,
    connections: Annotated[int, typer.Option(min=1, max=100, help="To the database.")] = 8,
    http: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Serve the relay's /healthz, /readyz and /metrics there."
        ),
    ] = None,
    log_format: Annotated[
        str | None, typer.Option(help="'text', or 'json': one document a line.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log every batch.")] = False,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Play it with a simulated exchange, and end.")
    ] = False,
    orders: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="How many orders to simulate.")
    ] = 300,
    manners: Annotated[
        str | None,
        typer.Option(metavar="NAME=RATE,…", help="How the simulated exchange misbehaves."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The simulation's dice.")] = None,
) -> None:
    r"""Take orders over HTTP and place each of them once.

    POST /do/order with an Idempotency-Key; GET /do/order/KEY. Orders go out through the broker,
    such as call:module:function. With --simulate no database, broker or settings are needed.
    Needs Starlette and uvicorn: pip install 'postroom\[gateway]'.
    """
    console = Console.of(context, database=database, broker=broker, config=config)
    _check_options(context, console)
    if simulate:
        from rich.console import Console as Terminal

        from postroom.gateway.exchange import Manners
        from postroom.ops.gateway_show import play

        set_up("text", logging.CRITICAL)
        wish = Manners.parse(manners) if manners is not None else None
        if not run(play(Terminal(highlight=False), orders=orders, manners=wish, seed=seed)):
            raise typer.Exit(1)
        return
    if not relay and (http is not None or rebind):
        option = "--rebind" if rebind else "--http"
        raise ConfigurationError(f"{option} is for the relay, and with --no-relay there is none.")
    settings = console.settings(relay={"log_format": log_format, "http": http})
    # As with `python -m`: what call:module:function names may lie in the working directory.
    sys.path.insert(0, "")
    set_up(settings.relay.log_format, logging.DEBUG if verbose else logging.INFO)
    run(_serve(settings, host, port, relay=relay, rebind=rebind, connections=connections))


def _check_options(context: typer.Context, console: Console) -> None:
    """Refuse options of a real gateway for one that is played, and the other way round."""
    given = {name for name in context.params if _is_given(context, name)}
    given |= {name for name in ("database", "broker", "config") if getattr(console, name)}
    simulate = "simulate" in given
    wrong = [
        "--no-relay" if name == "relay" and not value else f"--{name.replace('_', '-')}"
        for name, value in context.params.items()
        if name in given - {"simulate"} and (name in PLAYED) != simulate
    ]
    if wrong and simulate:
        raise ConfigurationError(
            "--simulate plays with a gateway, a database and an exchange of its own: leave out "
            f"{' and '.join(wrong)}."
        )
    if wrong:
        verb = "is" if len(wrong) == 1 else "are"
        raise ConfigurationError(
            f"{' and '.join(wrong)} {verb} for --simulate, and this would be a real gateway."
        )


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    # By name: Typer brings its own copy of Click since some version.
    return source is not None and source.name == "COMMANDLINE"


class _Bell:
    """Rings when it is time to stop."""

    def __init__(self) -> None:
        self._rung = asyncio.Event()

    def stop(self) -> None:
        """Ring."""
        self._rung.set()

    async def wait(self, relay: Relay | None) -> None:
        """Wait until it rings, or until the relay cannot go on; that is an error then."""
        waits: list[asyncio.Task[Any]] = [asyncio.create_task(self._rung.wait())]
        if relay is not None:
            waits.append(asyncio.create_task(relay.ended()))
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in waits:
                task.cancel()


async def _serve(
    settings: Settings, host: str, port: int, *, relay: bool, rebind: bool, connections: int
) -> None:
    from postroom.gateway import TOKENS, tokens_from
    from postroom.gateway.service import create_app
    from postroom.gateway.serving import is_loopback, listening, serving
    from postroom.worker.alert_webhook import receivers

    tokens = tokens_from(os.environ.get(TOKENS))
    if not tokens and not is_loopback(host):
        raise ConfigurationError(
            f"{host} can be reached by others, and anybody could place orders: set {TOKENS} to "
            "'ada=SECRET bob=SECRET', or listen at 127.0.0.1."
        )
    app = create_app(
        settings.require_database(),
        settings.require_routes() if relay else None,
        tokens=tokens,
        connections=connections,
        settings=settings.relay,
        rebind=rebind,
        broker_options=settings.brokers,
        alerts=receivers(settings.alerts),
        alert_settings=settings.alerts,
    )
    bell, address = _Bell(), settings.relay.http_address() if relay else None

    async def serve() -> None:
        with watched(app.state.gateway, address):
            async with serving(app, listening(host, port)) as url:
                logging.getLogger("postroom").info("the gateway takes orders at %s/do/order", url)
                # Without its relay it would take orders that nobody sends.
                await bell.wait(app.state.gateway.relay)

    # All of it, so that a second signal cuts the end short as well.
    await until_stopped(bell, serve())
