"""What the shop tells the world."""

from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal

from postroom import message


@message("order.placed.v1", topic="orders", key_field="order_id", aggregate_type="order")
@dataclass
class OrderPlaced:
    order_id: int
    total: Decimal
    at: datetime
