from django.core.management.base import BaseCommand
from django.db import transaction

from basket.orders import place_order


class Command(BaseCommand):
    """`manage.py place 1 2 3`: orders, one transaction each."""

    def add_arguments(self, parser):
        parser.add_argument("numbers", nargs="+", type=int)
        parser.add_argument("--database", default="default")

    def handle(self, numbers, database, **_):
        for number in numbers:
            with transaction.atomic(using=database):
                print(place_order(number, using=database))
