"""The receiver of `postroom demo`: a billing service that remembers what it has handled.

It bills each order in its own database, in the transaction that remembers the message's id, so a
message that comes again changes nothing. It misbehaves when told to.
"""

from __future__ import annotations

import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path

from postroom import inbox
from postroom.brokers.base import Outcome, Permanent, Transient
from postroom.messages import Message

__all__ = ["behave", "receive"]


def behave(folder: Path, **behaviour: object) -> None:
    """Tell the receiver how to behave; in one step, since it may be reading at this moment."""
    draft = folder / "receiver.draft"
    draft.write_text(json.dumps(behaviour))
    draft.replace(folder / "receiver.json")


def receive(message: Message) -> Outcome | None:
    """Take one message, as a broker or another service would."""
    folder = Path(os.environ["POSTROOM_DEMO"])
    behaviour = json.loads((folder / "receiver.json").read_text())
    order = json.loads(message.payload)["order"]
    if behaviour.get("down"):
        return Transient("connection_refused", "the broker is down", down="broker")
    if behaviour.get("refuse_always") == order:
        return Permanent("unreadable", f"order {order} cannot be read")
    if behaviour.get("refuse_once") == order:
        behave(folder)
        return Transient("busy", "come back later")
    billed = _bill(folder, message, order)
    line = json.dumps({"id": message.id, "order": order, "customer": message.key, "billed": billed})
    with open(folder / "received.jsonl", "a", encoding="utf-8") as log:
        log.write(line + "\n")
    return None


def _bill(folder: Path, message: Message, order: int) -> bool:
    """Bill the order, unless this message was handled before."""
    with closing(sqlite3.connect(folder / "billing.db", timeout=10)) as connection, connection:
        if not inbox.once(connection, "billing", message.id, content=message.payload):
            return False
        connection.execute("INSERT INTO bill (customer_order) VALUES (?)", (order,))
        return True
