from asgiref.sync import sync_to_async
from django.db import transaction
from django.http import HttpResponse

from basket.orders import place_order
from postroom.django import publish
from postroom.errors import PublishError


def place(request, number):
    return HttpResponse(place_order(number))


def fail(request, number):
    place_order(number)
    raise RuntimeError("after the publish")


def savepoint(request, number):
    try:
        with transaction.atomic():
            place_order(number)
            raise ValueError("back")
    except ValueError:
        return HttpResponse(place_order(number + 1))


@transaction.non_atomic_requests
def alone(request):
    return _told(lambda: publish({}, type="t"))


@transaction.non_atomic_requests
async def asynchronous(request):
    return _told(lambda: publish({}, type="t"))


@transaction.non_atomic_requests
async def threaded(request, number):
    return HttpResponse(await sync_to_async(transaction.atomic(place_order))(number))


def _told(call):
    try:
        call()
    except PublishError as error:
        return HttpResponse(f"{type(error).__name__}: {error}")
