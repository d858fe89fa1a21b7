"""Figures against their bars: what is printed as a table and written as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["Figures", "Line", "at_least", "at_most", "median"]

median = statistics.median


@dataclass(frozen=True, slots=True)
class Bar:
    """What a ratio must be."""

    least: float | None = None
    most: float | None = None

    def __str__(self) -> str:
        return f"≥ {self.least:.3g}" if self.least is not None else f"≤ {self.most:.3g}"

    def met(self, ratio: float) -> bool:
        return ratio >= self.least if self.least is not None else ratio <= (self.most or 0)


def at_least(ratio: float) -> Bar:
    return Bar(least=ratio)


def at_most(ratio: float) -> Bar:
    return Bar(most=ratio)


@dataclass(frozen=True, slots=True)
class Line:
    """One system's figure; `ratio` is to what `to` says, and `bar` is what it must be."""

    system: str
    figure: str
    ratio: float | None = None
    to: str = ""
    bar: Bar | None = None

    @property
    def met(self) -> bool | None:
        return None if self.bar is None or self.ratio is None else self.bar.met(self.ratio)


@dataclass(slots=True)
class Figures:
    """What a section found. `numbers` are for the pictures and for whoever reads the JSON."""

    title: str
    lines: list[Line] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)

    def add(
        self,
        system: str,
        figure: str,
        ratio: float | None = None,
        *,
        to: str = "",
        bar: Bar | None = None,
    ) -> None:
        self.lines.append(Line(system, figure, ratio, to, bar))

    def show(self, console: Console) -> None:
        table = Table(title=self.title, title_justify="left")
        for column in ("system", "figure", "ratio", "to", "bar", "met"):
            table.add_column(column, justify="right" if column in ("figure", "ratio") else "left")
        for row in rows_of(self.lines):
            style = {"yes": "green", "no": "bold red"}.get(row[-1], "")
            table.add_row(*row[:-1], f"[{style}]{row[-1]}[/]" if style else row[-1])
        console.print(table)

    def as_json(self) -> dict[str, Any]:
        lines = [
            {**asdict(line), "bar": str(line.bar or ""), "met": line.met} for line in self.lines
        ]
        return {"title": self.title, "lines": lines, "numbers": self.numbers}


def rows_of(lines: Iterable[Line]) -> Sequence[tuple[str, ...]]:
    """The lines as text, as the tables of the terminal and of the page show them."""
    return [
        (
            line.system,
            line.figure,
            "" if line.ratio is None else f"{line.ratio:.2f}",
            line.to,
            str(line.bar or ""),
            {None: "", True: "yes", False: "no"}[line.met],
        )
        for line in lines
    ]
