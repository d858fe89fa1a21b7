from decimal import Decimal, InvalidOperation

from django.core.exceptions import BadRequest
from django.http import HttpRequest, JsonResponse
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from orders.messages import OrderPlaced
from orders.models import Order
from postroom.django import publish


@csrf_exempt  # an example for curl
@require_POST
def place(request: HttpRequest) -> JsonResponse:
    """Store an order and tell of it. A refusal, even a late one, takes both back."""
    try:
        total = Decimal(request.POST["total"])
    except (KeyError, InvalidOperation):
        raise BadRequest("total must be a number") from None
    order = Order.objects.create(total=total)
    published = publish(OrderPlaced(order.pk, order.total, order.placed_at))
    if order.total <= 0:
        raise BadRequest("total must be above zero")
    return JsonResponse({"order": order.pk, "message": published.id}, status=201)
