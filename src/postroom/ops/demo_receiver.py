"""The receiver of `postroom demo`: writes down what arrives, and misbehaves when told to."""

from __future__ import annotations

import json
import os
from pathlib import Path

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
    line = json.dumps({"id": message.id, "order": order, "customer": message.key})
    with open(folder / "received.jsonl", "a", encoding="utf-8") as log:
        log.write(line + "\n")
    return None
