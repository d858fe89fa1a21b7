"""Settings of the shop. DATABASE_NAME, …_ENGINE and so on choose another database than SQLite."""

import os
from pathlib import Path

SECRET_KEY = os.environ.get("SECRET_KEY", "only for this example")
DEBUG = os.environ.get("DEBUG") == "1"
ALLOWED_HOSTS = ["127.0.0.1", "localhost"]
ROOT_URLCONF = "project.urls"
INSTALLED_APPS = ["orders", "postroom.django"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True

DATABASES = {
    "default": {
        "ENGINE": os.environ.get("DATABASE_ENGINE", "django.db.backends.sqlite3"),
        "NAME": os.environ.get("DATABASE_NAME", Path(__file__).parents[1] / "shop.db"),
        "USER": os.environ.get("DATABASE_USER", ""),
        "PASSWORD": os.environ.get("DATABASE_PASSWORD", ""),
        "HOST": os.environ.get("DATABASE_HOST", ""),
        "PORT": os.environ.get("DATABASE_PORT", ""),
        "ATOMIC_REQUESTS": True,  # a view is a transaction, so publish has one
    }
}

POSTROOM = {"broker_url": os.environ.get("BROKER_URL", "stdout://")}
