"""What the pages say works: their Python runs, their commands end as they say, and so does output.

A page is a story, played from top to bottom in an empty directory. What stands after the language
of a block says what becomes of it:

    python                  runs, with the names of the blocks before it; `await` may stand anywhere
    python postgresql       the same, as a story of its own on a database of that kind, in place of
                            postgresql://localhost/app (also: mariadb, mysql://localhost/app)
    python file=shop.py     is saved under that name; any language may have it
    console                 `$ postroom …`, `$ python …` and `$ export …` are carried out; a command
                            ends with 0, or as `# exit 1` behind it says; the lines below it are
                            found in its output in their order, where … stands for anything
    toml                    is a valid postroom.toml
"""

import ast
import asyncio
import inspect
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from postroom.config import load
from postroom.databases import migrate

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SERVERS = {"postgresql": "postgres", "mariadb": "mariadb"}
PATIENCE_SECONDS = 60

_BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_EXAMPLE_URL = re.compile(r"(postgresql|mysql)(\+\w+)?://localhost/app")
_EXIT = re.compile(r"\s+# exit (\d+)$")
_DONE_HERE = ("postroom demo", "make ", "pip ")


@dataclass
class Block:
    language: str
    words: list[str]
    text: str
    line: int

    @property
    def file(self) -> str | None:
        return next((w.removeprefix("file=") for w in self.words if w.startswith("file=")), None)

    @property
    def server(self) -> str | None:
        return next((word for word in self.words if word in SERVERS), None)


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(match[1], match[2].split(), match[3], text[: match.start(3)].count("\n"))
        for match in _BLOCK.finditer(text)
    ]


@dataclass
class Story:
    """One page being played."""

    page: Path
    folder: Path
    runner: asyncio.Runner
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "story"})
    environment: dict[str, str] = field(default_factory=dict)
    url: str | None = None

    def play(self, block: Block) -> None:
        if block.file:
            path = self.folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            self._run(block)
        elif block.language == "console":
            for command, expected in commands(block.text):
                self._command(command, expected)
        elif block.language == "toml":
            path = self.folder / "example.toml"
            path.write_text(block.text, encoding="utf-8")
            load(config=str(path), environ={})

    def _run(self, block: Block) -> None:
        text = _EXAMPLE_URL.sub(self._own_url, block.text) if self.url else block.text
        # Line numbers as in the page, so that a traceback leads there.
        code = compile(
            "\n" * block.line + text,
            str(self.page),
            "exec",
            flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT,
        )

        async def run() -> None:
            answer = eval(code, self.names)
            if inspect.isawaitable(answer):
                await answer

        self.runner.run(run())

    def _own_url(self, match: re.Match[str]) -> str:
        assert self.url is not None
        return f"{match[1]}{match[2] or ''}://{self.url.partition('://')[2]}"

    def _command(self, command: str, expected: list[str]) -> None:
        if command.startswith(_DONE_HERE):
            return
        if command.startswith("export "):
            pairs = command.removeprefix("export ").split()
            self.environment |= dict(pair.split("=", 1) for pair in pairs)
            return
        assert command.startswith(("postroom ", "python ")), command
        wanted = _EXIT.search(command)
        code, output = self._carry_out(_EXIT.sub("", command), expected)
        assert code == (int(wanted[1]) if wanted else 0), f"$ {command}\n{output}"
        missing = first_missing(expected, output)
        assert missing is None, f"$ {command}\nlacks the line\n{missing}\nin\n{output}"

    def _carry_out(self, command: str, expected: list[str]) -> tuple[int, str]:
        environment = {n: v for n, v in os.environ.items() if not n.startswith("POSTROOM_")}
        path = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
        environment |= {"PATH": path, "COLUMNS": "100", "PYTHONUNBUFFERED": "1"}
        environment |= self.environment
        words = command.split()
        stays = words[:2] == ["postroom", "relay"] and not {"--once", "--help"} & set(words)
        log = self.folder / "output.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            try:
                if stays:
                    while_it_works = [line for line in expected if "relay.stopped" not in line]
                    self._stop_when_done(process, log, while_it_works)
                code = process.wait(PATIENCE_SECONDS)
            finally:
                process.kill()
                process.wait()
        return code, log.read_text(encoding="utf-8")

    def _stop_when_done(
        self, process: subprocess.Popen[bytes], log: Path, expected: list[str]
    ) -> None:
        """Let a relay work until it has said what it should and is silent, then end it."""
        deadline = time.perf_counter() + PATIENCE_SECONDS
        said, silent_since = "", time.perf_counter()
        while process.poll() is None:
            if (now := log.read_text(encoding="utf-8")) != said:
                said, silent_since = now, time.perf_counter()
            done = "lanes.acquired" in said and first_missing(expected, said) is None
            silent = time.perf_counter() - silent_since > 1.5
            if (done and silent) or time.perf_counter() > deadline:
                process.send_signal(signal.SIGTERM)
                return
            time.sleep(0.05)


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """The commands of a console block, each with the output it shows."""
    command, expected = None, []
    for line in text.splitlines():
        if line.startswith("$ "):
            if command is not None:
                yield command, expected
            command, expected = line[2:], []
        elif line.strip():
            expected.append(line)
    if command is not None:
        yield command, expected


def first_missing(expected: list[str], output: str) -> str | None:
    """The first expected line that is not in the output behind those before it."""
    lines = iter(" ".join(line.split()) for line in output.splitlines())
    for wanted in expected:
        parts = [re.escape(" ".join(part.split())) for part in wanted.split("…")]
        pattern = re.compile(r"\s*.*\s*".join(parts))
        if not any(pattern.fullmatch(line) for line in lines):
            return wanted
    return None


@pytest.fixture
def story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Story]:
    for name in os.environ:
        if name.startswith("POSTROOM_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    known = set(sys.modules)
    with asyncio.Runner() as runner:
        yield Story(ROOT, tmp_path, runner)
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_what_a_page_says_works(page: Path, story: Story) -> None:
    story.page = page
    for block in blocks(page):
        if block.server is None:
            story.play(block)


@pytest.mark.parametrize(
    ("page", "server"),
    [
        pytest.param(page, server, id=f"{_name(page)}-{server}")
        for page in PAGES
        for server in SERVERS
        if any(block.server == server for block in blocks(page))
    ],
)
def test_what_a_page_says_of_a_server_works(
    page: Path, server: str, story: Story, request: pytest.FixtureRequest
) -> None:
    running = request.getfixturevalue(SERVERS[server])
    database = f"docs_{uuid.uuid4().hex[:12]}"
    story.page, story.url = page, running.create_database(database)
    story.runner.run(migrate.install(story.url))
    try:
        for block in blocks(page):
            if block.server == server or block.file:
                story.play(block)
    finally:
        running.drop_database(database)


def test_links_between_pages_lead_somewhere() -> None:
    broken = []
    for page in PAGES:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            scheme, _, path, _, anchor = urlsplit(link)
            if scheme:
                continue
            goal = (page.parent / path).resolve() if path else page
            if not goal.exists() or (anchor and anchor not in _anchors(goal)):
                broken.append(f"{_name(page)}: {link}")
    assert not broken


def _anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
