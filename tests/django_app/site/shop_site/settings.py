"""A project's settings; what differs between tests comes from the environment."""

import json
import os
import sys

if os.environ["SHOP_DRIVER"] == "psycopg2":
    sys.modules["psycopg"] = None  # else Django would take it
elif os.environ["SHOP_DRIVER"] == "pymysql":
    import pymysql

    pymysql.install_as_MySQLdb()

SECRET_KEY = "not a secret"
DEBUG = False
ALLOWED_HOSTS = ["127.0.0.1", "testserver"]
ROOT_URLCONF = "shop_site.urls"
INSTALLED_APPS = ["django.contrib.contenttypes", "basket", "postroom.django"]
DATABASES = json.loads(os.environ["SHOP_DATABASES"])
POSTROOM = json.loads(os.environ.get("SHOP_POSTROOM", "{}"))
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
DATABASE_ROUTERS = [name for name in [os.environ.get("SHOP_ROUTERS")] if name]
