"""A database server as its clients know it: sessions, transactions, row locks, and a bad network.

A statement travels, takes effect at one moment, and its answer travels back; the connection may
break before the effect or after it, and neither end knows which. A session whose client has gone
finishes what it had received. Locks on lanes are waited for, and whoever waited looks again, as
PostgreSQL does under READ COMMITTED.
"""

import asyncio
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from postroom.flow import Rows, Statement

from .loop import Future, Handle, Loop, Process, current
from .tables import Row, Tables
from .view import View

# Which statements lock the lanes they find theirs, and how.
SHARE = {"fence", "settle_deleted", "settle_archived", "journal_write"}
UPDATE = {"lanes_renew", "lanes_release"}
# These hold the publisher's lock until their transaction ends.
WRITES_OUTBOX = {"hold", "outbox_delete", "promote"}
SLOW_SECONDS = 0.2


@dataclass
class Weather:
    """How bad the network to the database is."""

    latency_seconds: float = 0.002
    tail: float = 0.0  # how often a message takes up to `tail_seconds`
    tail_seconds: float = 1.0
    breaks: float = 0.0  # how often a connection breaks, on the way there or back


@dataclass(eq=False)
class Publisher:
    """A transaction of an application: it holds its lock from before its first position."""

    name: str
    rows: list[Row] = field(default_factory=list)
    dedup: dict[str, float] = field(default_factory=dict)
    over: bool = False


class Connection:
    """Both ends of one connection of a relay."""

    read_only = pooled = False

    def __init__(self, server: "Server", process: Process, number: int) -> None:
        self.server = server
        self.process = process
        self.driver = self
        self.server_number = number
        self.number = number
        self.transactions = 0
        self.cut = False  # the client's end is closed or broken
        self.gone = False  # the server's end is
        self.leaving = False  # the server knows that nobody listens, once it has done its work
        self.view: View | None = None
        self.writes_outbox = False
        self.idle_seconds = 10.0
        self.idle_timer: Handle | None = None
        self.arrives_at = 0.0
        self.reply: Future | None = None

    @property
    def virtual_transaction(self) -> str:
        return f"{self.number}/{self.transactions}"

    async def tell(self, text: str) -> None:
        found = re.search(r"idle_in_transaction_session_timeout = (\d+)", text)
        if found:
            self.idle_seconds = int(found[1]) / 1000

    async def execute(self, what: str | Statement) -> Rows:
        """Send a statement, and wait for what comes back."""
        if self.cut:
            raise ConnectionResetError("the connection is broken")
        self.reply = self.server.loop.create_future()
        self.server.receive(self, what, self.reply)
        rows: Rows = await self.reply
        return rows

    async def end(self) -> None:
        self.server.hang_up(self)


class Link:
    """Stands where a driver's link stands."""

    dialect = "postgresql"

    def __init__(self, connection: Connection) -> None:
        self.execute = connection.execute


class Server:
    """The database."""

    def __init__(
        self,
        loop: Loop,
        random: Random,
        trace: Callable[..., None],
        fault: Callable[[Process | None, str], None],
        view: type[View] = View,
    ) -> None:
        self.loop = loop
        self.random = random
        self.trace = trace
        self.fault = fault
        self.process = Process("database")
        self._context = loop.inside(self.process)
        self.weather = Weather()
        self.up = True
        self.rose_at = -math.inf  # when it was back after its last restart
        self.tables = Tables(lambda: loop.now)
        self.publishers: dict[str, Publisher] = {}
        self._view = view
        self._connections: list[Connection] = []
        self.foreign: list[str] = []  # writes of those who had lost their lane
        self._number = 0
        self._locks: dict[int, dict[Connection, str]] = {}
        self._parked: list[tuple[Connection, Statement, Future]] = []

    # ── the network ────────────────────────────────────────────────────────────────────────────

    async def connect(self, *_: Any, **__: Any) -> Connection:
        """Stands in for `opening.postgresql`."""
        await asyncio.sleep(self._delay(current()))
        if not self.up or current().dead:
            raise ConnectionRefusedError("nobody listens")
        self._number += 1
        connection = Connection(self, current(), self._number)
        self._connections.append(connection)
        return connection

    def _delay(self, process: Process) -> float:
        weather = self.weather
        if weather.tail and self.random.random() < weather.tail:
            delay = self.random.random() * weather.tail_seconds
            if delay > SLOW_SECONDS:
                self.fault(process, "slow network")
            return delay
        return -weather.latency_seconds * math.log(1.0 - self.random.random())

    def _later(self, delay: float, step: Callable[..., Any], *args: Any) -> Handle:
        return self.loop.call_later(delay, step, *args, context=self._context)

    def receive(self, connection: Connection, what: str | Statement, reply: Future) -> None:
        """A statement is on its way."""
        delay = self._delay(connection.process)
        connection.arrives_at = self.loop.now + delay
        self._later(delay, self._arrive, connection, what, reply)

    def hang_up(self, connection: Connection) -> None:
        """The client closes its end; what it had sent may or may not still be carried out."""
        if connection.cut:
            return
        connection.cut = True
        wait = self._delay(connection.process)
        if connection.arrives_at > self.loop.now and self.random.random() < 0.5:
            wait += connection.arrives_at - self.loop.now
        self._later(wait, self._client_left, connection)

    def _client_left(self, connection: Connection) -> None:
        if any(waiting[0] is connection for waiting in self._parked):
            connection.leaving = True
        else:
            self._end_session(connection)

    def snap(self, connection: Connection, why: str) -> None:
        """The network between the two ends is gone; the server may notice later."""
        if connection.cut:
            return
        self.fault(connection.process, why)
        connection.cut = True
        wait = self.random.choice((0.0, self.random.random() * 3))
        self._later(wait, self._client_left, connection)
        if connection.reply is not None and not connection.reply.done():
            connection.reply.set_exception(ConnectionResetError(why))

    def snap_all(self, process: Process, why: str) -> None:
        """All connections of a process break."""
        for connection in [each for each in self._connections if each.process is process]:
            self.snap(connection, why)

    def lose(self, process: Process) -> None:
        """A process died. Its machine closes what it had open, unless that died too."""
        silent = self.random.random() < 0.1
        for connection in [each for each in self._connections if each.process is process]:
            if silent:
                connection.cut = True
            else:
                self.hang_up(connection)

    def restart(self, seconds: float) -> None:
        """Every session ends, every open transaction is undone; back after so many seconds."""
        self.up = False
        self.fault(None, "server restart")
        self._parked.clear()
        for connection in list(self._connections):
            self._end_session(connection)
            self.snap(connection, "server restart")
        for publisher in list(self.publishers.values()):
            self.roll_back(publisher)
        self._later(seconds, self._rise)

    def _rise(self) -> None:
        self.up, self.rose_at = True, self.loop.now
        self.trace("up")

    # ── sessions ───────────────────────────────────────────────────────────────────────────────

    def _arrive(self, connection: Connection, what: str | Statement, reply: Future) -> None:
        if connection.gone:
            return
        if self.random.random() < self.weather.breaks:
            self.snap(connection, "lost before its effect")
            self._end_session(connection)
            return
        self._carry_out(connection, what, reply)

    def _carry_out(self, connection: Connection, what: str | Statement, reply: Future) -> None:
        rows: Rows = []
        if connection.idle_timer is not None:
            connection.idle_timer.cancel()
        if what == "BEGIN":
            connection.view = self._view(self.tables, connection.process)
            connection.transactions += 1
        elif what == "COMMIT":
            assert connection.view is not None
            self._commit(connection, connection.view)
            self.trace("commit", connection.process.name)
            self._end_transaction(connection)
        else:
            assert isinstance(what, Statement)
            if self._must_wait(connection, what):
                self._parked.append((connection, what, reply))
                return
            rows = self._answer(connection, what)
        if connection.leaving:
            self._end_session(connection)
            return
        if connection.view is not None:
            connection.idle_timer = self._later(connection.idle_seconds, self._idle, connection)
        if self.random.random() < self.weather.breaks:
            self.snap(connection, "lost after its effect")
        else:
            self._later(self._delay(connection.process), self._reply, connection, reply, rows)

    def _reply(self, connection: Connection, reply: Future, rows: Rows) -> None:
        if not connection.cut and not reply.done():
            reply.set_result(rows)

    def _answer(self, connection: Connection, statement: Statement) -> Rows:
        name = statement.name
        if name == "horizon":
            return [(name,) for name in self._open_publishers(connection)]
        if name == "open_publishers":
            return [(name, None) for name in self._open_publishers(connection)]
        view = connection.view or self._view(self.tables, connection.process)
        rows: Rows = []
        for values in statement.many if statement.many is not None else [statement.values or {}]:
            if name == "lanes_lock_free":
                values = {**values, "lane_list": self._not_locked(connection, values["lane_list"])}
            rows = view.answer(name, values)
        if connection.view is None:
            self._commit(connection, view)
        else:
            connection.writes_outbox = connection.writes_outbox or name in WRITES_OUTBOX
            if name == "lanes_lock_free":
                self._lock(connection, [lane for lane, _ in rows], "update")
        self.trace(name, connection.process.name, len(rows))
        return rows

    def _commit(self, connection: Connection, view: View) -> None:
        """What a relay has written stands; whoever is not the owner of a lane writes nothing."""
        for lane in view.written():
            if self.tables.lane[lane].owner != connection.process.owner:
                self.foreign.append(f"{connection.process.name} wrote into a lane of another")
        view.commit()

    def _idle(self, connection: Connection) -> None:
        if connection.view is not None and not connection.gone:
            self.trace("idle in transaction", connection.process.name)
            self._end_session(connection)
            self.snap(connection, "idle in transaction")

    def _end_session(self, connection: Connection) -> None:
        if connection.gone:
            return
        connection.gone = True
        self._connections.remove(connection)
        self._parked = [waiting for waiting in self._parked if waiting[0] is not connection]
        self._end_transaction(connection)

    # ── locks ──────────────────────────────────────────────────────────────────────────────────

    def _must_wait(self, connection: Connection, statement: Statement) -> bool:
        """Take the locks the statement needs, or find that somebody else has one of them."""
        values = statement.values or {}
        if statement.name in SHARE or statement.name == "lanes_release":
            lanes = View(self.tables).fenced(values)
        elif statement.name in UPDATE:
            rows = self.tables.lane
            lanes = [lane for lane in sorted(rows) if rows[lane].owner == values["owner"]]
        else:
            return False
        mode = "share" if statement.name in SHARE else "update"
        if any(self._conflicts(connection, lane, mode) for lane in lanes):
            return True
        if connection.view is not None:
            self._lock(connection, lanes, mode)
        return False

    def _conflicts(self, connection: Connection, lane: int, mode: str) -> bool:
        return any(
            other is not connection and "update" in (mode, theirs)
            for other, theirs in self._locks.get(lane, {}).items()
        )

    def _not_locked(self, connection: Connection, lanes: list[int]) -> list[int]:
        return [lane for lane in lanes if not self._conflicts(connection, lane, "update")]

    def _lock(self, connection: Connection, lanes: list[int], mode: str) -> None:
        for lane in lanes:
            self._locks.setdefault(lane, {})[connection] = mode

    def _end_transaction(self, connection: Connection) -> None:
        connection.view, connection.writes_outbox = None, False
        for holders in self._locks.values():
            holders.pop(connection, None)
        parked, self._parked = self._parked, []
        for waiting in parked:
            self._carry_out(*waiting)

    # ── publishers ─────────────────────────────────────────────────────────────────────────────

    def _open_publishers(self, asker: Connection) -> list[str]:
        writers = [
            each.virtual_transaction
            for each in self._connections
            if each.writes_outbox and each is not asker
        ]
        return [*self.publishers, *writers]

    def open_publisher(self) -> Publisher:
        """A transaction that has its lock on the outbox."""
        if not self.up:
            raise ConnectionRefusedError("nobody listens")
        self._number += 1
        publisher = Publisher(f"p{self._number}")
        self.publishers[publisher.name] = publisher
        return publisher

    def commit(self, publisher: Publisher) -> None:
        """Its rows become visible; a moment later its lock is gone."""
        publisher.over = True
        self.tables.dedup.update(publisher.dedup)
        for row in publisher.rows:
            if row.deliver_at is not None:
                self.tables.delayed[row.message.id] = row
            else:
                self.tables.outbox[row.place] = row
        wait = self.random.choice((0.0, self.random.expovariate(20)))
        self._later(wait, self.publishers.pop, publisher.name, None)

    def roll_back(self, publisher: Publisher) -> None:
        """As if it had never been, but for the positions it took."""
        if not publisher.over:
            publisher.over = True
            self.publishers.pop(publisher.name, None)
