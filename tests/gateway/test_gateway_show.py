"""`postroom gateway --simulate` ends well: with nothing at hand but the command, and whatever lies
about where it is played."""

import asyncio
import io
import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import cast

import pytest
from rich.console import Console

from helpers import eventually, eventually_async
from postroom import Ledger
from postroom.errors import ConfigurationError, PostroomError
from postroom.gateway import tokens_from
from postroom.gateway.children import Child
from postroom.gateway.exchange import Book, Manners
from postroom.gateway.load import Load
from postroom.ops import gateway_show

TRUE = (
    "✓ every order was accepted once",
    "✓ no order is in the exchange's book twice",
    "✓ what the ledger calls succeeded is booked there",
    "✓ clients always got a true answer",
)
REAL = """
from pathlib import Path

def send(message):
    Path(__file__).with_name("placed").touch()
"""


def simulate(
    folder: Path, orders: int, *, manners: str | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("POSTROOM_")}
    clean |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "COLUMNS": "100"}
    command = ("-m", "postroom.ops.cli", "gateway", "--simulate", "--orders", str(orders))
    how = () if manners is None else ("--manners", manners)
    return subprocess.run(
        [sys.executable, *command, *how],
        cwd=folder,
        env=clean | environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def test_the_books_agree_in_the_end(tmp_path: Path) -> None:
    done = simulate(tmp_path, 30)
    assert done.returncode == 0, done.stdout + done.stderr
    for line in TRUE:
        assert line in done.stdout, done.stdout
    assert "deaths: exchange" in done.stdout


def test_it_keeps_away_from_the_exchange_of_the_place_where_it_is_played(tmp_path: Path) -> None:
    (tmp_path / "realx.py").write_text(REAL)
    settings = tmp_path / "postroom.toml"
    settings.write_text('[relay.routes]\n"orders.*" = "call:realx:send"\n')
    done = simulate(tmp_path, 5, POSTROOM_CONFIG=str(settings))
    assert not (tmp_path / "placed").exists(), "an invented order was placed at a real exchange"
    assert done.returncode == 0, done.stdout + done.stderr


def test_settings_of_the_place_where_it_is_played_do_not_stop_it(tmp_path: Path) -> None:
    (tmp_path / "postroom.toml").write_text("[relay\n")
    done = simulate(
        tmp_path, 5, POSTROOM_GATEWAY_TOKENS="ada=s3cr3t", POSTROOM_RELAY_LEASE_SECONDS="never"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for line in TRUE:
        assert line in done.stdout, done.stdout


def verdict_on(folder: Path, *orders: tuple[str, bool, str | None]) -> tuple[bool, str]:
    """What is said of orders: each with its state, whether it ended, and what the book says."""
    screen = Console(file=io.StringIO(), width=200)
    show = gateway_show.Show(folder, screen, len(orders), Manners(), 1)
    asyncio.run(show.prepare())
    load = Load("http://nowhere", orders=len(orders))
    with closing(sqlite3.connect(show.ledger)) as tx, closing(Book(str(show.book))) as book:
        for number, (state, ended, status) in enumerate(orders):
            entry = Ledger().accept(tx, {}, key=f"k{number}", type="t", topic="t").entry
            load.told.ids[entry.key] = entry.id
            tx.execute(
                "UPDATE postroom_ledger SET state = ?, finished_at = ? WHERE id = ?",
                (state, 1 if ended else None, entry.id),
            )
            if status is not None:
                book.enter(entry.id, {}, None if status == "booked" else "market_closed")
        tx.commit()
    return show._verdict(load), cast(io.StringIO, screen.file).getvalue()


PLACED, REJECTED = ("succeeded", True, "booked"), ("failed", True, "rejected")


def test_it_ends_well_if_every_order_is_known_to_be_placed_or_not(tmp_path: Path) -> None:
    right, said = verdict_on(tmp_path, PLACED, REJECTED, ("failed", True, None))
    assert right, said
    assert "✗" not in said
    assert "?" not in said


@pytest.mark.parametrize(
    ("order", "line"),
    [
        (("accepted", False, None), "✗ every order came to its end"),
        (("unknown", False, "booked"), "✗ every order came to its end"),
        (("unknown", True, None), "? 1 ended as unknown, of which 0 are booked"),
        (("unknown", True, "booked"), "? 1 ended as unknown, of which 1 are booked"),
        (("succeeded", True, None), "✗ what the ledger calls succeeded is booked there"),
        (("succeeded", True, "rejected"), "✗ what the ledger calls succeeded is booked there"),
        (("failed", True, "booked"), "✗ what it calls failed is not"),
    ],
)
def test_it_does_not_end_well_if_an_order_has_no_end_or_a_wrong_one(
    tmp_path: Path, order: tuple[str, bool, str | None], line: str
) -> None:
    right, said = verdict_on(tmp_path, PLACED, order)
    assert not right, said
    assert line in said


def test_what_the_exchange_loses_does_not_end_well(tmp_path: Path) -> None:
    done = simulate(tmp_path, 1, manners="lost=1,hang_seconds=0.01")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 ended as unknown, of which 0 are booked" in done.stdout


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["SIGTERM", "Ctrl-C"]
)
def test_what_is_ended_leaves_nothing_behind(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    (tmp_path / "temporary").mkdir()
    clean = {k: v for k, v in os.environ.items() if not k.startswith("POSTROOM_")}
    clean |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    clean |= {"TMPDIR": str(tmp_path / "temporary")}
    command = ("-m", "postroom.ops.cli", "gateway", "--simulate", "--orders", "2000")
    show = subprocess.Popen(
        [sys.executable, *command],
        env=clean,
        stdout=subprocess.DEVNULL,
        # Whoever runs the tests behind a shell may ignore Ctrl-C, and so would what they start.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    children: list[int] = []
    try:
        eventually(lambda: len(list(tmp_path.glob("temporary/*/*.log"))) == 3, 60)
        time.sleep(1.0)
        children = children_of(show.pid)
        assert len(children) >= 2, "some of the three may have been killed just now"
        show.send_signal(number)
        begun = time.monotonic()
        assert show.wait(30) == code
        assert time.monotonic() - begun < 5
        assert list(tmp_path.glob("temporary/*")) == []
        assert [pid for pid in children if Path(f"/proc/{pid}").exists()] == []
    finally:
        show.kill()
        for pid in children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def children_of(pid: int) -> list[int]:
    """The processes that a process has started."""
    children = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            if path.read_text().rpartition(")")[2].split()[1] == str(pid):
                children.append(int(path.parent.name))
    return children


async def test_what_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gateway_show.SETTINGS, "POSTROOM_RELAY_LEASE_SECONDS", "never")
    screen = Console(file=io.StringIO())
    with pytest.raises(
        PostroomError, match=r"ends as soon as .* the last it said: .*LEASE_SECONDS"
    ):
        await gateway_show.play(screen, orders=1)


async def test_a_child_finds_the_package_by_a_path_that_was_relative(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "only_here.py").write_text("import os; print(sorted(os.environ))")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "lib")
    monkeypatch.setenv("POSTROOM_CANARY", "x")
    own = {"POSTROOM_OWN": "y"}
    child = Child("it", ["-m", "only_here"], environment=own, log=tmp_path / "work" / "it.log")
    async with child:
        await eventually_async(lambda: "POSTROOM_OWN" in child.last_words(), 60)
    assert "CANARY" not in child.last_words()


def test_manners_are_spelled_as_they_are_read() -> None:
    manners = Manners(latency_seconds=0.5, rejects=0.1, refuses_copies=False, seed=7)
    assert Manners.parse(manners.spelled()) == manners
    assert Manners.parse("") == Manners()
    with pytest.raises(ConfigurationError, match="must be a number"):
        Manners.parse("rejects=often")


def test_tokens_are_read_and_never_shown() -> None:
    assert tokens_from("ada=s3cr3t bob=x=y") == {"ada": ["s3cr3t"], "bob": ["x=y"]}
    assert tokens_from("ada=old bob=x ada=new") == {"ada": ["old", "new"], "bob": ["x"]}
    assert tokens_from(None) == {}
    for joined in ("ada=s3cr3t,bob=x", "ada=s3cr3t, bob=x", "eve=z ada=s3cr3t,bob=x"):
        with pytest.raises(ConfigurationError, match="by spaces, not by commas") as caught:
            tokens_from(joined)
        assert "s3cr3t" not in str(caught.value)
    assert tokens_from("ada=a,b") == {"ada": ["a,b"]}
    with pytest.raises(ConfigurationError) as error:
        tokens_from("ada=ok canary")
    assert "canary" not in str(error.value)
