"""The app, as INSTALLED_APPS finds it."""

from __future__ import annotations

from typing import Any

from django.apps import AppConfig
from django.core import checks
from django.core.signals import setting_changed
from django.db.models.signals import post_migrate

__all__ = ["PostroomConfig"]


class PostroomConfig(AppConfig):
    """Postroom in a Django project."""

    name = "postroom.django"
    label = "postroom"
    verbose_name = "Postroom"

    def ready(self) -> None:
        """Listen for what concerns us."""
        from postroom import framework
        from postroom.django import schema, settings
        from postroom.django.checks import check_settings

        framework.register(
            framework.Framework(
                name="Django",
                command="manage.py postroom",
                migrate="manage.py migrate",
                document=settings.document,
                alias=settings.alias,
            )
        )
        checks.register(check_settings, "postroom")
        setting_changed.connect(_forget, dispatch_uid="postroom.settings")
        post_migrate.connect(
            schema.empty_after_flush, sender=self, dispatch_uid="postroom.empty_after_flush"
        )


def _forget(*, setting: str, **_: Any) -> None:
    from postroom.django import settings

    if setting in ("POSTROOM", "DATABASES"):
        settings.forget()
