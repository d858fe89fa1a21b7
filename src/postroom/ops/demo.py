"""`postroom demo`: an order service through good days and bad ones, on SQLite, without servers.

Everything is real: the two databases, the relay, and the process that is killed. Only the receiver
is ours (`demo_receiver`): a billing service that misbehaves when told to.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sqlite3
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from postroom.databases import migrate
from postroom.messages import message
from postroom.ops import actions, jobs
from postroom.ops.demo_receiver import behave
from postroom.outbox.publish import Outbox
from postroom.outbox.relay import Relay
from postroom.retry import RetryPolicy
from postroom.worker.apart import environment_apart

__all__ = ["play"]

RECEIVER = "call:postroom.ops.demo_receiver:receive"
SETTINGS: dict[str, Any] = {
    "lease_seconds": 3.5,
    "send_timeout_seconds": 1.0,
    "poll_max_seconds": 0.1,
}


@message("order.placed.v1", topic="orders", key_field="customer")
@dataclass(frozen=True)
class OrderPlaced:
    """What the shop tells the world."""

    order: int
    customer: str


class Story:
    """One showing of the demo, in a directory of its own."""

    def __init__(self, folder: Path, screen: Console) -> None:
        self.folder = folder
        self.screen = screen
        self.file = folder / "shop.db"
        self.url = f"sqlite:///{self.file}"
        self.billing = folder / "billing.db"
        self.outbox = Outbox()
        self.orders = 0
        self.told = 0
        os.environ["POSTROOM_DEMO"] = str(folder)

    # ── what the shop does ─────────────────────────────────────────────────────────────────────

    def place(self, customer: str, *, commit: bool = True) -> str:
        """An order and its message, in one transaction."""
        self.orders += 1
        connection = sqlite3.connect(self.file)
        try:
            connection.execute(
                "INSERT INTO shop_order (id, customer) VALUES (?, ?)", (self.orders, customer)
            )
            published = self.outbox.publish(connection, OrderPlaced(self.orders, customer))
            if commit:
                connection.commit()
            else:
                connection.rollback()
        finally:
            connection.close()
        return published.id

    def receiver(self, **behaviour: Any) -> None:
        """Tell the receiver how to behave."""
        behave(self.folder, **behaviour)

    def received(self) -> list[dict[str, Any]]:
        """Everything that arrived so far."""
        log = self.folder / "received.jsonl"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    async def relay(self, seconds: float | None = None) -> None:
        """Let a relay work: until nothing is due, or for some seconds."""
        relay = Relay(
            self.url, RECEIVER, retry=RetryPolicy(delays_seconds=(1.0,), attempts=3), **SETTINGS
        )
        if seconds is None:
            await relay.drain_once()
            await relay.close()
            return
        async with relay:
            await asyncio.sleep(seconds)

    # ── what the reader sees ───────────────────────────────────────────────────────────────────

    def step(self, number: int, title: str, text: str) -> None:
        self.screen.print(f"\n[bold cyan]{number}. {title}[/]\n[dim]{text}[/]")

    def say(self, text: str) -> None:
        self.screen.print(f"   {text}")

    def show_arrivals(self) -> None:
        """What has arrived since the last look, and whether it was handled or came again."""
        everything = self.received()
        for one in everything[self.told :]:
            told = "[green]✓ billed[/]    " if one["billed"] else "[yellow]= duplicate[/] "
            self.say(f"{told} order {one['order']} of {one['customer']}  [dim]{one['id']}[/]")
        if len(everything) == self.told:
            self.say("[dim]nothing arrived[/]")
        self.told = len(everything)

    async def show_status(self) -> None:
        state = await actions.status(self.url)
        counts = ", ".join(f"{state[name]} {name}" for name in ("pending", "held", "dead"))
        self.say(f"[dim]outbox:[/] {counts}")


async def play(screen: Console) -> bool:
    """Play the whole story; returns whether every committed order arrived, and nothing else."""
    begun = time.monotonic()
    # The screen shows the story; the relay's own log would interrupt it.
    logging.getLogger("postroom").addHandler(logging.NullHandler())
    with tempfile.TemporaryDirectory(prefix="postroom-demo-") as folder:
        story = Story(Path(folder), screen)
        await migrate.install(story.url)
        await migrate.install(f"sqlite:///{story.billing}")
        for file, table in (
            (story.file, "CREATE TABLE shop_order (id INTEGER PRIMARY KEY, customer TEXT)"),
            (story.billing, "CREATE TABLE bill (customer_order INTEGER NOT NULL)"),
        ):
            with closing(sqlite3.connect(file)) as connection, connection:
                connection.execute(table)
        for scene in (_good_day, _rolled_back, _outage, _retry, _killed, _poison):
            story.receiver()
            await scene(story)
        return _reckoning(story, time.monotonic() - begun)


async def _good_day(story: Story) -> None:
    story.step(
        1,
        "A good day",
        "An order is saved and its message published in the same transaction.\n"
        "The relay reads the outbox and hands the message to the billing service.",
    )
    for customer in ("ada", "bob", "ada"):
        story.place(customer)
    await story.show_status()
    await story.relay()
    story.show_arrivals()


async def _rolled_back(story: Story) -> None:
    story.step(
        2,
        "A rollback",
        "The transaction is rolled back: no order, no message. Nothing is invented.",
    )
    story.place("eve", commit=False)
    await story.relay()
    story.show_arrivals()


async def _outage(story: Story) -> None:
    story.step(
        3,
        "The broker is down",
        "Orders go on being placed. Messages wait; no attempts are spent on an outage.\n"
        "When the broker is back, they arrive in order for each customer.",
    )
    story.receiver(down=True)
    for customer in ("ada", "ada", "bob"):
        story.place(customer)
    await story.relay()
    story.show_arrivals()
    await story.show_status()
    story.say("[dim]… the broker comes back[/]")
    story.receiver()
    await story.relay()
    story.show_arrivals()


async def _retry(story: Story) -> None:
    story.step(
        4,
        "A refusal, then a retry",
        "The billing service refuses ada's order once. It waits for its back-off, and her\n"
        "next order waits behind it, while bob's passes.",
    )
    story.place("ada")
    story.receiver(refuse_once=story.orders)
    story.place("ada")
    story.place("bob")
    await story.relay()
    story.show_arrivals()
    await story.show_status()
    story.say("[dim]… a second later[/]")
    await story.relay(seconds=2.0)
    story.show_arrivals()


async def _killed(story: Story) -> None:
    story.step(
        5,
        "A relay dies after sending",
        "A relay process is killed (-9) after the receiver said yes and before that was\n"
        "written down. Another takes its lanes over when the lease ends and sends again\n"
        "with the same id. The billing service asks inbox.once(...), which knows the id:\n"
        "the duplicate changes nothing.",
    )
    story.place("cyd")
    environment = environment_apart() | {
        "POSTROOM_DEMO": str(story.folder),
        "POSTROOM_FAILPOINTS": "relay.settle.before=kill",
        "POSTROOM_DATABASE_URL": story.url,
        "POSTROOM_BROKER_URL": RECEIVER,
        "POSTROOM_RELAY_LEASE_SECONDS": str(SETTINGS["lease_seconds"]),
        "POSTROOM_RELAY_SEND_TIMEOUT_SECONDS": str(SETTINGS["send_timeout_seconds"]),
    }
    command = (sys.executable, "-m", "postroom.ops.cli", "relay", "--once")
    process = await asyncio.create_subprocess_exec(*command, env=environment, cwd=story.folder)
    code = await process.wait()
    killed = code == -signal.SIGKILL if hasattr(signal, "SIGKILL") else code != 0
    story.say(f"[red]✗ relay process {process.pid} {'was killed' if killed else 'ended'}[/]")
    story.show_arrivals()
    await story.show_status()
    story.say("[dim]… its lease ends, another relay takes over[/]")
    await story.relay(seconds=SETTINGS["lease_seconds"] + 1.5)
    story.show_arrivals()


async def _poison(story: Story) -> None:
    story.step(
        6,
        "A poison message",
        "The billing service refuses dan's order for good. It becomes a dead letter, and\n"
        "his next order waits behind it. A person looks, mends the service, and redrives.",
    )
    poison = story.place("dan")
    story.receiver(refuse_always=story.orders)
    story.place("dan")
    story.place("bob")
    await story.relay()
    story.show_arrivals()
    letter = await actions.dead_show(story.url, poison)
    table = Table(box=None, pad_edge=False, header_style="bold")
    names = ("id", "key", "attempts", "error")
    for name in names:
        table.add_column(name, no_wrap=True)
    table.add_row(*(str(letter[name]) for name in names))
    story.say("[dim]$ postroom dead list[/]")
    story.screen.print(Padding(table, (0, 0, 0, 3)))
    await story.show_status()
    story.say('[dim]$ postroom dead redrive --error-code unreadable --reason "mended"[/]')
    story.receiver()
    wish = jobs.Wish(error_code="unreadable")
    job = await jobs.begin(story.url, "redrive", wish, why="mended")
    job = await jobs.work(story.url, job.id)
    story.say(f"job {job.id} is {job.state}: {job.queued} of {job.total} queued.")
    await story.relay()
    await story.relay()
    story.show_arrivals()


def _reckoning(story: Story, seconds: float) -> bool:
    with closing(sqlite3.connect(story.file)) as connection:
        committed = [row[0] for row in connection.execute("SELECT id FROM shop_order")]
    with closing(sqlite3.connect(story.billing)) as connection:
        billed = [row[0] for row in connection.execute("SELECT customer_order FROM bill")]
    twice = sum(not one["billed"] for one in story.received())
    good = sorted(billed) == sorted(committed)
    story.screen.print(
        f"\n[bold]{len(committed)} orders committed, {len(billed)} billed: none lost, "
        f"none invented, none billed twice.[/]\n{twice} message came twice, and was applied once."
        if good and twice == 1
        else f"\n[bold red]committed {sorted(committed)}, billed {sorted(billed)}, twice {twice}[/]"
    )
    story.screen.print(f"[dim]{seconds:.0f} s. Next: README.md, and `postroom --help`.[/]")
    return good and twice == 1
