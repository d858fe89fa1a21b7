"""An entry of DATABASES as a URL: read back by `databases.urls`, and by real servers."""

import ssl
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pymysql
import pytest
from django_site import Site

import django_doors
from doors import mysql_options
from postroom.databases.urls import resolve
from postroom.django.addresses import url_of
from postroom.errors import ConfigurationError, UnknownConnection

assert django_doors.settings.configured

EMPTY = {"NAME": "", "USER": "", "PASSWORD": "", "HOST": "", "PORT": "", "OPTIONS": {}}
NASTY = "p@ss:w/o?r#d%41 é\\'\"&=+"


def url(vendor: str, **entry: Any) -> str:
    return url_of(SimpleNamespace(vendor=vendor, alias="x", settings_dict={**EMPTY, **entry}))


CASES = {
    "nothing but a name": (
        url("postgresql", NAME="app"), "postgresql:///app",
    ),
    "a usual one": (
        url("postgresql", NAME="app", USER="me", PASSWORD="pw", HOST="db", PORT=5433),
        "postgresql://me:pw@db:5433/app",
    ),
    "IPv6": (url("postgresql", NAME="app", HOST="::1", PORT="1"), "postgresql://[::1]:1/app"),
    "a socket": (
        url("postgresql", NAME="app", USER="me", HOST="/run/pg", PORT="5433"),
        "postgresql://me@/app?host=%2Frun%2Fpg&port=5433",
    ),
    "several servers": (
        url("postgresql", NAME="app", HOST="a,b", PORT="1,2"),
        "postgresql:///app?host=a%2Cb&port=1%2C2",
    ),
    "a port alone": (url("postgresql", NAME="app", PORT="7"), "postgresql:///app?port=7"),
    "options of libpq": (
        url("postgresql", NAME="app", HOST="db", OPTIONS={
            "sslmode": "require", "connect_timeout": 5, "application_name": "web & co",
            "isolation_level": 3, "server_side_binding": True, "pool": True,
            "cursor_factory": object,
        }),
        "postgresql://db/app?sslmode=require&connect_timeout=5&application_name=web+%26+co",
    ),
    "a role": (
        url("postgresql", NAME="app", OPTIONS={"assume_role": "the app", "options": "-c a=b"}),
        "postgresql:///app?options=-c+a%3Db+-c+role%3Dthe%5C+app",
    ),
    "MariaDB": (
        url("mysql", NAME="app", USER="me", PASSWORD="pw", HOST="db", PORT="3307"),
        "mysql://me:pw@db:3307/app",
    ),
    "MariaDB by a socket": (
        url("mysql", NAME="app", USER="me", HOST="/run/mysqld/mysqld.sock"),
        "mysql://me@/app?unix_socket=%2Frun%2Fmysqld%2Fmysqld.sock",
    ),
    "MariaDB, all in OPTIONS": (
        url("mysql", NAME="x", OPTIONS={
            "database": "app", "user": "me", "passwd": "pw", "host": "db", "port": 1,
            "charset": "utf8mb4", "isolation_level": "read committed", "init_command": "SET a=1",
            "conv": {}, "cursorclass": object, "client_flag": 1,
        }),
        "mysql://me:pw@db:1/app?charset=utf8mb4&init_command=SET+a%3D1",
    ),
    "MariaDB with TLS": (
        url("mysql", NAME="app", OPTIONS={"ssl": {"ca": "/ca.pem", "check_hostname": False}}),
        "mysql:///app?ssl_ca=%2Fca.pem&ssl_check_hostname=false&ssl=true",
    ),
    "MariaDB with a mode": (
        url("mysql", NAME="app", OPTIONS={"ssl_mode": "REQUIRED", "ssl": True}),
        "mysql:///app?ssl_mode=REQUIRED&ssl=true",
    ),
    "SQLite": (
        url("sqlite", NAME=Path("/data/app.db"), OPTIONS={
            "timeout": 20, "transaction_mode": "IMMEDIATE", "init_command": "PRAGMA x",
        }),
        "sqlite:////data/app.db?timeout=20",
    ),
    "SQLite beside us": (url("sqlite", NAME="a b?.db"), "sqlite:///a%20b%3F.db"),
    "SQLite's own URL": (
        url("sqlite", NAME="file:/data/app.db?mode=rw"),
        "sqlite:///file:/data/app.db?mode=rw&uri=true",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_an_entry_is_a_url(name: str) -> None:
    made, wanted = CASES[name]
    assert made == wanted


@pytest.mark.parametrize("vendor", ["postgresql", "mysql"])
def test_names_and_passwords_come_back_as_they_were(vendor: str) -> None:
    made = resolve(url(vendor, NAME=NASTY, USER=NASTY, PASSWORD=NASTY, HOST="db")).url
    assert (made.database, made.username, made.password, made.host) == (NASTY, NASTY, NASTY, "db")
    assert resolve(url("sqlite", NAME=f"/x/{NASTY}.db")).url.database == f"/x/{NASTY}.db"


def test_what_cannot_be_is_named() -> None:
    with pytest.raises(ConfigurationError, match="sslmoed is not an option of a PostgreSQL URL"):
        resolve(url("postgresql", NAME="app", OPTIONS={"sslmoed": "require"}))
    for name, value in (("ssl", ssl.create_default_context()), ("init_command", ["SET a=1"])):
        with pytest.raises(ConfigurationError, match=rf"^{name} in OPTIONS .* no URL can hold"):
            url("mysql", NAME="app", OPTIONS={name: value})
    with pytest.raises(UnknownConnection, match=r"not oracle, which is the database 'x'"):
        url("oracle", NAME="app")
    for name in (":memory:", "file:memorydb_default?mode=memory&cache=shared"):
        with pytest.raises(ConfigurationError, match="in-memory database is seen by one"):
            resolve(url("sqlite", NAME=name))


@pytest.mark.parametrize(
    "site", [("postgresql", "psycopg"), ("mariadb", "pymysql")], indirect=True, ids="-".join
)
def test_real_servers_know_who_it_is(site: Site) -> None:
    """MariaDB checks the password; the private PostgreSQL trusts everybody it knows the name of."""
    user, password = f"a b@:/?#%41 {uuid.uuid4().hex[:6]}", NASTY.replace("é", "")
    if site.driver == "psycopg":
        with psycopg.connect(site.urls["default"], autocommit=True) as admin:
            admin.execute(f'CREATE ROLE "{user}" LOGIN SUPERUSER')
    else:
        options = mysql_options(site.urls["default"])
        with pymysql.connect(database=options.pop("db"), **options) as admin:
            cursor = admin.cursor()
            cursor.execute("CREATE USER %s@'%%' IDENTIFIED BY %s", (user, password))
            cursor.execute("GRANT ALL ON *.* TO %s@'%%'", (user,))
    site.account = {"USER": user, "PASSWORD": password}
    site.manage("migrate", "-v0")
    (id,) = site.manage("place", "1").split()
    assert site.asked("messages", "show", id)["state"] == "pending"
    site.account["USER"] += "!"
    done = site.run("postroom", "status")
    assert done.returncode == 2
    assert "refused the user name or password" in done.stderr
    assert password not in done.stderr
