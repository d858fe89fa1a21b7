"""Every effect stands between two failpoints, so that the sweeps can fail before and after it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "postroom"
PROGRAMS = ROOT / "tests" / "guarantees" / "programs.py"
# What changes something outside of the process, by the file that does it.
EFFECTS = {
    "databases/steps.py": {"take"},
    "databases/database.py": {"self._plain", "self._open", "self._link.execute"},
    "outbox/sending.py": {"broker.send"},
    "outbox/lane.py": {"self.desk.settle"},
}
# An answer that is asked for again harms nobody, and a statement has its points in steps.py.
WITHOUT = {"begin_snapshot", "ask"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(source: str) -> Iterator[Function]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, Function):
            yield node


def calls(function: Function) -> list[tuple[str, str]]:
    """The calls and yields of a function in the order of its text: what is called, with what."""
    found = []
    for node in ast.walk(function):
        if isinstance(node, ast.Yield):
            found.append((node.lineno, node.col_offset, "yield", ""))
        elif isinstance(node, ast.Call):
            argument = ast.unparse(node.args[0]) if node.args else ""
            found.append((node.lineno, node.col_offset, ast.unparse(node.func), argument))
    return [(name, argument) for _, _, name, argument in sorted(found)]


def faults(source: str, effects: set[str]) -> list[str]:
    """What is wrong with the failpoints of a file, in words."""
    found = []
    for function in functions(source):
        open_points: list[str] = []
        for name, argument in calls(function):
            if name == "failpoints.hit":
                point, _, end = argument.strip("f'\"").rpartition(".")
                if end == "before":
                    open_points.append(point)
                elif open_points and open_points[-1] == point:
                    open_points.pop()
                else:
                    found.append(f"{function.name}: {point}.{end} without its .before")
            elif name in effects and not open_points and function.name not in WITHOUT:
                found.append(f"{function.name}: {name} outside of any pair")
        found += [f"{function.name}: {point}.before without its .after" for point in open_points]
    return found


def test_points_come_in_pairs_around_each_effect() -> None:
    sources = {path.relative_to(SOURCE).as_posix(): path for path in SOURCE.rglob("*.py")}
    found = {
        name: wrong
        for name, path in (sources | {"programs.py": PROGRAMS}).items()
        if (wrong := faults(path.read_text(), EFFECTS.get(name, set())))
    }
    assert found == {}


def test_the_effects_named_here_exist() -> None:
    for name, effects in EFFECTS.items():
        called = {c for f in functions((SOURCE / name).read_text()) for c, _ in calls(f)}
        assert effects <= called


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("hit('a.before')\n await do()", "f: a.before without its .after"),
        ("await do()\n hit('a.after')", "f: a.after without its .before"),
        ("hit('a.before')\n hit('b.after')\n hit('a.after')", "f: b.after without its .before"),
        ("await do()\n hit('a.before')\n hit('a.after')", "f: do outside of any pair"),
        ("hit('a.before')\n hit('a.after')\n await do()", "f: do outside of any pair"),
    ],
)
def test_a_missing_point_is_found(source: str, fault: str) -> None:
    text = f"async def f():\n {source}".replace("hit(", "failpoints.hit(")
    assert fault in faults(text, {"do"})
