"""A flow in the caller's own transaction, on whatever kind of session or connection that is.

What a flow writes must share the fate of the caller's change, so a connection on which it would
be committed by itself is refused before anything is written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from postroom.databases.kinds import Kind, bare, kind_of
from postroom.errors import SeveralBinds, WouldCommitAlone, WrongCall, with_article
from postroom.flow import Flow, run, run_async

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection, Engine

    Bind = Engine | Connection | None

__all__ = ["carry_out", "carry_out_async", "refuse_alone"]

T = TypeVar("T")


def carry_out(tx: Any, flow: Flow[T], *, what: str, instead: str, bind: Bind = None) -> T:
    """Run a flow on a synchronous session or connection.

    `what` names that which would be committed by itself, `instead` the call for asynchronous ones.
    """
    tx = bare(tx)
    kind = kind_of(tx)
    if kind.is_async:
        flow.close()
        raise WrongCall(f"{with_article(kind.name)} is asynchronous: write `await {instead}(...)`")
    return _carry_out(kind, tx, flow, what, bind)


async def carry_out_async(tx: Any, flow: Flow[T], *, what: str, bind: Bind = None) -> T:
    """Run a flow on a session or connection of any kind."""
    tx = bare(tx)
    kind = kind_of(tx)
    if not kind.is_async:
        return _carry_out(kind, tx, flow, what, bind)
    if kind.is_session:
        from sqlalchemy.ext.asyncio import AsyncSession

        session: Any = tx if isinstance(tx, AsyncSession) else tx()
        return await session.run_sync(  # type: ignore[no-any-return]
            lambda inner: _carry_out(kind_of(inner), inner, flow, what, bind)
        )
    if kind.library == "sqlalchemy":
        return await tx.run_sync(  # type: ignore[no-any-return]
            lambda inner: _carry_out(kind_of(inner), inner, flow, what, None)
        )
    link = kind.link(tx)
    refuse_alone(kind, link, what)
    return await run_async(flow, link)


def refuse_alone(kind: Kind, link: Any, what: str) -> None:
    """Refuse a connection on which what is written would be committed by itself."""
    if link.commits_alone():
        raise WouldCommitAlone(
            f"this {kind.name} is in no transaction and commits every statement by itself, so the "
            f"{what} would not share the fate of your change: {getattr(link, 'begin', kind.begin)}"
        )


def _carry_out(kind: Kind, tx: Any, flow: Flow[T], what: str, bind: Bind) -> T:
    if kind.is_session:
        from sqlalchemy.exc import UnboundExecutionError

        from postroom.databases.sqlalchemy import session_link

        try:
            link = session_link(tx, bind)
        except UnboundExecutionError:
            raise SeveralBinds(
                f"this session writes to several databases: say which one the {what} is in, with "
                "bind=engine"
            ) from None
    else:
        link = kind.link(tx)
    refuse_alone(kind, link, what)
    return run(flow, link)
