"""Runs tests with bugs planted: reads {"bug": ["test", …], …} and answers a line of JSON for each.

Everything is imported once and a process forked for each bug, since starting pytest takes longer
than most of the tests.
"""

import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # as for all tests

import hypothesis  # noqa: F401
import pytest
import pytest_asyncio  # noqa: F401

import postroom.ops.cli
import postroom.outbox.relay  # noqa: F401
import stages  # noqa: F401

AT_ONCE = 3
LIMIT_SECONDS = 150  # a bug may let a test hang


class Recorder:
    """Keeps what became of each test, by the part of it that failed."""

    def __init__(self) -> None:
        self.failed: dict[str, str] = {}
        self.broken: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            kept = self.failed if report.when == "call" else self.broken
            crash = getattr(report.longrepr, "reprcrash", None)
            kept[report.nodeid] = crash.message if crash else str(report.longrepr)


def run(bug: str, tests: list[str], answer: str) -> None:
    """In a process of its own: plant, test, and write down how it went."""
    signal.alarm(LIMIT_SECONDS)
    os.environ["POSTROOM_PLANTED"] = bug
    log = os.open(f"{answer}.log", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(log, stream)
    recorder = Recorder()
    code = pytest.main(["-q", "-p", "no:cacheprovider", *tests], plugins=[recorder])
    sys.stdout.flush()
    with open(answer, "w") as file:
        json.dump({"code": int(code), "failed": recorder.failed, "broken": recorder.broken}, file)


def main() -> None:
    bugs: dict[str, list[str]] = json.load(sys.stdin)
    waiting, under_way = list(bugs), dict[int, str]()
    with tempfile.TemporaryDirectory() as folder:
        while waiting or under_way:
            while waiting and len(under_way) < AT_ONCE:
                bug = waiting.pop(0)
                if pid := os.fork():
                    under_way[pid] = bug
                else:
                    try:
                        run(bug, bugs[bug], f"{folder}/{bug}")
                    finally:
                        os._exit(0)
            pid, _ = os.wait()
            print(json.dumps(answer_of(under_way.pop(pid), folder)), flush=True)


def answer_of(bug: str, folder: str) -> dict[str, Any]:
    with open(f"{folder}/{bug}.log", errors="replace") as file:
        answer: dict[str, Any] = {"bug": bug, "log": file.read()[-20_000:]}
    try:
        with open(f"{folder}/{bug}") as file:
            return answer | json.load(file)
    except FileNotFoundError:
        return answer | {"code": -1, "failed": {}, "broken": {}}


if __name__ == "__main__":
    main()
