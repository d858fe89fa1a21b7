"""Idempotency keys: what became of clients' requests."""

from django.db import migrations

from postroom.django.schema import SchemaVersion


class Migration(migrations.Migration):
    """Schema version 4."""

    dependencies = [("postroom", "0003_consumers")]  # noqa: RUF012
    atomic = False  # the operation has transactions of its own, as the dialect allows
    operations = [SchemaVersion(4)]  # noqa: RUF012
