"""The benchmark at its smallest, without peers, so that it cannot rot."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HOME = Path(__file__).parent.parent
# The rest starts many more processes: it is run with the guarantees at full size.
EVERYDAY = ["hot-key", "backlog"]
MORE = ["drain", "nats", "latency", "tax", "publish", "pinned", "memory", "two-relays", "keys"]
MORE += ["archive", "gateway"]
REQUIRED = os.environ.get("POSTROOM_REQUIRE") == "all"
BIG = os.environ.get("POSTROOM_GUARANTEES") == "big"
SECTIONS = EVERYDAY + (MORE if BIG else [])

linux = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")


def run(tmp_path: Path, sections: list[str]) -> tuple[dict[str, Any], str, str]:
    """Run sections at their smallest; what they found, what was printed, and the page."""
    figures, page = tmp_path / "figures.json", tmp_path / "performance.md"
    page.write_text((HOME / "docs" / "performance.md").read_text())
    options = ["--quick", "--no-peers", "--any-load", "--json", str(figures), "--page", str(page)]
    options += ["--pictures", str(tmp_path / "pictures")]
    paths = [str(HOME / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "bench", *options, *sections]
    done = subprocess.run(command, cwd=HOME, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(figures.read_text())
    assert list(found) == sections
    for name, section in found.items():
        assert section["lines"], name
        assert all(line["figure"] in done.stdout for line in section["lines"]), name
    return found, done.stdout, page.read_text()


@linux
def test_every_postgres_nats_section_runs_and_draws(tmp_path: Path) -> None:
    found, _, page = run(tmp_path, SECTIONS)
    assert found["hot-key"]["numbers"]["rates"]["postroom"] > 0
    assert found["hot-key"]["lines"][1]["figure"] in page
    drain = kept((HOME / "docs" / "performance.md").read_text())["drain"]
    assert BIG or kept(page)["drain"] == drain, "a section that was not run lost its figures"
    for picture in ("throughput.svg", "backlog.svg"):
        assert (tmp_path / "pictures" / picture).read_text().endswith("</svg>\n")


def test_a_run_on_a_busy_machine_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sys.path.insert(0, str(HOME))
    from bench.__main__ import main

    monkeypatch.setattr(os, "getloadavg", lambda: (1.5, 0.0, 0.0))
    with pytest.raises(SystemExit):
        main(["--quick", "--no-peers", "hot-key"])
    said = capsys.readouterr()
    assert "load of the machine: 1.50" in said.out
    assert "--any-load" in said.err


if BIG:  # they start many processes

    @linux
    def test_consumers_on_postgres_mariadb_sqlite_are_measured(tmp_path: Path) -> None:
        found, _, page = run(tmp_path, ["consume"])
        rates = found["consume"]["numbers"]["rates"]
        for kind in ("postgresql", *(["mariadb"] if REQUIRED else []), "sqlite"):
            assert all(rate > 0 for rate in rates[kind].values()), kind
        bars = [line for line in found["consume"]["lines"] if line["bar"]]
        assert [line["bar"] for line in bars] == ["≥ 3", "≥ 3"]
        assert kept(page) == kept((HOME / "docs" / "performance.md").read_text())

    @linux
    def test_kafka_rabbitmq_redis_are_measured_beside_their_clients(tmp_path: Path) -> None:
        found, _, page = run(tmp_path, ["brokers"])
        lines = [line for line in found["brokers"]["lines"] if line["bar"]]
        if REQUIRED:
            assert [line["system"].split()[2] for line in lines] == ["Kafka", "RabbitMQ", "Redis"]
        assert all(line["bar"] == "≥ 0.7" and line["ratio"] > 0 for line in lines)
        assert kept(page) == kept((HOME / "docs" / "performance.md").read_text())


def kept(page: str) -> dict[str, str]:
    """The tables of the page that these runs have nothing to do with."""
    _, *parts = re.split(r"<!-- section (\S+) -->", page.partition("<!-- end of figures")[0])
    tables = dict(zip(parts[::2], parts[1::2], strict=True))
    assert len(tables) >= 4, "the page lost the figures of other sections"
    return {name: text for name, text in tables.items() if name not in ("brokers", "consume")}
