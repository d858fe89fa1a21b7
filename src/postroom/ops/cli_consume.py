"""`postroom consume`: runs the consumers of a module until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer

from postroom.brokers.memory import MemoryBroker
from postroom.errors import ConfigurationError
from postroom.ops.cli_common import (
    BrokerOption,
    ConfigOption,
    Console,
    DatabaseOption,
    JsonOption,
    run,
)
from postroom.ops.cli_relay import until_stopped, watched
from postroom.ops.logs import set_up

if TYPE_CHECKING:
    from postroom.inbox.consumer import Consumed, Consumer
    from postroom.worker.vitals import Health

__all__ = ["consume"]


def consume(
    context: typer.Context,
    where: Annotated[
        list[str],
        typer.Argument(metavar="MODULE:CONSUMER", help="Where your consumers are defined."),
    ],
    once: Annotated[
        bool, typer.Option("--once", help="Handle what is there now, then exit.")
    ] = False,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", min=1, help="How many workers a consumer has.")
    ] = None,
    http: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Serve /healthz, /readyz and /metrics there."),
    ] = None,
    log_format: Annotated[
        str | None, typer.Option(help="'text', or 'json': one document a line.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log every batch.")] = False,
    database: DatabaseOption = None,
    broker: BrokerOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Receive messages and hand them to your handlers, each once.

    SIGTERM or Ctrl-C finishes the transactions under way and gives the rest back; a second one ends
    at once, and still nothing is lost.
    """
    from postroom.ops.consumers import find_consumers

    console = Console.of(context, database=database, broker=broker, config=config, as_json=as_json)
    # For consumers that name no database or broker of their own.
    for name, value in (
        ("POSTROOM_DATABASE_URL", console.database),
        ("POSTROOM_BROKER_URL", console.broker),
        ("POSTROOM_CONFIG", console.config),
    ):
        if value is not None:
            os.environ[name] = value
    options = {"http": http, "log_format": log_format, "concurrency": concurrency}
    settings = console.settings(consumer=options).consumer
    set_up(settings.log_format, logging.DEBUG if verbose else logging.INFO)

    async def work() -> list[Consumed] | None:
        found = [one for each in where for one in find_consumers(each)]
        if not found:
            raise ConfigurationError(f"there is no Consumer in {', '.join(where)}.")
        for one in found:
            if isinstance(one.broker, MemoryBroker) and not once:
                raise ConfigurationError(
                    f"consumer {one.name} receives from memory://, which keeps messages inside one "
                    "process: nobody else could send it any."
                )
            if concurrency is not None:
                one.settings = replace(one.settings, concurrency=concurrency)
        crew = _Crew(found)
        if once:
            return await until_stopped(crew, crew.drain_once())
        with watched(crew, settings.http_address()):
            await until_stopped(crew, crew.run())
        return None

    done = run(work())
    if done is not None:
        total = {name: sum(asdict(one)[name] for one in done) for name in asdict(done[0])}
        console.answer(
            total,
            f"{total['handled']} handled, {total['duplicates']} duplicates, {total['failed']} kept "
            f"for another try, {total['buried']} dead.",
        )


class _Crew:
    """Several consumers that are started, stopped and asked for their health as one."""

    def __init__(self, consumers: Sequence[Consumer]) -> None:
        self._consumers = consumers

    async def run(self) -> None:
        tasks = [asyncio.create_task(one.run()) for one in self._consumers]
        try:
            await asyncio.gather(*tasks)
        finally:
            self.stop()  # one that cannot go on takes the others along
            await asyncio.gather(*tasks, return_exceptions=True)

    async def drain_once(self) -> list[Consumed]:
        try:
            return [await one.drain_once() for one in self._consumers]
        finally:
            for one in self._consumers:
                await one.close()

    def stop(self) -> None:
        for one in self._consumers:
            one.stop()

    def health(self) -> Health:
        from postroom.worker.vitals import Health

        found = [(one.name, one.health()) for one in self._consumers]
        return Health(
            tuple(f"{name}: {text}" for name, health in found for text in health.unhealthy),
            tuple(f"{name}: {text}" for name, health in found for text in health.unready),
            tuple(f"{name}: {text}" for name, health in found for text in health.degraded),
        )
