"""`postroom relay`, `status`, `messages`, `dead`: the life of a dead letter at the command line."""

import asyncio
import json
import signal
import subprocess
import uuid
from pathlib import Path

import pytest
import receivers
from commands import COMMAND, Here, postroom
from counter import arrived, audited, draft, publish, said

from postroom.databases.database import Database

POISON, BEHIND, OTHER = "poison", "behind", "other"


@pytest.fixture(autouse=True)
def _forget() -> None:
    receivers.received.clear()


def test_a_dead_letter_holds_its_key_until_it_is_retried(here: Here, database_url: str) -> None:
    url = ("--database", database_url)
    poison, behind, _ = publish(
        database_url, draft(POISON), draft(BEHIND), draft(OTHER, key="another")
    )

    drained = said(here, "relay", "--once", *url, "--broker", "call:receivers:refuse_poison")
    assert drained == {
        "delivered": 1,
        "held": 0,
        "dead": 1,
        "waiting": 0,
        "waits_for": [],
        "lanes_elsewhere": 0,
    }
    assert arrived() == [OTHER]

    state = said(here, "status", *url)
    assert (state["pending"], state["held"], state["dead"]) == (0, 2, 1)
    (letter,) = said(here, "dead", "list", *url)
    assert (letter["id"], letter["error_code"], letter["holds_key"]) == (poison, "unreadable", True)
    shown = said(here, "dead", "show", poison, *url)
    assert shown["payload"] == {"is": POISON}
    assert [(one["attempt"], one["code"]) for one in shown["history"]] == [(1, "unreadable")]
    assert said(here, "messages", "show", poison, *url)["state"] == "aborted"
    assert said(here, "messages", "show", behind, *url)["state"] == "pending"

    assert said(here, "dead", "show", poison, *url)["retried_at"] is None
    done = said(here, "dead", "retry", poison, "--reason", "mended", *url)
    retried = said(here, "dead", "show", poison, *url)
    assert retried["retried_at"] > retried["died_at"]
    assert retried["retried_at"] in here("dead", "show", poison, *url).stdout
    assert done == {"id": poison, "state": "queued", "in_order": True}
    again = here("dead", "retry", poison, *url)
    assert (again.returncode, again.stderr.count("\n")) == (1, 1)
    assert "queued already" in again.stderr

    relay = ("relay", "--once", *url, "--broker", "call:receivers:take", "--rebind")
    assert said(here, *relay)["delivered"] == 2
    assert arrived() == [OTHER, POISON, BEHIND]
    assert [message.broker_id for message in receivers.received][1] == f"{poison}:r1"
    assert said(here, "dead", "list", *url) == []
    (resolved,) = said(here, "dead", "list", "--state", "resolved", *url)
    assert resolved["id"] == poison
    assert said(here, "messages", "show", poison, *url)["state"] == "succeeded"


def test_a_discarded_letter_lets_its_key_go_on(here: Here, database_url: str) -> None:
    url = ("--database", database_url)
    relay = ("relay", "--once", *url, "--broker", "call:receivers:refuse_poison")
    poison, _ = publish(database_url, draft(POISON), draft(BEHIND))
    said(here, *relay)

    assert here("dead", "discard", poison, *url).returncode == 2
    assert here("dead", "discard", poison, "--reason", "  ", *url).returncode == 2
    done = said(here, "dead", "discard", poison, "--reason", "nobody needs it", *url)
    assert done == {"id": poison, "state": "discarded"}
    said(here, *relay)
    assert arrived() == [BEHIND]
    assert said(here, "messages", "show", poison, *url)["state"] == "aborted"
    ((who, what, subject, why),) = audited(database_url)
    assert "@" in who
    assert (what, subject, why) == ("dead.discard", poison, "nobody needs it")


def test_where_keys_go_on_a_retry_says_that_order_was_given_up(
    here: Here, database_url: str
) -> None:
    url = ("--database", database_url)
    broker = ("--broker", "call:receivers:refuse_poison")
    (poison, _) = publish(database_url, draft(POISON), draft(BEHIND))
    said(here, "relay", "--once", *url, *broker, "--on-dead", "continue")
    assert arrived() == [BEHIND]

    done = here("dead", "retry", poison, *url)
    assert "order was given up" in done.stdout
    said(here, "relay", "--once", *url, *broker, "--on-dead", "continue")
    shown = said(here, "dead", "show", poison, *url)
    assert (shown["state"], shown["redrives"], len(shown["history"])) == ("dead", 1, 2)
    here("dead", "retry", poison, *url)
    said(here, "relay", "--once", *url, "--broker", "call:receivers:take", "--rebind")
    assert arrived() == [BEHIND, POISON]


def test_people_get_tables(here: Here, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/app.db"
    (id,) = publish(url, draft(POISON))
    here("relay", "--once", "--database", url, "--broker", "call:receivers:refuse_poison")
    assert "1 dead" in " ".join(here("status", "--database", url).stdout.split())
    assert "unreadable" in here("dead", "show", id, "--database", url).stdout
    assert "aborted" in here("messages", "show", id, "--database", url).stdout


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("relay",), 2, "No database URL"),
        (("relay", "--database", "URL"), 2, "No broker URL"),
        (("relay", "--database", "URL", "--broker", "pigeon://x"), 2, "no broker for pigeon"),
        (("relay", "--database", "URL", "--broker", "nonsense"), 2, "is not a broker URL"),
        (("relay", "--database", "oracle://x/y", "--broker", "stdout://"), 2, "oracle"),
        (("relay", "--database", "URL", "--broker", "call:nowhere:f"), 2, "nowhere"),
        (("relay", "--database", "EMPTY", "--broker", "stdout://"), 1, "postroom db install"),
        (("relay", "--database", "GONE", "--broker", "stdout://"), 1, "postroom db install"),
        (("relay", "--database", "URL", "--broker", "stdout://", "--lease-seconds", "2"), 2, "lea"),
        (("relay", "--database", "URL", "--broker", "stdout://", "--on-dead", "x"), 2, "on_dead"),
        (("relay", "--once", "--database", "URL", "--broker", "nats://127.0.0.1:9"), 3, "NATS"),
        (("relay", "--database", "postgresql://127.0.0.1:9/x", "--broker", "stdout://"), 3, "9"),
        (("relay", "--database", "mysql://127.0.0.1:9/x", "--broker", "stdout://"), 3, "9"),
        (("status", "--database", "GONE"), 1, "postroom db install"),
        (("messages", "show", "x", "--database", "URL"), 2, "not a message id"),
        (("messages", "show", str(uuid.uuid4()), "--database", "URL"), 1, "no message"),
        (("dead", "show", str(uuid.uuid4()), "--database", "URL"), 1, "no dead letter"),
        (("dead", "retry", str(uuid.uuid4()), "--database", "URL"), 1, "no dead letter"),
        (("dead", "retry", "--database", "URL"), 2, "ID"),
        (("dead", "list", "--state", "undead", "--database", "URL"), 2, "undead"),
        (("dead", "list", "--limit", "0", "--database", "URL"), 2, "limit"),
        (("relay", "--nonsense"), 2, "nonsense"),
        (("nonsense",), 2, "nonsense"),
    ],
)
def test_wrong_input_is_one_sentence(
    here: Here, tmp_path: Path, arguments: tuple[str, ...], code: int, text: str
) -> None:
    publish(f"sqlite:///{tmp_path}/app.db")
    (tmp_path / "empty.db").touch()
    places = {
        "URL": f"sqlite:///{tmp_path}/app.db",
        "EMPTY": f"sqlite:///{tmp_path}/empty.db",
        "GONE": f"sqlite:///{tmp_path}/gone.db",
    }
    done = here(*(places.get(argument, argument) for argument in arguments))
    assert done.returncode == code, done.stderr
    assert text in done.stderr
    assert done.stderr.startswith("postroom: ")
    assert done.stderr.count("\n") == 1


def test_another_schema_version_is_named(here: Here, database_url: str) -> None:
    publish(database_url)

    async def age() -> None:
        link = await Database(database_url).connect()
        await link.query("postroom.outbox", "meta_write", item="schema_version", value="99")
        await link.query("postroom.outbox", "meta_write", item="oldest_code", value="99")
        await link.close()

    asyncio.run(age())
    done = here("relay", "--once", "--database", database_url, "--broker", "stdout://")
    assert done.returncode == 1
    assert "version 99" in done.stderr
    assert "upgrade postroom" in done.stderr


def test_a_relay_process_writes_json_lines_and_stops_on_sigterm(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/app.db"
    ids = publish(url, draft("first"), draft("second"))
    process = subprocess.Popen(
        [COMMAND, "relay", "--database", url, "--broker", "stdout://"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    lines = [json.loads(process.stdout.readline()) for _ in ids]
    process.send_signal(signal.SIGTERM)
    rest, log = process.communicate(timeout=30)
    assert process.returncode == 0, log
    assert rest == ""
    assert [line["id"] for line in lines] == ids
    assert set(lines[0]) == {"id", "type", "topic", "key", "headers", "payload"}
    assert (lines[0]["key"], lines[0]["payload"]) == ("k", {"is": "first"})


def test_the_demo_tells_the_truth_whatever_settings_lie_about(tmp_path: Path) -> None:
    real = "kafka://127.0.0.1:9"
    (tmp_path / "postroom.toml").write_text(f'[relay]\nroutes = {{ "*" = "{real}" }}\n')
    done = postroom("demo", cwd=tmp_path, POSTROOM_BROKER_URL=real)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "none lost, none invented" in " ".join(done.stdout.split())
    assert done.stderr == ""
