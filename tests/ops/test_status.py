"""`postroom status`, once and live: what a relay says of itself, for people and for programs."""

import asyncio
import io
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable
from contextlib import closing, suppress
from fcntl import ioctl
from pathlib import Path
from typing import Any

import pytest
from commands import COMMAND, Here
from house_tools import House
from rich.console import Console

from helpers import eventually_async
from postroom.brokers import memory
from postroom.brokers.base import Permanent, Transient
from postroom.ops import actions, screen, status
from postroom.ops.status import Rates
from postroom.ops.watch import Frame, frames
from postroom.outbox.relay import Relay
from postroom.outbox.rules import Breaker
from servers import MariaDBServer, PostgresServer

QUICK: dict[str, Any] = {"lease_seconds": 6, "send_timeout_seconds": 1, "poll_max_seconds": 0.05}
DOWN = Transient("ConnectionRefused", "nobody listens", down="broker")
CONTROL = re.compile(r"\x1b|\r")


async def test_a_relay_reports_and_status_shows_it(house: House) -> None:
    house.publish("ok", key="a")
    house.publish("poison", key="b")
    house.publish("behind", key="b")
    broker = memory.broker(house.name)
    broker.fail(lambda m: b"poison" in m.payload, Permanent("unreadable", "it is poison"))
    async with Relay(house.url, f"memory://{house.name}", name="mail-1", **QUICK) as relay:

        async def reported() -> dict[str, Any] | None:
            state = await actions.status(house.url)
            (worker,) = state["workers"] or [{"report": None}]
            said = worker["report"]
            return state if said and said["delivered"] == said["dead"] == 1 else None

        state = await eventually_async(reported, retry=())
        assert state is not None
        (worker,) = state["workers"]
        assert (worker["name"], worker["kind"]) == ("mail-1", "relay")
        assert worker["incarnation"] == relay.owner
        assert worker["seen_seconds_ago"] < 5
        assert abs(worker["clock_ahead_seconds"]) < 5
        assert set(relay.report()) <= set(worker["report"])
        assert worker["report"]["destinations"] == state["destinations"] == []
        assert (state["pending"], state["held"], state["dead"]) == (0, 2, 1)
        assert (state["held_keys"], state["blocked_keys"]) == (1, 1)
        assert state["oldest_pending_seconds"] is None
        assert state["oldest_held_seconds"] > 0
        assert {lane["owner_name"] for lane in state["lanes"]} == {"mail-1"}


async def test_a_destination_that_is_down_is_seen(house: House) -> None:
    broker = memory.broker(house.name)
    broker.fail(lambda m: True, DOWN, times=None)
    async with Relay(house.url, f"memory://{house.name}", name="mail-1", **QUICK) as relay:
        id = await asyncio.to_thread(house.publish, "x", key="a")

        async def down() -> list[dict[str, Any]]:
            return (await actions.status(house.url))["destinations"]

        (seen,) = await eventually_async(down, retry=())
        assert (seen["worker"], seen["error_code"]) == ("mail-1", "ConnectionRefused")
        assert seen["name"] == f"memory://{house.name}"
        assert seen["error"] == "nobody listens"
        assert 0 <= seen["retry_in_seconds"] <= 5
        shown = await actions.message(house.url, id)
        assert (
            shown["waits_for"]
            == f"memory://{house.name} is down, ConnectionRefused: nobody listens"
        )
        broker.clear()
        await eventually_async(lambda: relay.tally.delivered == 1)

        async def up() -> bool:
            return not await down()

        await eventually_async(up, retry=())
        assert "waits_for" not in await actions.message(house.url, id)


def test_the_next_try_is_counted_from_the_report_and_not_from_the_limit_of_a_probe() -> None:
    breaker = Breaker(first_seconds=2, probe_seconds=15)
    breaker.failed(0, "down", "no", lambda: 1.0)
    assert breaker.seconds_left(0.5) == 1.5
    breaker.admits(2)
    assert breaker.seconds_left(3) == 0
    down = {"name": "topic a", "error_code": "down", "error": "no", "retry_in_seconds": 1.5}
    worker = {"name": "mail-1", "seen_seconds_ago": 1.0, "report": {"destinations": [down]}}
    assert status._destinations([worker]) == [{"worker": "mail-1", **down, "retry_in_seconds": 0.5}]
    state = {"destinations": [down], "routes": None}
    assert status.waits_for(state, "a") == "topic a is down, down: no"
    assert status.waits_for(state, "b") is None


async def test_a_delayed_message_that_is_due_counts(house: House) -> None:
    house.publish("later", key="a", delay_seconds=3600)
    assert (await actions.status(house.url))["overdue_delayed_seconds"] is None
    house.publish("late", key="a", delay_seconds=-30)
    state = await actions.status(house.url)
    assert state["delayed"] == 2
    assert 29 < state["overdue_delayed_seconds"] < 300


def test_rates_are_differences_of_reports_and_a_silent_worker_does_nothing() -> None:
    rates = Rates()

    def worker(who: str, at: float, delivered: int, seen: float = 0.5) -> dict[str, Any]:
        report = {"at": at, "delivered": delivered, "held": delivered // 10, "dead": 0}
        return {"incarnation": who, "seen_seconds_ago": seen, "report": report}

    def add(*workers: dict[str, Any]) -> float:
        return rates.add({"workers": list(workers)})["delivered_per_second"]

    assert add(worker("a", 100.0, 5000), worker("b", 200.0, 0)) == 0
    assert add(worker("a", 100.0, 5000), worker("b", 200.0, 0)) == 0
    assert add(worker("a", 102.0, 5200), worker("b", 201.0, 30)) == 130
    # A look between two beats changes nothing, and one that died counts no more.
    assert add(worker("a", 102.0, 5200), worker("b", 201.0, 30)) == 130
    assert add(worker("a", 102.0, 5200, seen=60), worker("b", 201.0, 30)) == 30
    assert add(worker("c", 50.0, 10)) == 0
    assert rates.add({"workers": [{"incarnation": "d", "report": None}]})["held_per_second"] == 0
    # Old reports leave: what counts is the present.
    for second in range(100):
        speed = add(worker("e", 300.0 + second, min(second, 50) * 10))
    assert speed == 0


# ── the live screen ────────────────────────────────────────────────────────────────────────────


class Screen:
    """The command on a terminal of its own."""

    def __init__(self, *arguments: str, rows: int = 24, columns: int = 80, **environ: str) -> None:
        leader, follower = pty.openpty()
        ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("POSTROOM_", "COLU"))}
        clean |= {"TERM": "xterm-256color", "LANG": "C.UTF-8", **environ}
        clean.pop("NO_COLOR", None) if "NO_COLOR" not in environ else None
        self.before = termios.tcgetattr(follower)
        self.process = subprocess.Popen(
            [COMMAND, *arguments],
            stdin=follower,
            stdout=follower,
            stderr=follower,
            env=clean,
            start_new_session=True,
        )
        self.leader, self.follower, self.text = leader, follower, ""

    def read_until(self, what: Callable[[str], Any], timeout: float = 30.0) -> str:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if what(self.text):
                return self.text
            ready, _, _ = select.select([self.leader], [], [], 0.1)
            if ready:
                with suppress(OSError):
                    self.text += os.read(self.leader, 65536).decode(errors="replace")
        raise AssertionError(f"not within {timeout} s:\n{self.text}")

    def press(self, keys: str) -> None:
        os.write(self.leader, keys.encode())

    def end(self) -> int:
        """Wait for the end, reading on: a full pipe would keep it."""
        deadline = time.monotonic() + 20
        while self.process.poll() is None and time.monotonic() < deadline:
            ready, _, _ = select.select([self.leader], [], [], 0.05)
            if ready:
                with suppress(OSError):
                    self.text += os.read(self.leader, 65536).decode(errors="replace")
        return self.process.wait(1)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.leader)
        os.close(self.follower)


@pytest.mark.parametrize("how", ["q", "ctrl-c"])
def test_a_terminal_gets_a_live_screen_and_gets_itself_back(house: House, how: str) -> None:
    house.publish("x", key="a")
    with closing(
        Screen("status", "--watch", "--interval", "0.2", "--database", house.url)
    ) as terminal:
        seen = terminal.read_until(lambda text: text.count("UTC") >= 3)
        assert "\x1b[?1049h" in seen  # the other screen, so that the scroll-back stays as it was
        assert "\x1b[31m" in seen  # nobody works, and a message waits: red
        if how == "q":
            terminal.press("xq")
        else:
            terminal.process.send_signal(signal.SIGINT)
        assert terminal.end() == 0
        assert "\x1b[?1049l" in terminal.text
        assert "Traceback" not in terminal.text
        assert termios.tcgetattr(terminal.follower)[3] == terminal.before[3]


def test_no_color_means_no_colours(house: House) -> None:
    house.publish("x", key="a")
    with closing(
        Screen("status", "--database", house.url, NO_COLOR="1"),
    ) as terminal:
        assert terminal.end() == 0
        assert "\x1b[31m" not in terminal.text
        assert "\x1b[33m" not in terminal.text
    with closing(Screen("status", "--database", house.url)) as terminal:
        assert terminal.end() == 0
        assert "\x1b[33m" in terminal.text


def watch(url: str, *options: str) -> subprocess.Popen[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("POSTROOM_")}
    return subprocess.Popen(
        [COMMAND, "status", "--watch", "--interval", "0.2", "--database", url, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean,
    )


def test_programs_get_a_document_a_line(house: House) -> None:
    process = watch(house.url, "--json")
    assert process.stdout is not None
    documents = [json.loads(process.stdout.readline()) for _ in range(3)]
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (0, "")
    assert len({document["at"] for document in documents}) == 3
    for document in documents:
        assert document["pending"] == 0
        assert document["rates"] == {
            "delivered_per_second": 0, "held_per_second": 0, "dead_per_second": 0
        }  # fmt: skip


def test_without_a_terminal_pages_are_plain(house: House) -> None:
    process = watch(house.url)
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(25)]
    process.send_signal(signal.SIGTERM)
    rest, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (0, "")
    text = "".join(lines) + rest
    assert text.count("UTC") >= 2
    assert not CONTROL.search(text)


@pytest.mark.parametrize("kind", ["postgresql", "mariadb"])
def test_a_lost_database_is_said_and_watched_for(kind: str, request: pytest.FixtureRequest) -> None:
    server: PostgresServer | MariaDBServer = request.getfixturevalue(
        {"postgresql": "postgres", "mariadb": "mariadb"}[kind]
    )
    server.require_private()
    name = "watch_lost"
    url = server.create_database(name)
    house = House(url, name)
    house.install()
    house.close()
    with closing(Screen("status", "--watch", "--interval", "0.2", "--database", url)) as terminal:
        terminal.read_until(lambda text: text.count("UTC") >= 2)
        server.kill()
        red = terminal.read_until(lambda text: "\x1b[1;31m" in text)
        assert "Traceback" not in red
        terminal.text = ""
        server.start()
        terminal.read_until(
            lambda text: (
                "UTC" in text
                and "\x1b[1;31m" not in text.split("UTC")[-1]
                and text.count("UTC") > 3
            )
        )
        terminal.press("q")
        assert terminal.end() == 0
    server.drop_database(name)


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("--watch", "--interval", "0"), 2, "interval"),
        (("--watch", "--interval", "x"), 2, "interval"),
        (("--interval", "2"), 2, "--watch"),
        (("--watch", "--database", "sqlite:///gone.db"), 1, "postroom db install"),
        (("--watch", "--database", "postgresql://127.0.0.1:9/x"), 3, "127.0.0.1"),
    ],
)
def test_wrong_input_is_one_sentence(
    here: Here, tmp_path: Path, arguments: tuple[str, ...], code: int, text: str
) -> None:
    house = House(f"sqlite:///{tmp_path}/app.db", "x")
    house.install()
    house.close()
    given = () if "--database" in arguments else ("--database", house.url)
    done = here("status", *arguments, *given)
    assert done.returncode == code, done.stderr
    assert text in done.stderr
    assert done.stderr.startswith("postroom: ")
    assert done.stderr.count("\n") == 1


# ── how it looks ───────────────────────────────────────────────────────────────────────────────


def consumers(count: int) -> list[dict[str, Any]]:
    """Consumers in trouble: not alive, without a broker, with keys behind dead letters."""
    return [
        {"consumer": f"[red]billing-{n}", "alive": n % 2, "seen_seconds_ago": 3.0 + 40 * n,
         "received_per_second": 12.0, "handled_per_second": 1_234.5, "waiting": 40, "dead": 2,
         "held_keys": 10_000, "blocked_keys": 2, "lag": None if n else 123_456,
         "trouble": "broker: no answer within 10 s " * 5,
         "sources": [{"source": f"orders-{p}", "worker": "w"} for p in range(8)]}
        for n in range(count)
    ]  # fmt: skip


def busy(workers: int, destinations: int) -> dict[str, Any]:
    """A bad day: many workers, many destinations down, names that look like markup."""
    return {
        "published": True, "consumers": consumers(destinations), "pending": 10_000,
        "held": 812, "delayed": 30, "dead": 3, "count_limit": 10_000,
        "oldest_pending_seconds": 12.3, "oldest_held_seconds": 7_300.0,
        "overdue_delayed_seconds": 1.0, "held_keys": 40, "blocked_keys": 3,
        "lanes": [
            {"lane": n, "owner": f"w{n % workers}" if n != 5 else None, "owner_name": "x",
             "epoch": 4, "paused": n == 7, "lease_seconds": 20.0 - n}
            for n in range(16)
        ],
        "workers": [
            {"incarnation": f"w{n}", "name": f"[red]mail-{n}", "seen_seconds_ago": 0.4 + 20 * n,
             "kind": "relay", "report": {"in_flight": 120, "delivered": 1_234_567}}
            for n in range(workers)
        ],
        "destinations": [
            {"worker": "mail-0", "name": f"nats://broker-{n}:4222", "error_code": "timeout",
             "error": "no answer within 10 s " * 5, "retry_in_seconds": 12.0}
            for n in range(destinations)
        ],
    }  # fmt: skip


@pytest.mark.parametrize(("rows", "columns"), [(24, 80), (24, 200), (60, 132), (12, 40)])
@pytest.mark.parametrize(("workers", "destinations"), [(1, 0), (3, 1), (40, 20)])
def test_a_screen_fits(rows: int, columns: int, workers: int, destinations: int) -> None:
    state = busy(workers, destinations)
    with Path(os.devnull).open("w") as nowhere:
        console = Console(width=columns, height=rows, file=nowhere, record=True)
        console.print(
            screen.screen(
                state, title="t" * 300, rates={"delivered_per_second": 1234.5},
                backlog=[*range(60)], height=rows, error=None,
            )
        )  # fmt: skip
    lines = console.export_text().splitlines()
    if rows >= 24:
        assert len(lines) <= rows, "\n".join(lines)
    assert max(map(len, lines)) <= columns
    text = "\n".join(lines)
    if columns >= 80:
        assert "1,234.5/s" in text
        assert "10,000+" in text
        assert "[red]mail-0" in text
        assert "nobody works lanes 5" in text
        assert "paused: lanes 7" in text
        if destinations:
            assert "nats://broker-0:4222" in text
            assert "[red]b" in text
            assert "123,456" in text
            assert "10,000+" in text
        if workers == 40:
            assert "more" in text


def test_what_others_say_does_nothing_to_a_terminal() -> None:
    """Names of workers and brokers and what went wrong are others' words, on page and screen."""
    state, odd = busy(1, 1), "\x1b[2J\x9b31m"
    state["workers"][0]["name"] = f"worker {odd}"
    state["destinations"][0] |= {
        "name": f"broker {odd}", "worker": f"teller {odd}", "error": f"text {odd}",
    }  # fmt: skip
    state["lanes"][0]["owner_name"] = f"owner {odd}"
    state["consumers"][0] |= {"consumer": f"consumer {odd}", "trouble": f"trouble {odd}"}
    state["consumers"][0]["sources"] = [{"source": f"source {odd}", "worker": "w"}]
    about: dict[str, Any] = {"title": "t", "rates": {"delivered_per_second": 1.0}, "backlog": [1]}
    for shown, owners in (
        (
            screen.page(state),
            *[("worker", "broker", "teller", "text", "owner", "consumer", "trouble", "source")],
        ),
        (
            screen.screen(state, **about, height=60, error=f"outage {odd}"),
            ("worker", "broker", "teller", "text", "outage", "consumer", "trouble", "source"),
        ),
    ):
        console = Console(width=300, file=io.StringIO(), color_system=None)
        console.print(shown)
        text = console.file.getvalue()  # type: ignore[attr-defined]
        assert [who for who in owners if rf"{who} \x1b[2J\x9b31m" not in text] == [], text
        assert text.replace("\n", "").isprintable()


def test_small_words_of_the_screen() -> None:
    assert screen.span([3, 1, 2, 7]) == "1-3, 7"
    assert screen.span([]) == ""
    assert [screen.age(s) for s in (None, 1.26, 119, 120, 7200, 172_800)] == [
        "none", "1.3 s", "119.0 s", "2 m", "2 h", "2 d"
    ]  # fmt: skip
    assert screen.sparkline([0, 0]) == "▁▁"
    assert screen.sparkline([0, 5, 10]) == "▁▅█"


async def test_frames_go_on_through_an_outage(house: House) -> None:
    """Without a screen: the last state stays, the error comes, and then it goes."""
    stopping = asyncio.Event()
    seen: list[Frame] = []
    async for frame in frames(house.url, interval_seconds=0.1, stopping=stopping):
        seen.append(frame)
        if len(seen) == 2:
            house.sql("ALTER TABLE {p}meta RENAME TO {bare}meta_away")
        if len(seen) == 4:
            house.sql("ALTER TABLE {p}meta_away RENAME TO {bare}meta")
        if len(seen) == 6:
            stopping.set()
    errors = [frame.error is not None for frame in seen]
    assert errors == [False, False, True, True, False, False]
    assert seen[2].state == seen[1].state
    assert set(seen[2].document) == {"at", "error"}
