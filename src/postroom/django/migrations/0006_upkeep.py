"""Upkeep: additions for operators and workers."""

from django.db import migrations

from postroom.django.schema import SchemaVersion


class Migration(migrations.Migration):
    """Schema version 6."""

    dependencies = [("postroom", "0005_ledger")]  # noqa: RUF012
    atomic = False  # the operation has transactions of its own, as the dialect allows
    operations = [SchemaVersion(6)]  # noqa: RUF012
