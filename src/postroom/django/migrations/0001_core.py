"""The outbox and its side tables."""

from django.db import migrations

from postroom.django.schema import SchemaVersion


class Migration(migrations.Migration):
    """Schema version 1."""

    atomic = False  # the operation has transactions of its own, as the dialect allows
    operations = [SchemaVersion(1)]  # noqa: RUF012
