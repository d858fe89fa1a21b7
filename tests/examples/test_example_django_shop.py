"""examples/django_shop does what its README says, on SQLite and on the servers."""

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from helpers import eventually
from servers import free_port

EXAMPLE = Path(__file__).parents[2] / "examples" / "django_shop"
ENGINES = {"postgresql": "postgresql", "mysql": "mysql"}
AS_MYSQLDB = "import pymysql\n\npymysql.install_as_MySQLdb()\n"


class Shop:
    """A copy of the example, so that what it writes is nobody's."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = Path(shutil.copytree(EXAMPLE, folder / "shop"))
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("POSTROOM_")}
        self.environment["PYTHONUNBUFFERED"] = "1"
        parts = urlsplit(url)
        if parts.scheme != "sqlite":
            named = {
                "ENGINE": f"django.db.backends.{ENGINES[parts.scheme]}",
                "NAME": parts.path[1:],
                "USER": unquote(parts.username or ""),
                "PASSWORD": unquote(parts.password or ""),
                "HOST": parts.hostname or "",
                "PORT": str(parts.port),
            }
            self.environment |= {f"DATABASE_{name}": value for name, value in named.items()}
        if parts.scheme == "mysql":
            (self.folder / "project" / "__init__.py").write_text(AS_MYSQLDB)

    def manage(self, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "manage.py", *arguments],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{arguments[0]}.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "manage.py", *arguments],
                cwd=self.folder,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )


@pytest.fixture
def shop(tmp_path: Path, database_url: str) -> Shop:
    return Shop(tmp_path, database_url)


def order(port: int, total: str) -> tuple[int, Any]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/orders", data=f"total={total}".encode()
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, None


def test_the_shop(shop: Shop) -> None:
    assert "postroom.0001_core... OK" in shop.manage("migrate")
    assert "No changes detected" in shop.manage("makemigrations", "--check")
    assert "OK" in shop.manage("test")
    port = free_port()
    web = shop.start("runserver", "--noreload", f"127.0.0.1:{port}")
    relay = shop.start("postroom", "relay")
    try:
        refused = (ConnectionError, urllib.error.URLError)
        status, told = eventually(lambda: order(port, "9.90"), 30, retry=refused)
        assert status == 201
        assert order(port, "-1")[0] == 400
        assert order(port, "tea")[0] == 400
        log = shop.folder / "postroom.log"
        eventually(lambda: told["message"] in log.read_text(), 30)
        assert order(port, "1.00")[0] == 201
        eventually(lambda: '"total":"1.00"' in log.read_text(), 30)
        relay.send_signal(signal.SIGTERM)
        assert relay.wait(60) == 0
        lines = [line for line in log.read_text().splitlines() if line.startswith("{")]
        assert [json.loads(line)["payload"]["total"] for line in lines] == ["9.90", "1.00"]
    finally:
        for process in (web, relay):
            process.kill()
            process.wait()
