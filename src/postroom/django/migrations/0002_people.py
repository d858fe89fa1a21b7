"""The inbox, the operators' jobs, and what workers say of themselves."""

from django.db import migrations

from postroom.django.schema import SchemaVersion


class Migration(migrations.Migration):
    """Schema version 2."""

    dependencies = [("postroom", "0001_core")]  # noqa: RUF012
    atomic = False  # the operation has transactions of its own, as the dialect allows
    operations = [SchemaVersion(2)]  # noqa: RUF012
