"""The ledger: the permanent register of requests sent through the outbox."""

from django.db import migrations

from postroom.django.schema import SchemaVersion


class Migration(migrations.Migration):
    """Schema version 5."""

    dependencies = [("postroom", "0004_idempotency")]  # noqa: RUF012
    atomic = False  # the operation has transactions of its own, as the dialect allows
    operations = [SchemaVersion(5)]  # noqa: RUF012
