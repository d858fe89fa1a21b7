"""Database work described once and run anywhere: a flow yields statements and receives their rows.

What runs inside the caller's transaction must work on synchronous and asynchronous connections of
many kinds. A flow is a generator that yields `Statement`s; `run` and `run_async` carry them out on
whatever `Link` the caller has. Flows bind only int, str, bytes, None and lists of int, and read
columns by place, so that users' row factories and codecs do not matter.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

__all__ = ["AsyncLink", "Flow", "Link", "Row", "Rows", "Statement", "Value", "run", "run_async"]

Value: TypeAlias = "int | str | bytes | list[int] | None"
Row: TypeAlias = "tuple[Any, ...]"
Rows: TypeAlias = "list[Row]"
T = TypeVar("T")


class Statement(NamedTuple):
    """One named query of a room with its values, or with many rows of values at once.

    Many rows come as mappings, or as one sequence of values for each column. `text` is carried out
    in place of a query of the room's: about tables whose names only the caller knows.
    """

    room: str
    name: str
    values: Mapping[str, Value] | None = None
    many: Sequence[Mapping[str, Value]] | None = None
    columns: Mapping[str, Sequence[Value]] | None = None
    text: str | None = None


Flow: TypeAlias = Generator[Statement, Rows, T]


class Link(Protocol):
    """A synchronous connection that can carry out statements."""

    dialect: str

    def execute(self, statement: Statement) -> Rows: ...


class AsyncLink(Protocol):
    """An asynchronous connection that can carry out statements."""

    dialect: str

    async def execute(self, statement: Statement) -> Rows: ...


def run(flow: Flow[T], link: Link) -> T:
    """Carry out a flow on a synchronous link."""
    try:
        statement = next(flow)
        while True:
            try:
                rows = link.execute(statement)
            except BaseException as error:
                statement = flow.throw(error)
            else:
                statement = flow.send(rows)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    finally:
        flow.close()


async def run_async(flow: Flow[T], link: AsyncLink) -> T:
    """Carry out a flow on an asynchronous link."""
    try:
        statement = next(flow)
        while True:
            try:
                rows = await link.execute(statement)
            except BaseException as error:
                statement = flow.throw(error)
            else:
                statement = flow.send(rows)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    finally:
        flow.close()
