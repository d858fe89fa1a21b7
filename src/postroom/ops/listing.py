"""Lists for people: a table where it fits the terminal, else a block for each row.

An id is there to be copied, so nothing but long texts ever wraps inside a table. Where it is
narrow, values that all rows share are printed once below, and rows that do not fit become blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

__all__ = ["listing"]

IDS = ("id", "message_id", "job", "entry")
STATES = ("state", "status", "")
# Columns of sentences may wrap; they need TEXT_COLUMNS to be readable.
TEXTS = ("error", "note", "why", "value", "what", "")
TEXT_COLUMNS = 24
GAP = 2

Style = Callable[[str, str], str]


def listing(
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    width: int,
    style: Style = lambda column, cell: "",
) -> RenderableType:
    """Lay rows out for a terminal of this width; `style` gives the style of a cell."""
    cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
    if _fits(columns, cells, width):
        return _table(columns, cells, style)
    kept, shared = _apart(columns, cells)
    narrow = [columns[place] for place in kept]
    fewer = [[row[place] for place in kept] for row in cells]
    layout = _table if _fits(narrow, fewer, width) else _blocks
    parts: list[RenderableType] = [layout(narrow, fewer, style)]
    if said := [f"{name} {value}" for name, value in shared if name and value]:
        parts.append(Text(f"all: {', '.join(said)}", style="dim"))
    return Group(*parts)


def _fits(columns: Sequence[str], cells: Sequence[Sequence[str]], width: int) -> bool:
    needed = 0
    for place, column in enumerate(columns):
        widest = max([len(column), *(len(row[place]) for row in cells)])
        needed += GAP + (min(widest, TEXT_COLUMNS) if column in TEXTS else widest)
    return needed - GAP <= width


def _apart(
    columns: Sequence[str], cells: Sequence[Sequence[str]]
) -> tuple[list[int], list[tuple[str, str]]]:
    """Return the places of columns that distinguish rows, and the values of the other columns."""
    kept, shared = [], []
    for place, column in enumerate(columns):
        values = {row[place] for row in cells}
        if values == {""} or (len(cells) > 1 and len(values) == 1 and column not in IDS):
            shared.append((column, values.pop()))
        else:
            kept.append(place)
    return kept, shared


def _table(columns: Sequence[str], cells: Sequence[Sequence[str]], style: Style) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, GAP, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column not in TEXTS)
    for row in cells:
        # As Text: a key or an error of somebody else's is never read as markup.
        table.add_row(
            *(Text(cell, style=style(name, cell)) for name, cell in zip(columns, row, strict=True))
        )
    return table


def _blocks(columns: Sequence[str], cells: Sequence[Sequence[str]], style: Style) -> RenderableType:
    """The id and the state of each row in a line, and the rest beneath."""
    first = next((name for name in IDS if name in columns), columns[0])
    heads = [first, *(name for name in columns if name in STATES and name != first)]
    parts: list[RenderableType] = []
    for row in cells:
        named = dict(zip(columns, row, strict=True))
        head = Text("  ").join(
            Text(named[name], style="bold" if name == first else style(name, named[name]))
            for name in heads
            if named[name]
        )
        rest = [
            f"{name} {value}"
            for name, value in named.items()
            if value and name not in heads and name not in TEXTS
        ]
        texts = [f"{name}: {named[name]}" for name in TEXTS if name and named.get(name)]
        parts.append(head)
        parts += [
            Padding(Text(line), (0, 0, 0, GAP), expand=False)
            for line in (", ".join(rest), *texts)
            if line
        ]
    return Group(*parts)
