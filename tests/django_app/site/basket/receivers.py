"""What `call:basket.receivers:…` reaches, in the relay's process and with Django set up."""

import sys

from basket.models import Order


def count(message):
    """Answer for the order in the database: the relay's receiver may use the ORM."""
    number = Order.objects.get(id=message.key).number
    # In one piece: other threads write lines of their own.
    sys.stdout.write(f"received {number} {message.payload.decode()}\n")
    sys.stdout.flush()
    if number == 666:
        return "unwanted"
    return None
