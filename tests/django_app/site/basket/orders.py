"""What the shop does and says."""

import uuid
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal

from basket.models import Order
from postroom import message
from postroom.django import publish


@message("order.placed.v1", topic="orders", key_field="id")
@dataclass
class OrderPlaced:
    id: uuid.UUID
    number: int
    total: Decimal
    at: datetime


def place_order(number: int, using: str = "default") -> str:
    order = Order.objects.using(using).create(number=number, total=Decimal("9.90"))
    return publish(OrderPlaced(order.id, number, order.total, order.placed_at), using=using).id
