"""The shop's own tests, run by Django's test runner."""

import json
import threading
import uuid
from decimal import Decimal
from unittest import mock

from asgiref.sync import async_to_sync
from django.core.cache import cache
from django.core.management import CommandError, call_command
from django.db import DatabaseError, IntegrityError, connection, connections, transaction
from django.test import TestCase, TransactionTestCase, override_settings
from django.utils.timezone import now

from basket.consumers import billing
from basket.models import Bill, Order
from basket.orders import OrderPlaced, place_order
from postroom import Draft, Outbox, failpoints
from postroom.django import publish, publish_many, was_committed
from postroom.errors import (
    ConfigurationError,
    MessageTooLarge,
    UnknownConnection,
    WouldCommitAlone,
    WrongCall,
)
from postroom.outbox import wake
from postroom.testing import deliver

UNKNOWN = "018f0000-0000-7000-8000-000000000000"


def stored(using="default", columns="payload"):
    prefix = "postroom." if connections[using].vendor == "postgresql" else "postroom_"
    with connections[using].cursor() as cursor:
        cursor.execute(f"SELECT {columns} FROM {prefix}outbox ORDER BY position")
        return [bytes(row[0]) if columns == "payload" else str(row[0]) for row in cursor.fetchall()]


def numbers(using="default"):
    return [json.loads(payload)["number"] for payload in stored(using)]


class Listening:
    """Counts the hints that relays of this process would get."""

    def setUp(self):
        super().setUp()
        self.hints = []
        self.addCleanup(wake.listen(lambda: self.hints.append(1)))


class InATestCase(Listening, TestCase):
    databases = {"default", "other"}

    def test_1_a_message_is_there(self):
        id = place_order(1)
        self.assertEqual(stored(columns="id"), [id])
        self.assertTrue(was_committed(id))
        self.assertEqual(self.hints, [])

    def test_2_and_is_rolled_back_with_the_test(self):
        self.assertEqual(stored(), [])
        self.assertEqual(Order.objects.count(), 0)

    def test_types_of_django_are_text(self):
        place_order(1)
        order = Order.objects.get()
        (payload,) = stored()
        self.assertEqual(
            json.loads(payload),
            {"id": str(order.id), "number": 1, "total": "9.90", "at": order.placed_at.isoformat()},
        )

    def test_captured_callbacks(self):
        with self.captureOnCommitCallbacks() as callbacks, transaction.atomic():
            for number in range(20):
                place_order(number)
            with transaction.atomic():
                place_order(20)
            publish_many([OrderPlaced(UNKNOWN, n, Decimal(1), now()) for n in range(5)])
        # One for the block, and one for the savepoint in it, which might have been rolled back.
        self.assertEqual((len(callbacks), self.hints), (2, []))
        with self.captureOnCommitCallbacks(execute=True):
            place_order(21)
        self.assertEqual(self.hints, [1])

    def test_a_rolled_back_savepoint_takes_its_hint_along(self):
        with self.captureOnCommitCallbacks() as callbacks:
            with transaction.atomic():
                place_order(1)
                transaction.set_rollback(True)
        self.assertEqual((callbacks, stored()), ([], []))
        with self.captureOnCommitCallbacks() as callbacks, transaction.atomic():
            with transaction.atomic():
                place_order(1)
                transaction.set_rollback(True)
            place_order(2)
        self.assertEqual((len(callbacks), numbers()), (1, [2]))

    def test_a_client_is_atomic(self):
        self.assertEqual(self.client.post("/place/7").status_code, 200)
        self.client.raise_request_exception = False
        self.assertEqual(self.client.post("/fail/8").status_code, 500)
        self.assertEqual(self.client.post("/savepoint/10").status_code, 200)
        self.assertEqual(numbers(), [7, 11])

    def test_using_decides(self):
        with transaction.atomic(using="other"):
            place_order(3, using="other")
        self.assertEqual((numbers("default"), numbers("other")), ([], [3]))
        with override_settings(POSTROOM={"database": "other"}):
            publish({"number": 4}, type="t")
        self.assertEqual((numbers("default"), numbers("other")), ([], [3, 4]))

    def test_settings_of_the_outbox(self):
        with override_settings(POSTROOM={"max_bytes": 10, "routes": {"t.*": "tea"}}):
            publish(b"0123456789", type="t.x")
            self.assertEqual(stored(columns="topic"), ["tea"])
            with self.assertRaisesRegex(MessageTooLarge, "the limit is 10"):
                publish(b"01234567890", type="t.x")
        with override_settings(POSTROOM={"max_byte": 10}):
            with self.assertRaisesRegex(ConfigurationError, "did you mean 'max_bytes'"):
                publish(b"", type="t")
        publish(b"01234567890", type="t.x")
        self.assertEqual(stored(columns="topic"), ["tea", "events.default"])

    def test_a_wrong_alias(self):
        with self.assertRaisesRegex(
            UnknownConnection, "DATABASES has no 'reports'; it has 'default', 'other'"
        ):
            publish({}, using="reports", type="t")

    def test_connections_themselves(self):
        outbox = Outbox()
        outbox.publish(connection, b"1", type="t")
        outbox.publish_many(connections["default"], [Draft(payload=b"2", type="t")])
        self.assertEqual(stored(), [b"1", b"2"])
        with self.assertRaisesRegex(UnknownConnection, "stands for no database"):
            outbox.publish(cache, b"", type="t")


class InATransactionTestCase(Listening, TransactionTestCase):
    databases = {"default", "other"}

    def test_1_committed_and_told(self):
        with transaction.atomic():
            id = place_order(1)
            self.assertEqual(self.hints, [])
        self.assertEqual(self.hints, [1])
        self.assertTrue(was_committed(id))

    def test_2_the_next_test_finds_nothing(self):
        for using in ("default", "other"):
            self.assertEqual(stored(using), [])

    def test_outside_of_a_block(self):
        with self.assertRaisesRegex(WouldCommitAlone, r"`with transaction\.atomic\(\):`"):
            publish({}, type="t")
        with transaction.atomic():
            with self.assertRaisesRegex(
                WouldCommitAlone, r"`with transaction\.atomic\(using='other'\):`"
            ):
                publish({}, using="other", type="t")
        self.assertEqual((stored(), stored("other")), ([], []))
        self.assertFalse(was_committed(UNKNOWN))

    def test_a_rollback(self):
        with self.assertRaises(IntegrityError), transaction.atomic():
            place_order(1)
            place_order(1)
        self.assertEqual((stored(), self.hints, Order.objects.count()), ([], [], 0))

    def test_a_broken_block_takes_no_more(self):
        with transaction.atomic():
            Order.objects.create(number=1, total=1)
            try:
                Order.objects.create(number=1, total=1)
            except IntegrityError:
                pass
            with self.assertRaisesRegex(
                transaction.TransactionManagementError, "until the end of the 'atomic' block"
            ):
                publish({}, type="t")
        self.assertEqual((stored(), Order.objects.count()), ([], 0))

    def test_a_failed_publish_that_nobody_minds_is_not_committed(self):
        def fail():
            raise RuntimeError("no more")

        failpoints.arm("sql.insert_outbox.before", fail)
        self.addCleanup(failpoints.clear)
        with transaction.atomic():
            Order.objects.create(number=1, total=1)
            with self.assertRaisesRegex(RuntimeError, "no more"):
                publish({}, type="t", dedup_key="d")
        self.assertEqual(Order.objects.count(), 0)
        failpoints.clear()
        with transaction.atomic():
            self.assertFalse(publish({}, type="t", dedup_key="d").duplicate)

    def test_errors_of_the_database_are_djangos(self):
        call_command("migrate", "postroom", "zero", database="other", verbosity=0)
        try:
            with self.assertRaisesRegex(DatabaseError, "outbox"), transaction.atomic("other"):
                publish({}, using="other", type="t")
        finally:
            call_command("migrate", "postroom", database="other", verbosity=0)
        with transaction.atomic("other"):
            publish({}, using="other", type="t")

    def test_a_refused_migration_leaves_the_connection_as_it_was(self):
        with transaction.atomic("other"):
            id = publish({}, using="other", type="t").id
        before = self.session_settings()
        with self.assertRaisesRegex(CommandError, r"undelivered messages in 'other' \(outbox\)"):
            call_command("migrate", "postroom", "zero", database="other", verbosity=0)
        self.assertEqual(self.session_settings(), before)
        with transaction.atomic("other"):
            transaction.set_rollback(True, using="other")
        self.assertEqual(stored("other", "id"), [id])
        call_command("migrate", "postroom", database="other", verbosity=0)

    def session_settings(self):
        if connection.vendor != "mysql":
            return None
        with connections["other"].cursor() as cursor:
            cursor.execute("SELECT @@session.lock_wait_timeout, @@session.sql_notes")
            return cursor.fetchone()

    def test_asynchronous_code(self):
        async def mistake():
            publish({}, type="t")

        with self.assertRaisesRegex(WrongCall, r"await sync_to_async\(place_order\)"):
            async_to_sync(mistake)()
        self.assertEqual(stored(), [])

    def test_each_thread_has_a_connection_of_its_own(self):
        def work():
            try:
                with transaction.atomic():
                    publish({"number": 2}, type="t")
            finally:
                connection.close()

        if connection.vendor == "sqlite":
            return  # its test database lives in one connection
        thread = threading.Thread(target=work)
        with transaction.atomic():
            publish({"number": 1}, type="t")
            thread.start()
            thread.join(30)
            transaction.set_rollback(True)
        self.assertEqual(numbers(), [2])

    def test_the_command_from_python(self):
        with self.assertRaisesRegex(CommandError, "postroom dead show x ended with"):
            call_command("postroom", "dead", "show", "x")


class Billing(TestCase):
    """A handler is called inside the TestCase, without a broker."""

    databases = {"default"}

    def order(self, number=7):
        return OrderPlaced(uuid.uuid4(), number, Decimal(1), now())

    def test_1_a_handler_that_fails_twice_leaves_one_row(self):
        with mock.patch("basket.consumers.failing", [OSError, OSError, None]):
            for _ in range(2):
                with self.assertRaises(OSError):
                    deliver(billing, self.order(), id=UNKNOWN)
                self.assertEqual(Bill.objects.count(), 0)
            self.assertTrue(deliver(billing, self.order(), id=UNKNOWN))
        self.assertFalse(deliver(billing, self.order(), id=UNKNOWN))
        self.assertEqual([bill.number for bill in Bill.objects.all()], [7])

    def test_2_and_is_rolled_back_with_the_test(self):
        self.assertEqual(Bill.objects.count(), 0)
        self.assertTrue(deliver(billing, self.order(), id=UNKNOWN))

    def test_who_ends_the_transaction_has_failed(self):
        with mock.patch("basket.consumers.failing", [transaction.set_rollback]):
            with self.assertRaisesRegex(WrongCall, "rolled its transaction back"):
                deliver(billing, self.order())
        self.assertEqual(Bill.objects.count(), 0)

    def test_hooks(self):
        with self.captureOnCommitCallbacks() as callbacks:
            deliver(billing, self.order())
        self.assertEqual(len(callbacks), 1)


class BillingForReal(TransactionTestCase):
    def test_outside_of_a_block_it_commits(self):
        order = OrderPlaced(uuid.uuid4(), 8, Decimal(1), now())
        self.assertTrue(deliver(billing, order))
        self.assertEqual([bill.number for bill in Bill.objects.all()], [8])


@override_settings(
    MIDDLEWARE=["postroom.idempotency.django.IdempotencyMiddleware"],
    POSTROOM={"keys": "basket.keys.keys"},
)
class KeyedOrders(TestCase):
    """Keys of a view that works outside of their transaction still belong to the test."""

    def order(self):
        return self.client.post("/place/7", headers={"Idempotency-Key": "k-1"})

    def test_1_once(self):
        first, again = self.order(), self.order()
        self.assertEqual((first.status_code, again.status_code), (200, 200))
        self.assertEqual(again.headers["Idempotent-Replayed"], "true")
        self.assertEqual(Order.objects.count(), 1)

    def test_2_another_test_finds_no_key_of_the_first(self):
        self.assertNotIn("Idempotent-Replayed", self.order().headers)
        self.assertEqual(Order.objects.count(), 1)

    def test_an_asynchronous_client(self):
        first = async_to_sync(self.async_client.post)(
            "/place/7", headers={"Idempotency-Key": "k-1"}
        )
        self.assertEqual((first.status_code, Order.objects.count()), (200, 1))
        self.assertEqual(self.order().headers["Idempotent-Replayed"], "true")
