"""How a statement becomes what a driver carries out: shared by every kind of connection.

A link says how its driver takes parameters and many rows; here the query is rendered, failpoints
are passed and rows are picked. `drive` and `drive_async` differ only in awaiting the link's own way
of doing one step.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from postroom import failpoints
from postroom.databases import sql
from postroom.flow import Rows, Statement, Value

__all__ = ["Manner", "Step", "drive", "drive_async"]


@dataclass(frozen=True, slots=True)
class Manner:
    """How a driver wants its statements."""

    dialect: str
    style: str
    arrays: bool = False  # many rows go as one array a column, where the room has such a query


class Step(NamedTuple):
    """One statement in the driver's own form. `many` holds the rows of an executemany.

    `lone` says that no other step's rows could be meant, so empty and absent rows are alike.
    """

    text: str
    values: tuple[Any, ...] = ()
    many: list[tuple[Any, ...]] | None = None
    lone: bool = True

    @property
    def reads(self) -> bool:
        """Whether rows may come back."""
        return not self.text.startswith("INSERT") or "RETURNING" in self.text

    def with_values(self, change: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> Step:
        """The step with its values as a driver wants them."""
        many = None if self.many is None else [change(row) for row in self.many]
        return self._replace(values=change(self.values), many=many)


def _rendered(statement: Statement, manner: Manner) -> list[Step]:
    if statement.many is not None:
        return [_many(statement, statement.many, manner)] if statement.many else []
    if statement.columns is not None:
        return [_columns(statement, statement.columns, manner)]
    if statement.text is not None:
        parts = sql.prepare_text(statement.text, manner.dialect, manner.style)
    else:
        parts = sql.prepare(statement.room, manner.dialect, statement.name, manner.style)
    values = statement.values or {}
    lone = len(parts) == 1
    return [Step(*part.bind(manner.dialect, values), lone=lone) for part in parts]


def _many(statement: Statement, many: Sequence[Mapping[str, Value]], manner: Manner) -> Step:
    arrays = f"{statement.name}_arrays"
    if manner.arrays and sql.has_query(statement.room, manner.dialect, arrays):
        (part,) = sql.prepare(statement.room, manner.dialect, arrays, manner.style)
        return Step(part.text, tuple([[row[name] for row in many] for name in part.names]))
    (part,) = sql.prepare(statement.room, manner.dialect, statement.name, manner.style)
    bound = [part.bind(manner.dialect, row) for row in many]
    return Step(bound[0][0], many=[values for _, values in bound])


def _columns(statement: Statement, columns: Mapping[str, Sequence[Value]], manner: Manner) -> Step:
    arrays = f"{statement.name}_arrays"
    if manner.arrays and sql.has_query(statement.room, manner.dialect, arrays):
        (part,) = sql.prepare(statement.room, manner.dialect, arrays, manner.style)
        return Step(part.text, tuple([list(columns[name]) for name in part.names]))
    (part,) = sql.prepare(statement.room, manner.dialect, statement.name, manner.style)
    return Step(part.text, many=list(zip(*[columns[name] for name in part.names], strict=True)))


def drive(statement: Statement, manner: Manner, take: Callable[[Step], Rows | None]) -> Rows:
    """Carry out a statement; `take` does one step and returns its rows, None if it has none.

    The statement's rows are those of the last step that returns any.
    """
    failpoints.hit(f"sql.{statement.name}.before")
    rows: Rows = []
    for step in _rendered(statement, manner):
        answer = take(step)
        if answer is not None:
            rows = answer
    failpoints.hit(f"sql.{statement.name}.after")
    return rows


async def drive_async(
    statement: Statement, manner: Manner, take: Callable[[Step], Awaitable[Rows | None]]
) -> Rows:
    """`drive` for asynchronous links."""
    failpoints.hit(f"sql.{statement.name}.before")
    rows: Rows = []
    for step in _rendered(statement, manner):
        answer = await take(step)
        if answer is not None:
            rows = answer
    failpoints.hit(f"sql.{statement.name}.after")
    return rows
