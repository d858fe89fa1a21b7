"""A fresh project for each test, on every database and driver."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from django_site import PLACES, Site


@pytest.fixture(params=PLACES, ids="-".join)
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    database, driver = request.param
    aliases = ("default", "other")
    if database == "sqlite":
        urls = {alias: f"sqlite:///{tmp_path / alias}.db" for alias in aliases}
        names = []
    else:
        server = request.getfixturevalue({"postgresql": "postgres", "mariadb": "mariadb"}[database])
        names = [f"dj_{uuid.uuid4().hex[:12]}" for _ in aliases]
        urls = {a: server.create_database(n) for a, n in zip(aliases, names, strict=True)}
    site = Site(driver, urls, tmp_path)
    yield site
    site.close()
    for name in names:
        server.drop_database(name)
