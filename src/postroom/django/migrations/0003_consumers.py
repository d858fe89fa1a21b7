"""What consumers keep: seats, and what waits to be handled again."""

from django.db import migrations

from postroom.django.schema import SchemaVersion


class Migration(migrations.Migration):
    """Schema version 3."""

    dependencies = [("postroom", "0002_people")]  # noqa: RUF012
    atomic = False  # the operation has transactions of its own, as the dialect allows
    operations = [SchemaVersion(3)]  # noqa: RUF012
