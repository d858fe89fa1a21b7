"""The page on performance: its table is written by the run that measured it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from bench.figures import Figures, rows_of

__all__ = ["write"]

BEGIN, END = "<!-- figures of the last run -->", "<!-- end of figures -->"


def write(found: Mapping[str, Figures], page: Path) -> None:
    """Put the tables of a run between the page's two marks; the rest is for people to write."""
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} has no place for figures: {BEGIN} … {END}")
    tables = "\n\n".join(map(_table, found.values()))
    page.write_text(f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}")


def _table(figures: Figures) -> str:
    lines = [f"### {figures.title}", "", "| system | figure | ratio | to | bar | met |"]
    lines.append("|---|---:|---:|---|---|---|")
    lines += ["| " + " | ".join(row).strip() + " |" for row in rows_of(figures.lines)]
    return "\n".join(lines)
