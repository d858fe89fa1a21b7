"""Postroom's tables through Django's migrations: made, recognised, taken back, and not lost."""

import sqlite3
from contextlib import closing

from django.apps import apps
from django.db.migrations.loader import MigrationLoader
from django_site import Site, each_database, one_database

import django_doors
from postroom.databases.schema import migrations
from postroom.databases.sql import DIALECTS
from postroom.django.schema import SchemaVersion

assert django_doors.settings.configured


def test_every_schema_version_is_a_migration() -> None:
    """Another version is a file of a few lines beside 0001_core.py, and this fails without it."""
    assert apps.get_app_config("postroom").name == "postroom.django"
    loader = MigrationLoader(None)
    ours = {key: m for key, m in loader.disk_migrations.items() if key[0] == "postroom"}
    found = []
    for (_, name), migration in sorted(ours.items()):
        (operation,) = migration.operations
        assert isinstance(operation, SchemaVersion)
        assert not migration.atomic
        found.append((operation.version, name.partition("_")[2], name))
        before = [("postroom", found[-2][2])] if found[1:] else []
        assert migration.dependencies == before
    for dialect in DIALECTS:
        steps = [(s.version, s.name, f"{s.version:04}_{s.name}") for s in migrations(dialect)]
        assert found == steps


@each_database
def test_made_planned_printed_and_taken_back(site: Site) -> None:
    assert "Applying postroom.0001_core... OK" in site.manage("migrate")
    assert "No changes detected" in site.manage("makemigrations", "--check", "--dry-run")
    assert "no issues" in site.manage("check")
    assert site.asked("db", "check")["ok"]
    assert "[X] 0001_core" in site.manage("showmigrations", "postroom")
    assert "No migrations to apply" in site.manage("migrate")
    printed = site.manage("sqlmigrate", "postroom", "0001")
    assert "CREATE TABLE" in printed
    assert "schema_version" in printed
    backwards = site.manage("sqlmigrate", "postroom", "0001", "--backwards")
    assert "DROP" in backwards

    assert "Unapplying postroom.0001_core... OK" in site.manage("migrate", "postroom", "zero")
    done = site.run("postroom", "db", "check")
    assert done.returncode == 1
    assert "Postroom's tables are not in" in done.stdout
    site.manage("migrate", "postroom")
    assert site.asked("db", "check")["ok"]


@each_database
def test_tables_of_postroom_db_install_are_recognised(site: Site) -> None:
    site.manage("postroom", "db", "install")
    site.manage("migrate", "basket", "-v0")
    (id,) = site.manage("place", "1").split()
    site.manage("migrate", "-v0")
    assert "[X] 0001_core" in site.manage("showmigrations", "postroom")
    assert site.asked("messages", "show", id)["state"] == "pending"


@each_database
def test_undelivered_messages_are_not_lost(site: Site) -> None:
    site.manage("migrate", "-v0")
    (id,) = site.manage("place", "1").split()
    done = site.run("migrate", "postroom", "zero")
    assert done.returncode == 1
    said = done.stderr.strip().splitlines()
    assert said == [
        "Refusal: There are undelivered messages in 'default' (outbox): let the relay deliver "
        "them, or lose them with `manage.py postroom db downgrade --to 0 --force`."
    ]
    assert "[X] 0001_core" in site.manage("showmigrations", "postroom")
    site.manage("place", "2")  # nothing is left locked

    # Django takes one version back after the other, so the newer tables are gone already.
    site.manage("migrate", "-v0")
    assert site.asked("messages", "show", id)["state"] == "pending"
    site.manage("postroom", "relay", "--once", "--broker", "stdout://")
    site.manage("migrate", "postroom", "zero", "-v0")
    assert site.run("postroom", "db", "check").returncode == 1


@one_database
def test_what_was_forced_away_is_no_trouble(site: Site) -> None:
    site.manage("migrate", "-v0")
    (id,) = site.manage("place", "1").split()
    site.manage("postroom", "db", "downgrade", "--to", "0", "--force")
    site.manage("migrate", "postroom", "zero", "-v0")
    site.manage("migrate", "-v0")
    assert site.asked("db", "check")["ok"]
    assert site.run("postroom", "messages", "show", id).returncode == 1


@one_database
def test_newer_tables_are_left_alone(site: Site) -> None:
    site.manage("migrate", "-v0")
    with closing(sqlite3.connect(site.urls["default"].removeprefix("sqlite:///"))) as database:
        database.execute("UPDATE postroom_meta SET value = '99' WHERE name = 'schema_version'")
        database.commit()
    done = site.run("migrate", "postroom", "zero")
    assert done.returncode == 1
    assert done.stderr.startswith("Refusal: Postroom's tables in 'default' are at version 99: ")
    assert "`manage.py postroom db downgrade --to " in done.stderr


@each_database
def test_a_router_may_keep_them_out_of_a_database(site: Site) -> None:
    done = site.manage("migrate", "--database", "other", SHOP_ROUTERS="shop_site.routers.Apart")
    assert "Applying postroom.0001_core... OK" in done
    assert site.run("postroom", "db", "check", "--database", "other").returncode == 1
    site.manage("migrate", "-v0", SHOP_ROUTERS="shop_site.routers.Apart")
    assert site.asked("db", "check")["ok"]
