"""`postroom relay`: moves messages from the outbox to the broker until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Coroutine, Iterator
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar

import typer

from postroom.brokers.base import scheme_of
from postroom.errors import ConfigurationError, MissingDriver, Unreachable
from postroom.ops.cli_common import (
    BrokerOption,
    ConfigOption,
    Console,
    DatabaseOption,
    JsonOption,
    run,
)
from postroom.ops.logs import set_up

if TYPE_CHECKING:
    from postroom.ops.health import Worker
    from postroom.outbox.relay import Drained

__all__ = ["relay", "until_stopped", "watched"]

T = TypeVar("T")


class Stoppable(Protocol):
    """A worker that can be told to stop."""

    def stop(self) -> None:
        """Come to an end in good order."""


def relay(
    context: typer.Context,
    database: DatabaseOption = None,
    broker: BrokerOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
    once: Annotated[
        bool, typer.Option("--once", help="Deliver what is due now, then exit.")
    ] = False,
    rebind: Annotated[
        bool, typer.Option("--rebind", help="The routes differ from those on record: record these.")
    ] = False,
    lease_seconds: Annotated[
        float | None, typer.Option(help="How long a dead relay keeps its lanes.")
    ] = None,
    send_timeout_seconds: Annotated[
        float | None, typer.Option(help="How long the broker may take to answer.")
    ] = None,
    grace_seconds: Annotated[
        float | None, typer.Option(help="How long to finish after SIGTERM.")
    ] = None,
    keep_delivered_seconds: Annotated[
        int | None, typer.Option(help="How long delivered messages are kept; 0: not at all.")
    ] = None,
    on_dead: Annotated[
        str | None, typer.Option(help="After a dead letter its key is on 'hold', or 'continue's.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="What people see this relay as; else host and process.")
    ] = None,
    http: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Serve /healthz, /readyz and /metrics there."),
    ] = None,
    log_format: Annotated[
        str | None, typer.Option(help="'text', or 'json': one document a line.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log every batch.")] = False,
) -> None:
    """Move messages from the outbox to the broker.

    SIGTERM or Ctrl-C finishes what is under way and gives the lanes back; a second one ends at
    once, and still nothing is lost.
    """
    from postroom.outbox.relay import Relay, dedicate_process
    from postroom.worker.alert_webhook import receivers

    console = Console.of(context, database=database, broker=broker, config=config, as_json=as_json)
    options = {
        "lease_seconds": lease_seconds,
        "send_timeout_seconds": send_timeout_seconds,
        "grace_seconds": grace_seconds,
        "keep_delivered_seconds": keep_delivered_seconds,
        "on_dead": on_dead,
        "http": http,
        "log_format": log_format,
    }
    settings = console.settings(relay=options)
    settings.require_database()
    if any(scheme_of(url) == "memory" for url in settings.require_routes().urls):
        raise ConfigurationError(
            "memory:// keeps messages inside one process, so they would end with this one: "
            "use it with Relay in your application, or stdout:// here."
        )
    # As with `python -m`: what call:module:function names may lie in the working directory.
    sys.path.insert(0, "")
    set_up(settings.relay.log_format, logging.DEBUG if verbose else logging.INFO)

    async def work() -> Drained | None:
        worker = Relay(
            settings.require_database(),
            settings.require_routes(),
            settings=settings.relay,
            rebind=rebind,
            name=name,
            broker_options=settings.brokers,
            alerts=receivers(settings.alerts),
            alert_settings=settings.alerts,
        )
        dedicate_process()
        if not once:
            with watched(worker, settings.relay.http_address()):
                await until_stopped(worker, worker.run())
            return None
        try:
            if wrong := await worker.sender.ping():
                raise Unreachable("; ".join(wrong.values()))
            return await until_stopped(worker, worker.drain_once())
        finally:
            await worker.close()

    drained = run(work())
    if drained is not None:
        left = f"; {drained.elsewhere} lanes belong to other relays" if drained.elsewhere else ""
        if drained.waiting:
            several = len(drained.waits_for) > 1
            left += f"; {drained.waiting} wait{'' if drained.waiting > 1 else 's'}: "
            left += f"{', '.join(drained.waits_for)} {'are' if several else 'is'} down"
        console.answer(
            {
                "delivered": drained.delivered,
                "held": drained.held,
                "dead": drained.dead,
                "waiting": drained.waiting,
                "waits_for": list(drained.waits_for),
                "lanes_elsewhere": drained.elsewhere,
            },
            f"{drained.delivered} delivered, {drained.held} held for another try, "
            f"{drained.dead} dead{left}.",
        )
        if drained.waiting:
            raise typer.Exit(1)


@contextlib.contextmanager
def watched(worker: Worker, address: tuple[str, int] | None) -> Iterator[None]:
    """Answer for a worker over HTTP, if so set, and count for Prometheus, if it is there."""
    if address is None:
        yield
        return
    from postroom.ops.health import serve

    with contextlib.suppress(MissingDriver):
        from postroom.ops import metrics

        metrics.install()
    with serve(worker, *address) as (host, port):
        logging.getLogger("postroom").info("health and metrics at http://%s:%d", host, port)
        yield


async def until_stopped(worker: Stoppable, work: Coroutine[Any, Any, T]) -> T | None:
    """Work until done or a signal comes; the first stops cleanly, the second at once."""
    task = asyncio.create_task(work)
    signals_seen = 0

    def stop() -> None:
        nonlocal signals_seen
        signals_seen += 1
        if signals_seen == 1:
            worker.stop()
        else:
            task.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        try:
            loop.add_signal_handler(number, stop)
        except NotImplementedError:
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(stop))
    with contextlib.suppress(asyncio.CancelledError):
        return await task
    return None
