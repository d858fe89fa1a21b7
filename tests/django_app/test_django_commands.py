"""`manage.py postroom …` on the database of the project, and its relay beside a real web server."""

import json
import urllib.error
import urllib.request
from pathlib import Path

from django_site import Site, each_database, one_database

from helpers import eventually
from servers import free_port

RECEIVER = {"broker_url": "call:basket.receivers:count"}


def post(port: int, path: str) -> tuple[int, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data=b"")
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_web_server_and_a_relay(site: Site, tmp_path: Path) -> None:
    """Requests publish or do not; the relay delivers what was committed, and stops cleanly.

    On PostgreSQL the relay never looks by itself again: the web server's commit wakes it.
    """
    site.postroom = dict(RECEIVER)
    if site.driver.startswith("psycopg"):
        never = {"poll_min_seconds": 600, "poll_max_seconds": 600}
        site.postroom |= {"notify": True, "relay": never}
    site.manage("migrate", "-v0")
    port = free_port()
    site.start("runserver", "--noreload", f"127.0.0.1:{port}", log=tmp_path / "web.log")
    refused = (ConnectionError, urllib.error.URLError, AssertionError)
    eventually(lambda: post(port, "/place/1")[0] == 200, 30, retry=refused)
    assert post(port, "/fail/2")[0] == 500
    assert post(port, "/savepoint/10")[0] == 200
    status, told = post(port, "/alone")
    assert (status, told.partition(":")[0]) == (200, "WouldCommitAlone")
    assert "`with transaction.atomic():`" in told
    status, told = post(port, "/asynchronous")
    assert (status, told.partition(":")[0]) == (200, "WrongCall")
    assert "sync_to_async" in told
    assert post(port, "/threaded/20")[0] == 200

    log = tmp_path / "relay.log"
    relay = site.start("postroom", "relay", log=log)
    arrived = [f"received {number} " for number in (1, 11, 20)]
    eventually(lambda: all(each in log.read_text() for each in arrived), 30)
    assert post(port, "/place/30")[0] == 200
    eventually(lambda: "received 30 " in log.read_text(), 30)
    assert site.stop(relay) == 0
    said = log.read_text()
    assert "relay.stopped" in said
    assert [said.count(f"received {n} ") for n in (1, 2, 10, 11, 20, 30)] == [1, 0, 0, 1, 1, 1]
    payload = json.loads(said.partition("received 1 ")[2].splitlines()[0])
    assert (payload["number"], payload["total"]) == (1, "9.90")
    state = site.asked("status")
    assert [state[name] for name in ("pending", "held", "dead")] == [0, 0, 0]


@each_database
def test_the_commands_of_an_operator(site: Site) -> None:
    site.postroom = RECEIVER
    site.manage("migrate", "-v0")
    ids = site.manage("place", "1", "666", "2").split()
    drained = json.loads(site.manage("postroom", "relay", "--once", "--json").splitlines()[-1])
    assert (drained["delivered"], drained["dead"]) == (2, 1)
    (letter,) = site.asked("dead", "list")
    assert letter["id"] == ids[1]
    site.manage("postroom", "dead", "discard", ids[1], "--reason", "unwanted")
    assert site.asked("dead", "list") == []
    assert site.asked("messages", "show", ids[0])["state"] == "succeeded"


@each_database
def test_another_alias(site: Site) -> None:
    for alias in ("default", "other"):
        site.manage("migrate", "-v0", "--database", alias)
    (id,) = site.manage("place", "1", "--database", "other").split()
    for option in (("--database", "other"), ("--database=other",)):
        assert site.asked("messages", "show", id, *option)["state"] == "pending"
    assert site.run("postroom", "messages", "show", id).returncode == 1
    site.postroom = {"database": "other", "broker_url": "stdout://"}
    assert id in site.manage("postroom", "relay", "--once")


@one_database
def test_what_stands_over_the_settings(site: Site) -> None:
    site.postroom = {"broker_url": "stdout://", "relay": {"retry_attempts": 2}}
    other = site.urls["other"]
    told = site.manage("postroom", "db", "install", POSTROOM_DATABASE_URL=other)
    assert told.startswith(f"{other}: installed")
    told = site.manage("postroom", "db", "install", "--database", other)
    assert told.startswith(f"{other}: at version")
    site.postroom["database_url"] = other
    assert site.manage("postroom", "db", "check") == f"{other}: everything is there.\n"


@one_database
def test_options_of_django_and_help(site: Site) -> None:
    options = ("--settings", "shop_site.settings", "--no-color", "--skip-checks")
    assert "installed" in site.manage("postroom", "db", "install", *options)
    done = site.run("postroom", "nothing", "--traceback")
    assert done.returncode == 2
    assert "Traceback" in done.stderr
    assert "postroom: No such command 'nothing'" in done.stderr
    for words in (("postroom", "--help"), ("help", "postroom")):
        told = site.manage(*words)
        assert "manage.py postroom" in told
        assert "relay" in told
    assert "postroom" in site.manage("help").split()


@one_database
def test_mistakes_are_one_sentence(site: Site) -> None:
    site.manage("migrate", "-v0", "postroom", "0005")
    done = site.run("postroom", "relay", "--once", "--broker", "stdout://")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "are of version 5, this relay needs version" in done.stderr
    assert ": run `manage.py migrate`." in done.stderr
    site.manage("migrate", "-v0")
    done = site.run("postroom", "dead", "show", "01890a5d-ac96-774b-bcce-b302099a8057")
    assert "`manage.py postroom dead list`" in done.stderr
    done = site.run("postroom", "relay")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "No broker URL" in done.stderr
    assert "with Django in POSTROOM" in done.stderr
    site.postroom = {"brokr_url": "stdout://"}
    done = site.run("postroom", "relay")
    assert (done.returncode, done.stderr) == (
        2,
        "postroom: POSTROOM['brokr_url'] is not a setting; did you mean 'broker_url'?\n",
    )
    done = site.run("check")
    assert done.returncode == 1
    assert "(postroom.E001) POSTROOM['brokr_url'] is not a setting" in done.stderr
