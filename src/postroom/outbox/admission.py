"""Whether a relay may work on a database: its tables and its routes must be those of this relay."""

from __future__ import annotations

from typing import TYPE_CHECKING

from postroom import audit, signals
from postroom.config import Routes
from postroom.databases.database import WorkerLink
from postroom.databases.migrate import out_of_order
from postroom.databases.schema import remedy
from postroom.errors import RoutingChanged, SchemaError
from postroom.flow import Flow, Statement
from postroom.outbox.store import ROOM

if TYPE_CHECKING:
    from postroom.outbox.relay import Relay

__all__ = ["SCHEMA_VERSION", "check_routes", "check_schema"]

SCHEMA_VERSION = 6


async def check_schema(link: WorkerLink) -> None:
    """Refuse tables that this code does not know, and positions that would break the order."""
    found, oldest = [
        int(rows[0][0]) if rows else 0
        for rows in [
            await link.query(ROOM, "meta_read", item="schema_version"),
            await link.query(ROOM, "meta_read", item="oldest_code"),
        ]
    ]
    # Newer tables say how old the code may be that works on them, so that they come first.
    if found != SCHEMA_VERSION and not 0 < oldest <= SCHEMA_VERSION < found:
        raise SchemaError(
            f"the tables in {link.database.target.safe} are of version {found}, "
            f"this relay needs version {SCHEMA_VERSION}: {remedy(found, SCHEMA_VERSION)}."
        )
    if link.dialect == "postgresql":
        for table, cache in await link.query("postroom.databases", "caches"):
            if table == "postroom.outbox":
                raise SchemaError(out_of_order(table, cache))


async def check_routes(link: WorkerLink, relay: Relay) -> None:
    """Refuse routes that differ from those on record, unless the change is meant."""
    mine = relay.routes.fingerprint(signals.redact_url)
    rows = await link.query(ROOM, "meta_read", item="routes")
    if rows and rows[0][0] != mine and not relay.rebind:
        raise RoutingChanged(
            f"this relay's routes ({Routes.describe(mine)}) differ from those on record "
            f"({Routes.describe(rows[0][0])}): "
            "correct them, or start once with --rebind if the change is meant."
        )
    if not rows or rows[0][0] != mine:
        await link.transact(_record_routes(rows[0][0] if rows else None, mine))


def _record_routes(before: str | None, mine: str) -> Flow[None]:
    """Record the routes; an operator who changes them with --rebind leaves an audit entry."""
    yield Statement(ROOM, "meta_write", {"item": "routes", "value": mine})
    if before is not None:
        yield audit.record("relay.rebind", "routes", f"from {before} to {mine}")
