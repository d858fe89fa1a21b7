"""The publishing suite again, on the drivers that Django takes only where the usual ones are not.

A process has one driver of each database, so they have one of their own.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from django_site import PLACES

TESTS = Path(__file__).parents[1]
OTHERS = [place for place in PLACES if place[1] in ("psycopg2", "mysqlclient")]


@pytest.mark.parametrize(("database", "driver"), OTHERS, ids=["-".join(place) for place in OTHERS])
def test_the_publishing_suite(database: str, driver: str, request: pytest.FixtureRequest) -> None:
    fixture = {"postgresql": "postgres", "mariadb": "mariadb"}[database]
    server = request.getfixturevalue(fixture)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *("outbox/test_publish.py", "databases/test_links.py", "-k", f"django and {database}"),
        ],
        cwd=TESTS,
        env=os.environ
        | {"POSTROOM_TEST_DJANGO": driver, f"POSTROOM_TEST_{fixture.upper()}_URL": server.url},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    (passed,) = re.findall(r"(\d+) passed", done.stdout)
    assert int(passed) >= 60
    assert "skipped" not in done.stdout
