"""The architecture, checked: who may import whom, what is public, what is written down, and how."""

import ast
import importlib
import logging
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import typer
from prometheus_client import CollectorRegistry

import postroom
from postroom import alerts, errors, signals
from postroom.config import AlertSettings, ConsumerSettings, RelaySettings
from postroom.databases import sql
from postroom.databases.kinds import KINDS, WRAPPERS
from postroom.ops import metrics
from postroom.ops.cli import app
from postroom.outbox.publish import Outbox

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "postroom"
MODULES = sorted(SOURCE.rglob("*.py"))
ROOMS = sorted(
    ".".join(("postroom", *path.parent.relative_to(SOURCE).parts))
    for path in SOURCE.rglob("queries.sql")
)
WATCHING = "docs/watching.md"
LONGEST_FILE_LINES = 500
KNOWN_IN_ROOT = {
    # What is kept.
    ".ci", ".git", ".gitignore", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile",
    "README.md", "bench", "docs", "examples", "models", "pyproject.toml", "scripts", "src", "tests",
    # What tools leave behind, and git ignores.
    ".bench", ".hypothesis", ".import_linter_cache", ".mypy_cache", ".pytest_cache", ".ruff_cache",
    ".servers", ".venv", "__pycache__", "build", "dist",
}  # fmt: skip
# Statements whose changing part is a constant of ours, or that only look like SQL.
SQL_IN_FSTRINGS = {
    "databases/schema.py",  # regular expressions that read the migrations
    "outbox/notify.py",  # LISTEN and NOTIFY take no parameters; the channel is a constant
}
SQL_WORD = re.compile(
    r"\s*(?:SELECT\s|INSERT\s+INTO\s|UPDATE\s+\S+\s+SET\s|DELETE\s+FROM\s|WITH\s+\w+\s+AS\s|MERGE\s"
    r"|CREATE\s|ALTER\s|DROP\s|TRUNCATE\s|LOCK\s+TABLE\s|LISTEN\s|NOTIFY\s|PRAGMA\s|SET\s+\w+\s)"
)
UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__"}


def short(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


# ── Imports ────────────────────────────────────────────────────────────────────────────────────


def test_rooms_import_only_from_floors_below() -> None:
    done = subprocess.run(
        [Path(sys.executable).parent / "lint-imports"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_room_stands_on_a_floor() -> None:
    floors = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    rooms = {path.stem for path in SOURCE.glob("*.py")} - {"__init__"}
    rooms |= {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert [room for room in sorted(rooms) if not re.search(rf"postroom\.{room}\b", floors)] == []


@pytest.mark.parametrize(
    "line", ["import postroom", "from postroom import Draft, Outbox, RetryPolicy, errors, message"]
)
def test_importing_postroom_imports_no_driver(line: str) -> None:
    heavy = {
        "sqlalchemy", "asyncpg", "psycopg", "psycopg2", "pymysql", "asyncmy", "aiomysql",
        "aiosqlite", "nats", "confluent_kafka", "redis", "aiormq", "httpcore", "aiobotocore",
        "botocore", "msgspec", "pydantic", "typer", "rich", "prometheus_client", "opentelemetry",
    }  # fmt: skip
    code = f"{line}; import sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert heavy & set(loaded) == set()


# ── Public names ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", postroom.__all__)
def test_a_public_name_exists_and_says_what_it_is(name: str) -> None:
    door = getattr(postroom, name)
    assert name == "__version__" or door.__doc__


def test_every_door_is_listed() -> None:
    assert set(dir(postroom)) == set(postroom.__all__)
    with pytest.raises(AttributeError):
        _ = postroom.nothing  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", MODULES, ids=short)
def test_a_module_says_what_it_is_for_and_offers_what_exists(path: Path) -> None:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    module = importlib.import_module(".".join(parts).removesuffix(".__init__"))
    assert module.__doc__ or not path.read_text(encoding="utf-8").strip()
    for name in getattr(module, "__all__", []):
        assert hasattr(module, name), name


@pytest.mark.parametrize("path", MODULES, ids=short)
def test_what_a_module_offers_has_a_docstring(path: Path) -> None:
    body = tree(path).body
    offered = next((ast.literal_eval(node.value) for node in body if _assigns(node, "__all__")), [])
    definitions = [
        node
        for node in body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    ]
    silent = [n.name for n in definitions if n.name in offered and not ast.get_docstring(n)]
    assert silent == []


def _assigns(node: ast.stmt, name: str) -> bool:
    return isinstance(node, ast.Assign) and [ast.unparse(t) for t in node.targets] == [name]


# ── Signals ────────────────────────────────────────────────────────────────────────────────────


def emitted() -> Iterator[tuple[str, set[str], str]]:
    """Every signal the source emits: its name, its fields, and where."""
    for path in MODULES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "emit":
                name = node.args[0]
                assert isinstance(name, ast.Constant), f"{short(path)}:{node.lineno}"
                given = {keyword.arg or "**" for keyword in node.keywords}
                yield name.value, given, f"{short(path)}:{node.lineno}"


def test_signals_are_emitted_as_they_are_declared() -> None:
    declared = {name: set(listed.split(", ")) for name, (_, listed) in signals.SIGNALS.items()}
    found = list(emitted())
    assert {name for name, _, _ in found} == set(declared)
    wrong = [
        (where, given ^ declared[name]) for name, given, where in found if given != declared[name]
    ]
    assert wrong == []


def test_signals_stand_in_the_documentation_with_level_and_fields() -> None:
    rows = re.findall(r"^\| `(\w+\.\w+)` \| (\w+) \| ([^|]+) \| [^|]+ \|$", page(WATCHING), re.M)
    shown = {(name, level, listed) for name, level, listed in rows}
    assert shown == {
        (name, logging.getLevelName(level).lower(), listed)
        for name, (level, listed) in signals.SIGNALS.items()
    }


def test_metrics_and_alerts_stand_in_the_documentation() -> None:
    text, rules = page(WATCHING), page("docs/alerts/prometheus-rules.yml")
    registry = CollectorRegistry()
    metrics.Metrics(registry)
    names = [f"{each.name}_total" if each.type == "counter" else each.name
             for each in registry.collect()]  # fmt: skip
    for name in [*names, *metrics.GAUGES]:
        assert f"| `{name}` |" in text or name == "outbox_age_seconds", name
    used = set(re.findall(r"\b(?:outbox|idempotency|inbox)_\w+", rules))
    assert used <= {*names, *metrics.GAUGES, *metrics.INBOX_GAUGES}
    # A dead letter, a silent process and an end of a consumer each have a rule.
    assert used >= {"inbox_buried_total", "inbox_workers_silent", "inbox_held_records"}
    anchors = {
        title.strip().lower().replace(" ", "-") for title in re.findall(r"^#+ (.*)$", text, re.M)
    }
    assert set(re.findall(r"runbook: docs/watching.md#(\S+)", rules)) <= anchors
    alone = set(re.findall(r"alert: (PostroomConsumer\w+)", rules))
    assert alone == set(re.findall(r"^\| `(PostroomConsumer\w+)` \|", text, re.M))
    for name in alerts.ALERTS:
        assert f"\n| `{name}` |" in text, name
        assert f"\n### {name}\n" in text, name
        assert f"#{name}\n" in rules, name


@pytest.mark.parametrize("setting", fields(AlertSettings), ids=lambda setting: setting.name)
def test_a_setting_of_alerts_is_explained_with_its_default(setting: Any) -> None:
    shown = "none" if setting.default is None else setting.default
    assert f"\n| `{setting.name}` | {shown} |" in page(WATCHING)


# ── What the pages must say ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", errors.__all__)
def test_an_error_is_explained(name: str) -> None:
    assert f"\n| `{name}` |" in page("docs/errors.md")
    assert name in (errors.__doc__ or "")


def test_every_error_is_listed() -> None:
    classes = [
        node.name
        for node in tree(SOURCE / "errors.py").body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert sorted(classes) == errors.__all__


@pytest.mark.parametrize("setting", fields(RelaySettings), ids=lambda setting: setting.name)
def test_a_setting_of_the_relay_is_explained_with_its_default(setting: Any) -> None:
    row = re.search(rf"^\| `{setting.name}` \| ([^|]+) \|", page("README.md"), re.MULTILINE)
    assert row, setting.name
    assert row[1].strip() == str(setting.default)


@pytest.mark.parametrize("setting", fields(ConsumerSettings), ids=lambda setting: setting.name)
def test_a_setting_of_a_consumer_is_explained_with_its_default(setting: Any) -> None:
    table = page("README.md").partition("| setting of a consumer |")[2]
    row = re.search(rf"^\| `{setting.name}` \| ([^|]+) \|", table, re.MULTILINE)
    assert row, setting.name
    assert row[1].strip() == str(setting.default)


def test_settings_of_the_outbox_are_explained() -> None:
    arguments = Outbox.__init__.__kwdefaults__
    for name, default in arguments.items():
        shown = "none" if default is None else default
        assert f"| `{name}` | {shown} |" in page("README.md"), name


def test_arguments_of_publish_are_explained() -> None:
    for name in Outbox.publish.__kwdefaults__:
        assert f"`{name}`" in page("README.md"), name


def test_environment_variables_are_explained() -> None:
    named = set()
    for path in MODULES:
        named |= set(re.findall(r"\bPOSTROOM_[A-Z_]*[A-Z]\b", path.read_text(encoding="utf-8")))
    families = ("POSTROOM_RELAY", "POSTROOM_ALERTS", "POSTROOM_BROKERS_", "POSTROOM_CONSUMER")
    named = {name for name in named if not name.startswith(families)}
    named -= {"POSTROOM_DEMO"}  # between the demo and its own processes
    assert [name for name in sorted(named) if f"`{name}`" not in page("README.md")] == []


def test_connections_are_explained() -> None:
    text = page("docs/connections.md").lower()
    for library, cls in [*((kind.library, kind.cls) for kind in KINDS), *WRAPPERS]:
        assert library.lower() in text, library
        # What pools put around a connection has a name nobody writes.
        assert (library, cls) in WRAPPERS or cls.lower() in text, cls


def test_brokers_are_explained() -> None:
    project = tomllib.loads(page("pyproject.toml"))["project"]
    for scheme in project["entry-points"]["postroom.brokers"]:
        assert f"`{scheme}:" in page("README.md"), scheme
    for extra in project["optional-dependencies"]:
        assert f"`{extra}`" in page("README.md"), extra


def _commands() -> Iterator[tuple[str, Any]]:
    def walk(prefix: str, command: Any) -> Iterator[tuple[str, Any]]:
        if getattr(command, "commands", None):
            for name, each in command.commands.items():
                yield from walk(f"{prefix} {name}", each)
        else:
            yield prefix, command

    yield from walk("postroom", typer.main.get_command(app))


@pytest.mark.parametrize(("name", "command"), list(_commands()), ids=lambda value: str(value)[:40])
def test_a_command_and_its_options_are_explained(name: str, command: Any) -> None:
    text = page("docs/commands.md")
    chapter = re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert chapter, name
    general = text.partition("## ")[0]
    for option in command.params:
        names = [each for each in option.opts if each.startswith("--")]
        assert not names or any(f"{n}" in chapter[1] + general for n in names), names


# ── SQL ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("room", ROOMS)
def test_every_dialect_answers_every_query(room: str) -> None:
    answers = {dialect: sql.query_names(room, dialect) for dialect in sql.DIALECTS}
    only = {
        name
        for name in answers["postgresql"]
        if sql.query_text(room, "postgresql", name).startswith("-- only: postgresql")
    }
    assert answers["mysql"] == answers["sqlite"]
    assert answers["postgresql"] - only <= answers["mysql"]


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("dialect", sql.DIALECTS)
def test_a_query_is_named_once(room: str, dialect: str) -> None:
    own = "queries.sql" if dialect == "postgresql" else f"queries.{dialect}.sql"
    text = resources.files(room).joinpath(own).read_text(encoding="utf-8")
    names = re.findall(r"^-- name: *(\w+)", text, re.MULTILINE)
    assert len(names) == len(set(names))


@pytest.mark.parametrize("room", ROOMS)
def test_a_query_that_is_kept_is_used(room: str) -> None:
    """By its name in quotes, somewhere; `NAME_arrays` goes with NAME, `NAME_any` with its table."""
    source = "\n".join(path.read_text(encoding="utf-8") for path in MODULES)
    unused = []
    for name in sorted(set().union(*(sql.query_names(room, dialect) for dialect in sql.DIALECTS))):
        made = any(name.endswith(tail) for tail in ("_arrays", "_any", "_archive", "_delete"))
        if f'"{name}"' not in source and not made:
            unused.append(name)
    assert unused == []


def test_no_sql_is_built_from_text() -> None:
    found = []
    for path in MODULES:
        if short(path) in SQL_IN_FSTRINGS:
            continue
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.JoinedStr) and node.values:
                first = node.values[0]
                changes = any(isinstance(part, ast.FormattedValue) for part in node.values)
                text = str(first.value) if isinstance(first, ast.Constant) else ""
                if changes and SQL_WORD.match(text):
                    found.append(f"{short(path)}:{node.lineno}: {text.strip()[:40]}")
    assert found == []


# ── Safety and size ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("path", MODULES, ids=short)
def test_nothing_runs_code_that_came_as_data(path: Path) -> None:
    for node in ast.walk(tree(path)):
        where = f"{short(path)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            names = {alias.name.partition(".")[0] for alias in node.names}
            assert not names & UNSAFE_MODULES, where
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").partition(".")[0] not in UNSAFE_MODULES, where
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in UNSAFE_CALLS, where


@pytest.mark.parametrize("path", MODULES, ids=short)
def test_a_file_can_be_read_in_one_sitting(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= LONGEST_FILE_LINES, f"{short(path)} has {lines} lines"


def test_the_root_holds_only_what_belongs_there() -> None:
    there = {path.name for path in ROOT.iterdir() if not path.name.endswith(".egg-info")}
    assert there - KNOWN_IN_ROOT == set()


def test_no_two_test_files_have_one_name() -> None:
    """Pytest takes the second of a name for the first: none of its tests would run."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(set(names)) == sorted(names)
