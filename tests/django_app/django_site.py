"""The Django project of these tests, on a database and driver, worked on with its `manage.py`."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest

from django_doors import entry

FOLDER = Path(__file__).parent / "site"
PATIENCE_SECONDS = 60


def _installed(name: str) -> bool:
    try:
        return bool(distribution(name))
    except PackageNotFoundError:
        return False


# mysqlclient has to be compiled; where it is installed it is tested too.
PLACES = [
    ("postgresql", "psycopg"),
    ("postgresql", "psycopg2"),
    ("mariadb", "pymysql"),
    *([("mariadb", "mysqlclient")] if _installed("mysqlclient") else []),
    ("sqlite", "sqlite3"),
]
# For what has nothing to do with the driver.
each_database = pytest.mark.parametrize(
    "site",
    [("postgresql", "psycopg"), ("mariadb", "pymysql"), ("sqlite", "sqlite3")],
    indirect=True,
    ids="-".join,
)
one_database = pytest.mark.parametrize("site", [("sqlite", "sqlite3")], indirect=True, ids="-".join)


@dataclass
class Site:
    """A project; `manage` and `start` run its commands as people do."""

    driver: str
    urls: dict[str, str]  # by alias
    cwd: Path
    postroom: dict[str, Any] = field(default_factory=dict)
    account: dict[str, str] = field(default_factory=dict)  # in place of that of the URLs
    running: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def databases(self) -> dict[str, Any]:
        made = {alias: entry(url) | self.account for alias, url in self.urls.items()}
        made["default"]["ATOMIC_REQUESTS"] = True
        return made

    def environment(self, **more: str) -> dict[str, str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("POSTROOM_")}
        return clean | {
            "SHOP_DRIVER": self.driver,
            "SHOP_DATABASES": json.dumps(self.databases),
            "SHOP_POSTROOM": json.dumps(self.postroom),
            "PYTHONUNBUFFERED": "1",
            "COLUMNS": "160",
            **more,
        }

    def run(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """`manage.py …` to its end, whatever that is."""
        return subprocess.run(
            [sys.executable, FOLDER / "manage.py", *arguments],
            cwd=self.cwd,
            env=self.environment(**environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS * 3,
            check=False,
        )

    def manage(self, *arguments: str, **environ: str) -> str:
        """`manage.py …`, which must succeed; returns what it printed."""
        done = self.run(*arguments, **environ)
        assert done.returncode == 0, f"manage.py {' '.join(arguments)}\n{done.stdout}{done.stderr}"
        return done.stdout

    def asked(self, *arguments: str) -> Any:
        """`manage.py postroom … --json`, read."""
        return json.loads(self.manage("postroom", *arguments, "--json"))

    def start(self, *arguments: str, log: Path) -> subprocess.Popen[str]:
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, FOLDER / "manage.py", *arguments],
                cwd=self.cwd,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
            )
        self.running.append(process)
        return process

    def stop(self, process: subprocess.Popen[str]) -> int:
        process.send_signal(signal.SIGTERM)
        return process.wait(PATIENCE_SECONDS)

    def close(self) -> None:
        for process in self.running:
            process.kill()
            process.wait()
