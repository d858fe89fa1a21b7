"""What `call:basket.receivers:…` reaches, in the relay's process and with Django set up."""

from basket.models import Order


def count(message):
    """Answer for the order in the database: the relay's receiver may use the ORM."""
    number = Order.objects.get(id=message.key).number
    print(f"received {number} {message.payload.decode()}", flush=True)
    if number == 666:
        return "unwanted"
    return None
