"""The page on performance: its table is written by the run that measured it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.figures import Figures, rows_of

__all__ = ["write"]

BEGIN, END = "<!-- figures of the last run -->", "<!-- end of figures -->"
_SECTION = re.compile(r"^<!-- section (\S+) -->$", re.MULTILINE)


def write(found: Mapping[str, Figures], page: Path, order: Sequence[str]) -> None:
    """Put the tables of a run between the page's two marks; the rest is for people to write.

    Tables of sections that were not part of the run stay as they are. `order` is that of all.
    """
    before, begin, rest = page.read_text().partition(BEGIN)
    old, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} has no place for figures: {BEGIN} … {END}")
    tables = _tables(old) | {name: _table(figures) for name, figures in found.items()}
    named = [f"<!-- section {name} -->\n\n{tables[name]}" for name in order if name in tables]
    page.write_text("\n\n".join([before + BEGIN, *named, END]) + after)


def _tables(text: str) -> dict[str, str]:
    """The tables that are there, by the sections they are of."""
    _, *parts = _SECTION.split(text)
    return {name: table.strip() for name, table in zip(parts[::2], parts[1::2], strict=True)}


def _table(figures: Figures) -> str:
    lines = [f"### {figures.title}", "", "| system | figure | ratio | to | bar | met |"]
    lines.append("|---|---:|---:|---|---|---|")
    lines += ["| " + " | ".join(row).strip() + " |" for row in rows_of(figures.lines)]
    return "\n".join(lines)
