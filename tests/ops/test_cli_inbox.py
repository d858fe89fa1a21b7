"""`postroom consume`, `postroom inbox` and dead letters of consumers, from the command line."""

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import Here
from house_tools import House

from helpers_messages import make_message
from postroom.brokers import memory
from postroom.messages import Message
from postroom.ops import readable

MODULE = """
from postroom import Consumer

how = {{"topics": ["orders"], "gives": "session", "retry_attempts": {attempts}}}
billing = Consumer("billing", {url!r}, "memory://cli", **how)
bad = set({bad!r})


@billing.on("note")
async def bill(event, tx):
    if event["n"] in bad:
        raise RuntimeError("no")


both = [billing]
"""


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    memory.broker("cli").clear()
    yield
    sys.modules.pop("bills", None)
    memory.broker("cli").clear()


def write(url: str, *, attempts: int = 1, bad: tuple[int, ...] = ()) -> None:
    Path("bills.py").write_text(MODULE.format(url=url, attempts=attempts, bad=bad))
    sys.modules.pop("bills", None)


def note(number: int, key: str | None = "k") -> Message:
    return make_message(b'{"n": %d}' % number, type="note", key=key)


def send(*messages: Message) -> None:
    asyncio.run(memory.broker("cli").send(messages))


def test_from_consume_to_redrive(house: House, here: Here) -> None:
    url = ("--database", house.url)
    write(house.url, bad=(1,))
    batch = [note(n) for n in range(4)]
    send(*batch)
    done = here("consume", "bills:billing", "--once", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "handled": 1, "duplicates": 0, "failed": 0, "buried": 1, "skipped": 0,
    }  # fmt: skip

    held = json.loads(here("inbox", "list", "--held", "--json", *url).stdout)
    assert [(each["state"], each["message_id"]) for each in held] == [
        ("dead", batch[1].id),
        ("waiting", batch[2].id),
        ("waiting", batch[3].id),
    ]
    shown = json.loads(here("inbox", "show", "billing", batch[1].id, "--json", *url).stdout)
    assert (shown["state"], shown["payload"], shown["error"]) == ("dead", {"n": 1}, "no")
    shown = json.loads(here("inbox", "show", "billing", batch[0].id, "--json", *url).stdout)
    assert shown["state"] == "handled"
    listed = json.loads(here("inbox", "list", "--consumer", "billing", "--json", *url).stdout)
    assert len(listed) == 4
    assert "Nothing was handled yet." in here("inbox", "list", "--consumer", "x", *url).stdout

    dead = json.loads(here("dead", "list", "--json", *url).stdout)
    assert [each["source"] for each in dead] == ["consumer:billing"]
    assert "consumer:billing" in here("dead", "list", *url).stdout
    assert "No dead letters." in here("dead", "list", "--source", "outbox", *url).stdout
    queued = here("dead", "retry", batch[1].id, "--source", "consumer:billing", *url)
    assert "it goes before what waits behind it" in queued.stdout
    write(house.url)
    done = here("consume", "bills:both", "--once")
    assert done.stdout.startswith("3 handled"), done.stderr
    assert json.loads(here("inbox", "list", "--held", "--json", *url).stdout) == []
    resolved = json.loads(here("dead", "list", "--state", "resolved", "--json", *url).stdout)
    assert [each["id"] for each in resolved] == [batch[1].id]


def test_a_redrive_of_one_consumer(house: House, here: Here) -> None:
    url = ("--database", house.url)
    write(house.url, bad=(0, 1, 2))
    send(*(note(n, key=None) for n in range(3)))
    here("consume", "bills:billing", "--once")
    source = ("--source", "consumer:billing")
    done = here("dead", "redrive", "--all", "--json", *source, *url)
    assert json.loads(done.stdout)["queued"] == 3, done.stderr
    write(house.url)
    assert here("consume", "bills:billing", "--once").stdout.startswith("3 handled")


def bury_in_both(house: House, here: Here) -> str:
    """Three dead letters of a consumer and one of the outbox; returns the id of the last."""
    write(house.url, bad=(0, 1, 2))
    send(*(note(n) for n in range(3)), *(note(n, key=None) for n in (1, 2)))
    here("consume", "bills:billing", "--once")
    id = house.publish("poison")
    refuse = ("--broker", "call:receivers:refuse_poison")
    here("relay", "--once", *refuse, "--database", house.url)
    return id


def test_a_redrive_covers_every_source(house: House, here: Here) -> None:
    """`dead redrive` sends what `dead list` shows: letters of the relay and of consumers."""
    url = ("--database", house.url)
    id = bury_in_both(house, here)
    assert len(json.loads(here("dead", "list", "--json", *url).stdout)) == 4
    done = here("dead", "redrive", "--all", "--dry-run", *url)
    assert "4 messages; nothing was changed." in done.stdout, done.stderr
    assert "consumer:billing" in done.stdout
    done = here("dead", "redrive", "--error-code", "RuntimeError", "--json", *url)
    told = json.loads(done.stdout)
    assert (told["total"], told["queued"]) == (3, 3), done.stderr
    assert "source" not in told["wish"]
    told = json.loads(here("dead", "redrive", "--all", "--json", *url).stdout)
    assert (told["total"], told["queued"]) == (1, 1)
    write(house.url)
    # The two behind the first of the key come with it.
    assert here("consume", "bills:billing", "--once").stdout.startswith("5 handled")
    resolved = json.loads(here("dead", "list", "--state", "resolved", "--json", *url).stdout)
    assert [each["source"] for each in resolved] == ["consumer:billing"] * 3
    queued = json.loads(here("dead", "list", "--state", "queued", "--json", *url).stdout)
    assert [(each["id"], each["source"]) for each in queued] == [(id, "outbox")]


def test_a_redrive_of_nothing_is_a_refusal(house: House, here: Here) -> None:
    url = ("--database", house.url)
    bury_in_both(house, here)
    for words in (
        ("dead", "redrive", "--topic", "elsewhere"),
        ("dead", "redrive", "--source", "consumer:billing", "--type", "none"),
        ("messages", "replay", "--since", "2h", "--topic", "elsewhere"),
    ):
        dry = here(*words, "--dry-run", "--json", *url)
        assert (dry.returncode, json.loads(dry.stdout)["total"]) == (1, 0), words
        done = here(*words, *url)
        assert done.returncode == 1, (words, done.stdout)
        assert "match" in done.stderr
    assert json.loads(here("jobs", "list", "--json", *url).stdout) == []


@pytest.mark.parametrize(
    "words",
    [
        ("list",),
        ("redrive", "--all"),
        ("show", "ID"),
        ("retry", "ID"),
        ("discard", "ID", "--reason", "x"),
    ],
)
def test_an_unknown_source_is_refused(house: House, here: Here, words: tuple[str, ...]) -> None:
    id = bury_in_both(house, here)
    words = tuple(id if word == "ID" else word for word in words)
    done = here("dead", *words, "--source", "billing", "--database", house.url)
    assert done.returncode == 2, done.stdout
    assert "did you mean consumer:billing?" in done.stderr
    done = here("dead", *words, "--source", "consumer:mailing", "--database", house.url)
    assert done.returncode == 2, done.stdout
    assert "known sources: consumer:billing, outbox" in done.stderr
    assert len(json.loads(here("dead", "list", "--json", "--database", house.url).stdout)) == 4


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("consume", "nowhere:x", "--once"), 2, "cannot be imported"),
        (("consume", "bills:nothing", "--once"), 2, "is no Consumer"),
        (("consume", "bills:billing"), 2, "memory://"),
        (("consume",), 2, "MODULE:CONSUMER"),
        (("inbox", "show", "billing", "x", "--database", "URL"), 1, "knows no message"),
        (("inbox", "prune", "--older-than", "soon", "--database", "URL"), 2, "no time span"),
    ],
)
def test_what_is_refused(
    house: House, here: Here, words: tuple[str, ...], code: int, said: str
) -> None:
    write(house.url)
    done = here(*(house.url if word == "URL" else word for word in words))
    assert done.returncode == code, done.stderr
    assert said in done.stderr


@pytest.mark.parametrize("command", ["consume", "doctor"])
@pytest.mark.parametrize(
    ("where", "content", "said"),
    [
        ("bills:x", "1 / 0", "ZeroDivisionError: division by zero ("),
        ("bills", "raise KeyError('a')", "KeyError: 'a' ("),
        ("bills:x", "def (", "SyntaxError: "),
        ("bills:x", "raise SystemExit(7)", "SystemExit: 7 ("),
        ("bills:x", "import nowhere", "No module named 'nowhere'"),
        ("bills:x", "from postroom import Consumer; Consumer('', 'sqlite://')", "name"),
        ("", "", "'' names no module: write module:variable"),
        (".bills", "", "'.bills' names no module"),
        (":x", "", "':x' names no module"),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_sentence(
    here: Here, tmp_path: Path, command: str, where: str, content: str, said: str
) -> None:
    house = House(f"sqlite:///{tmp_path}/app.db")
    house.install()
    Path("bills.py").write_text(f"{content}\n")
    url = ("--database", house.url)
    words = (
        ("consume", where, "--once") if command == "consume" else ("doctor", "--readable", where)
    )
    done = here(*words, *url)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert done.stderr.startswith("postroom: ")
    assert done.stderr.count("\n") == 1


def test_what_was_handled_long_ago_is_forgotten(house: House, here: Here) -> None:
    url = ("--database", house.url)
    write(house.url)
    send(*(note(n) for n in range(3)))
    here("consume", "bills:billing", "--once")
    dry = json.loads(
        here("inbox", "prune", "--older-than", "0s", "--dry-run", "--json", *url).stdout
    )
    assert [one["count"] for one in dry["pruned"]] == [3]
    done = json.loads(here("inbox", "prune", "--older-than", "0s", "--json", *url).stdout)
    assert [(one["kind"], one["count"]) for one in done["pruned"]] == [("inbox", 3)]
    assert json.loads(here("inbox", "list", "--json", *url).stdout) == []


def test_doctor_knows_what_may_come_again(house: House, here: Here) -> None:
    write(house.url)
    send(note(0))
    here("consume", "bills:billing", "--once")
    url = ("--database", house.url)

    def inbox() -> list[str]:
        checks = json.loads(here("doctor", "--json", *url).stdout)["checks"]
        return [each["level"] for each in checks if each["name"] == "inbox"]

    assert inbox() == ["ok"]
    Path("postroom.toml").write_text("[relay]\nkeep_inbox_seconds = 3600\n")
    assert inbox() == ["warning"]


def test_whether_the_new_code_can_read_what_waits(house: House, here: Here) -> None:
    url = ("--database", house.url)
    write(house.url, attempts=5, bad=(0,))
    send(note(0), make_message(b"[", type="note", key="k"))
    here("consume", "bills:billing", "--once")
    done = here("doctor", "--readable", "bills:billing", *url)
    assert done.returncode == 1
    assert "held by billing" in done.stdout
    assert "1 cannot be read." in done.stdout
    said = json.loads(here("doctor", "--readable", "bills:billing", "--json", *url).stdout)
    assert (said["ok"], said["unreadable"]) == (False, 1)


@pytest.mark.parametrize("where", ["pending", "held by billing"])
def test_all_that_waits_is_read_however_much_it_is(
    house: House, here: Here, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """What cannot be read is the last of many pages."""
    monkeypatch.setattr(readable, "PAGE_ROWS", 3)
    url = ("--database", house.url)
    write(house.url, attempts=5, bad=(0,))
    if where == "pending":
        for number in range(20):
            house.publish(str(number))
        house.sql("UPDATE {p}outbox SET type = 'note'")
        ((last,),) = house.sql("SELECT max(position) FROM {p}outbox")
        house.sql("UPDATE {p}outbox SET payload = %s WHERE position = %s", b"[", last)
    else:
        send(*(note(0) for _ in range(20)), make_message(b"[", type="note", key="k"))
        here("consume", "bills:billing", "--once")
    done = here("doctor", "--readable", "bills:billing", "--json", *url)
    said = json.loads(done.stdout)
    assert said["read"][where] == (20 if where == "pending" else 21)
    assert (done.returncode, said["ok"], said["unreadable"]) == (1, False, 1)


def test_a_remedy_for_a_database_that_is_not_configured_names_the_option(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The URL stands in the consumer's code or in an option: `postroom db install` alone fails."""
    url = f"sqlite:///{tmp_path}/empty.db"
    (tmp_path / "empty.db").touch()
    write(url)
    commands = [("consume", "bills:billing", "--once"), ("db", "check", "--database", url)]
    for command in commands:
        done = here(*command)
        assert "run `postroom db install --database …`" in done.stdout + done.stderr
    monkeypatch.setenv("POSTROOM_DATABASE_URL", url)
    for command in commands:
        done = here(*command)
        assert "run `postroom db install`" in done.stdout + done.stderr
