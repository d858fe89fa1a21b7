"""A receiver for `call:sink:take`: what `postroom relay` hands over goes into a file."""

import asyncio
import json
import os

from programs import Record

from postroom.messages import Message

_records: dict[int, Record] = {}


async def take(message: Message) -> None:
    """Write the message down, after as long as the environment says."""
    await asyncio.sleep(float(os.environ["SINK_DELAY_SECONDS"]))
    record = _records.setdefault(os.getpid(), Record(os.environ["SINK_RECORD"]))
    content = json.loads(message.payload)
    record.write(message.id, message.key, content["n"], 0, os.getpid())
