from django.test import TestCase

from orders.models import Order
from postroom.django import was_committed


class Placing(TestCase):
    def test_an_order_is_stored_and_told(self):
        answer = self.client.post("/orders", {"total": "9.90"})
        self.assertEqual(answer.status_code, 201)
        self.assertTrue(Order.objects.filter(pk=answer.json()["order"]).exists())
        self.assertTrue(was_committed(answer.json()["message"]))

    def test_a_refused_order_is_neither(self):
        self.assertEqual(self.client.post("/orders", {"total": "-1"}).status_code, 400)
        self.assertEqual(Order.objects.count(), 0)
