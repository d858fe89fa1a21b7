"""`postroom gateway --simulate` ends well: with nothing at hand but the command, and whatever lies
about where it is played."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from helpers import eventually_async
from postroom.errors import ConfigurationError, PostroomError
from postroom.gateway import tokens_from
from postroom.gateway.children import Child
from postroom.gateway.exchange import Manners
from postroom.ops import gateway_show

TRUE = (
    "✓ every order was accepted once",
    "✓ no order is in the exchange's book twice",
    "✓ what the ledger calls succeeded is in its book",
    "✓ clients always got a true answer",
)
REAL = """
from pathlib import Path

def send(message):
    Path(__file__).with_name("placed").touch()
"""


def simulate(folder: Path, orders: int, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("POSTROOM_")}
    clean |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "COLUMNS": "100"}
    command = ("-m", "postroom.ops.cli", "gateway", "--simulate", "--orders", str(orders))
    return subprocess.run(
        [sys.executable, *command],
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
    with pytest.raises(ConfigurationError) as error:
        tokens_from("ada=ok canary")
    assert "canary" not in str(error.value)
