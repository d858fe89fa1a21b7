import uuid

from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True
    operations = [
        migrations.CreateModel(
            "Order",
            [
                ("id", models.UUIDField(primary_key=True, default=uuid.uuid4, serialize=False)),
                ("number", models.IntegerField(unique=True)),
                ("total", models.DecimalField(max_digits=10, decimal_places=2)),
                ("placed_at", models.DateTimeField(auto_now_add=True)),
            ],
        ),
        migrations.CreateModel(
            "Bill",
            [
                (
                    "id",
                    models.BigAutoField(
                        verbose_name="ID", primary_key=True, auto_created=True, serialize=False
                    ),
                ),
                ("number", models.IntegerField()),
            ],
        ),
    ]
