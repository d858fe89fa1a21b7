"""The shop's consumers. BASKET_INCOMING holds orders that wait at a broker in memory."""

import asyncio
import json
import os
import threading
from pathlib import Path

from django.db import transaction

from basket.models import Bill
from basket.orders import OrderPlaced
from postroom import Consumer, RetryPolicy
from postroom.brokers import memory
from postroom.messages import Message, new_id

billing = Consumer("billing", retry=RetryPolicy((0.001,), attempts=5))


failing = []  # errors to raise in the next calls, or set_rollback


@billing.on(OrderPlaced)
def bill(order, tx):
    Bill.objects.create(number=order.number)
    tx.on_commit(lambda: None)
    if failing and (fail := failing.pop(0)):
        if fail is not transaction.set_rollback:
            raise fail
        fail(True)
    tried = Path(f"tried-{order.number}")
    tries = int(tried.read_text()) if tried.exists() else 0
    tried.write_text(str(tries + 1))
    if order.number == 1 and tries < int(os.environ.get("BASKET_FAILURES", "0")):
        raise RuntimeError("the bank is closed")


def _wait(number):
    id = new_id()
    content = {"id": id, "number": number, "total": "1", "at": "2026-01-01T00:00:00+00:00"}
    payload = json.dumps(content).encode()
    message = Message(
        lane=0,
        position=1,
        id=id,
        topic="orders",
        key=id,
        type="order.placed.v1",
        aggregate_type=None,
        aggregate_id=None,
        content_type="application/json",
        headers_json=None,
        payload=payload,
        size=len(payload),
        redrives=0,
        created_us=0,
        expired=False,
        held=False,
        attempts=0,
        history=None,
    )
    asyncio.run(memory.broker("basket").send([message]))


for number in os.environ.get("BASKET_INCOMING", "").split():
    thread = threading.Thread(target=_wait, args=[int(number)])
    thread.start()
    thread.join()
