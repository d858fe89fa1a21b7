"""`postroom gateway --simulate`: orders through a gateway to an exchange with bad manners.

Everything is real but the customers: the gateway, its relay and the exchange are processes of their
own, which are killed on the way, and in the end the three books (the clients', the ledger, the
exchange's) are laid side by side. Nothing of it goes by settings of the place where it is played.
"""

from __future__ import annotations

import asyncio
import random
import signal
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager, suppress
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from postroom.databases import migrate
from postroom.errors import PostroomError
from postroom.gateway.children import Child
from postroom.gateway.exchange import Book, Manners
from postroom.gateway.load import Load
from postroom.gateway.serving import free_port

__all__ = ["play"]

MANNERS = Manners(
    latency_seconds=0.02, rejects=0.05, silent=0.02, lost=0.01, twice=0.03, crash=0.004
)
SETTINGS = {
    "POSTROOM_RELAY_LEASE_SECONDS": "4",
    "POSTROOM_RELAY_SEND_TIMEOUT_SECONDS": "1.5",
    "POSTROOM_RELAY_RETRY_DELAYS_SECONDS": "0.5, 1, 2, 4, 8",
    "POSTROOM_RELAY_BATCH_ROWS": "16",
    "POSTROOM_EXCHANGE_TIMEOUT_SECONDS": "1",
}
KILL_SECONDS = 2.5
DEADLINE_SECONDS = 600
FALSE_STARTS = 3  # one may be an accident of a slow machine
COLOURS = {"accepted": "cyan", "succeeded": "green", "failed": "red", "unknown": "yellow"}


async def play(
    screen: Console, *, orders: int, manners: Manners | None = None, seed: int | None = None
) -> bool:
    """Play it; returns whether every order is in the exchange's book once, or known to be not."""
    seed = random.randrange(10_000) if seed is None else seed
    with tempfile.TemporaryDirectory(prefix="postroom-gateway-", ignore_cleanup_errors=True) as at:
        show = Show(Path(at), screen, orders, manners or MANNERS, seed)
        with _ended_by_sigterm():
            await show.prepare()
            return await show.run()


class Show:
    """One showing, in a directory of its own."""

    def __init__(
        self, folder: Path, screen: Console, orders: int, manners: Manners, seed: int
    ) -> None:
        self.folder = folder
        self.screen = screen
        self.orders = orders
        self.manners = manners
        self.seed = seed
        self.ledger = folder / "gateway.db"
        self.book = folder / "book.db"
        self._dice = random.Random(seed)
        self._begun = time.monotonic()

    async def prepare(self) -> None:
        """Make the tables, and say what is to be seen."""
        await migrate.install(f"sqlite:///{self.ledger}")
        Book(str(self.book)).close()
        self.screen.print(
            f"[bold]{self.orders} orders[/] go through a gateway to an exchange that is slow, "
            "rejects, falls silent, loses and doubles orders, and dies.\n"
            "[dim]Gateway, relay and exchange are killed (kill -9) every few seconds. Clients "
            f"send some orders again and use some keys twice. Dice: --seed {self.seed}[/]\n"
        )

    async def run(self) -> bool:
        """Let it all run until every order has come to its end, and compare the books."""
        port, exchange_port = free_port(), free_port()
        url = f"http://127.0.0.1:{port}"
        async with self._children(port, exchange_port) as children:
            load = Load(url, orders=self.orders, seed=self.seed)
            clients = asyncio.create_task(load.run())
            killer = asyncio.create_task(self._kill(children))
            try:
                with Live(console=self.screen, refresh_per_second=5, transient=True) as live:
                    while not (clients.done() and self._ended() >= self.orders):
                        live.update(self._picture(load, children))
                        self._check_start(children)
                        if clients.done() and clients.exception():
                            break
                        if time.monotonic() - self._begun > DEADLINE_SECONDS:
                            break
                        await asyncio.sleep(0.2)
            except BaseException:
                clients.cancel()
                raise
            finally:
                killer.cancel()
            await clients
            self.screen.print(self._picture(load, children))
        return self._verdict(load)

    @asynccontextmanager
    async def _children(self, port: int, exchange_port: int) -> AsyncIterator[list[Child]]:
        database = f"sqlite:///{self.ledger}"
        environment = SETTINGS | {"POSTROOM_EXCHANGE_URL": f"http://127.0.0.1:{exchange_port}"}
        postroom = ("-m", "postroom.ops.cli")
        adapter = ("--broker", "call:postroom.gateway.adapter:send")
        exchange = ("-m", "postroom.gateway.exchange", str(self.book), str(exchange_port))
        gateway = ("gateway", "--no-relay", "--port", str(port))
        programs = {
            "exchange": (*exchange, self.manners.spelled()),
            "gateway": (*postroom, *gateway, "--database", database),
            "relay": (*postroom, "relay", *adapter, "--database", database),
        }
        children = [
            Child(name, program, environment=environment, log=self.folder / f"{name}.log")
            for name, program in programs.items()
        ]
        async with AsyncExitStack() as stack:
            for child in children:
                await stack.enter_async_context(child)
            yield children

    def _check_start(self, children: list[Child]) -> None:
        """Raise if one of them never gets as far as working: its clients would wait for nothing."""
        for child in children:
            if child.failures >= FALSE_STARTS and not self._ended():
                raise PostroomError(
                    f"The {child.name} of the show ends as soon as it starts; the last it said: "
                    f"{child.last_words() or 'nothing'}"
                )

    async def _kill(self, children: list[Child]) -> None:
        """Every few seconds, but never before something has come to its end since the last one: on
        a slow machine it would never go on."""
        done = 0
        while True:
            await asyncio.sleep(KILL_SECONDS * (0.5 + self._dice.random()))
            if self._ended() > done:
                self._dice.choice(children).kill()
                done = self._ended()

    # ── what is seen ───────────────────────────────────────────────────────────────────────────

    def _states(self) -> Counter[str]:
        with suppress(sqlite3.OperationalError), closing(_look(self.ledger)) as look:
            return Counter(
                dict(look.execute("SELECT state, count(*) FROM postroom_ledger GROUP BY state"))
            )
        return Counter()

    def _ended(self) -> int:
        with suppress(sqlite3.OperationalError), closing(_look(self.ledger)) as look:
            query = "SELECT count(*) FROM postroom_ledger WHERE finished_at IS NOT NULL"
            return int(look.execute(query).fetchone()[0])
        return 0

    def _counts(self) -> dict[str, int]:
        with closing(Book(str(self.book))) as book:
            return book.counts()

    def _picture(self, load: Load, children: list[Child]) -> Group:
        states, book, told = self._states(), self._counts(), load.told
        clients = Table(title="clients", title_style="bold", box=None, pad_edge=False)
        ledger = Table(title="ledger", title_style="bold", box=None, pad_edge=False)
        exchange = Table(title="exchange", title_style="bold", box=None, pad_edge=False)
        meanings = {
            "202": "accepted",
            "200": "known already",
            "409": "key used twice",
            "503": "try again",
        }
        for status, count in sorted(told.statuses.items()):
            clients.add_row(status, meanings.get(status, ""), str(count))
        for state, colour in COLOURS.items():
            ledger.add_row(Text(state, style=colour), str(states[state]))
        exchange.add_row("sent to it", str(book["submissions"]))
        exchange.add_row("in its book", Text(str(book["entries"]), style="green"))
        exchange.add_row("more than once", str(book["entries"] - book["orders"]))
        exchange.add_row("of them rejected", str(book["rejected"]))
        side = Table.grid(padding=(0, 6))
        side.add_row(clients, ledger, exchange)
        deaths = ", ".join(f"{child.name} {child.deaths}" for child in children)
        seconds = time.monotonic() - self._begun
        return Group(side, Text(f"\n{seconds:.0f} s; deaths: {deaths}\n", style="dim"))

    def _verdict(self, load: Load) -> bool:
        """The three books side by side."""
        with closing(_look(self.ledger)) as look:
            rows = look.execute(
                "SELECT key, id, state, finished_at IS NOT NULL FROM postroom_ledger"
            ).fetchall()
        with closing(Book(str(self.book))) as book:
            entries = book.entries()
        times = Counter(id for id, _ in entries)
        booked = {id for id, status in entries if status == "booked"}
        ends: dict[str, set[str]] = {state: set() for state in COLOURS}
        for _, id, state, finished in rows:
            ends[state if finished else "accepted"].add(id)
        checks = {
            "every order was accepted once": len(rows) == self.orders
            and {key: id for key, id, _, _ in rows} == load.told.ids,
            "every order came to its end": bool(rows) and not ends["accepted"],
            "no order is in the exchange's book twice": max(times.values(), default=0) <= 1,
            "nothing is in its book that nobody ordered": times.keys()
            <= {id for _, id, *_ in rows},
            "what the ledger calls succeeded is booked there": ends["succeeded"] <= booked,
            "what it calls failed is not": not ends["failed"] & booked,
            "clients always got a true answer": not load.told.wrong,
        }
        for text, holds in checks.items():
            self.screen.print(f" {'[green]✓[/]' if holds else '[bold red]✗[/]'} {text}")
        if ends["accepted"]:
            self.screen.print(
                f" [bold red]✗[/] {len(ends['accepted'])} had come to no end when time was up"
            )
        if unknown := ends["unknown"]:
            self.screen.print(
                f" [yellow]? {len(unknown)} ended as unknown, of which {len(unknown & booked)} are "
                "booked: nobody answered in six tries. A person would look, and say so with "
                "`postroom ledger resolve`.[/]"
            )
        return all(checks.values()) and not unknown


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does, so that no process and no directory is left."""
    task, loop, told = asyncio.current_task(), asyncio.get_running_loop(), False

    def end() -> None:
        nonlocal told
        told = True
        if task is not None:
            task.cancel()

    with suppress(NotImplementedError):  # Windows has no such signal
        loop.add_signal_handler(signal.SIGTERM, end)
    try:
        yield
    except asyncio.CancelledError:
        if told:
            raise SystemExit(128 + signal.SIGTERM) from None
        raise
    finally:
        with suppress(NotImplementedError):
            loop.remove_signal_handler(signal.SIGTERM)


def _look(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=5)
