"""`postroom prune`: what is finished and old goes, what is undecided stays; all is written down."""

import asyncio
from typing import Any

import pytest
import receivers
from commands import Here
from house_tools import House, said

from postroom.brokers import memory
from postroom.config import RelaySettings
from postroom.errors import ConfigurationError
from postroom.messages import new_id
from postroom.ops import prune as work
from postroom.ops.prune import KINDS, duration, plan, prune
from postroom.outbox.relay import Relay

DAY = 86_400


@pytest.fixture(autouse=True)
def _forget() -> None:
    receivers.received.clear()


def url(house: House) -> tuple[str, str]:
    return ("--database", house.url)


def fill(here: Here, house: House) -> None:
    """Something old and something new of each kind, and undecided letters that are old too."""
    old = house.ago(400 * DAY)
    for key in ("a", "b"):
        house.publish("fine", key=key)
    for key in ("dead", "discarded", "new"):
        house.publish("poison", key=key)
    done = here("relay", "--once", *url(house), "--broker", "call:receivers:refuse_poison")
    assert done.returncode == 0, done.stderr
    for key in ("discarded", "new"):
        ((id,),) = house.sql("SELECT id FROM {p}dead_letter WHERE {key} = %s", key)
        said(here, "dead", "discard", str(id), "--reason", "x", *url(house))
    house.sql("UPDATE {p}dead_letter SET died_at = %s WHERE {key} <> 'new'", old)
    _age_archive(house)
    for name, at in (("old", old), ("new", house.ago(60))):
        house.sql(
            "INSERT INTO {p}dedup (dedup_key, message_id, created_at) VALUES (%s, %s, %s)",
            name,
            new_id(),
            at,
        )
        house.sql(
            "INSERT INTO {p}inbox (consumer, message_id, handled_at) VALUES ('c', %s, %s)", name, at
        )
        house.sql(
            "INSERT INTO {p}worker (incarnation, kind, name, seen_at)"
            " VALUES (%s, 'relay', 'r', %s)",
            name,
            at,
        )
        house.sql(
            "INSERT INTO {p}consumer (name, broker, topics, seen_at) VALUES (%s, 'b', '[]', %s)",
            name,
            at,
        )
    for state, at in (("done", old), ("running", old), ("stopped", house.ago(60))):
        job = new_id()
        house.sql(
            "INSERT INTO {p}job (id, kind, state, wish, total, who, updated_at)"
            " VALUES (%s, 'redrive', %s, '{}', 3, 'me', %s)",
            job,
            state,
            at,
        )
        for position in range(3):
            house.sql("INSERT INTO {p}job_item (job, id, position) VALUES (%s, %s, %s)",
                      job, new_id(), position)  # fmt: skip
    # What was answered and has expired goes; what nobody knows the end of stays.
    for key, status, at in (
        ("old", "completed", old), ("new", "completed", house.ago(-60)),
        ("doubt", "indeterminate", old), ("lost", "pending", old),
    ):  # fmt: skip
        house.sql("INSERT INTO {p}idempotency_key (scope, operation, {key}, fingerprint, mode,"
                  " status, owner, expires_at) VALUES ('s', 'o', %s, 'f', 'external', %s, '', %s)",
                  key, status, at)  # fmt: skip
    house.sql("DELETE FROM {p}audit")


def _age_archive(house: House) -> None:
    if house.dialect != "postgresql":
        house.sql("UPDATE {p}archive SET day = '2024-01-02' WHERE {key} = 'a'")
        return
    house.sql(
        "CREATE TABLE postroom.archive_20240102 PARTITION OF postroom.archive"
        " FOR VALUES FROM ('2024-01-02') TO ('2024-01-03')"
    )
    house.sql("UPDATE postroom.archive SET day = '2024-01-02' WHERE key = 'a'")


def counts(house: House) -> dict[str, int]:
    tables = ("archive", "dedup", "dead_letter", "inbox", "job", "job_item", "worker",
              "idempotency_key", "consumer")  # fmt: skip
    return {table: house.count(table) for table in tables}


BEFORE = {
    "archive": 2, "dedup": 2, "dead_letter": 3, "inbox": 2, "job": 3, "job_item": 9, "worker": 2,
    "idempotency_key": 4, "consumer": 2,
}  # fmt: skip
AFTER = {
    "archive": 1, "dedup": 1, "dead_letter": 2, "inbox": 1, "job": 2, "job_item": 6, "worker": 1,
    "idempotency_key": 3, "consumer": 1,
}  # fmt: skip


def test_what_is_old_goes_and_what_is_undecided_stays(here: Here, house: House) -> None:
    fill(here, house)
    assert counts(house) == BEFORE
    would = said(here, "prune", "--dry-run", *url(house))
    assert would["dry_run"]
    assert {one["kind"]: one["count"] for one in would["pruned"]} == dict.fromkeys(KINDS, 1)
    assert counts(house) == BEFORE
    assert house.count("audit") == 0

    done = said(here, "prune", "--reason", "the disk is full", *url(house))
    assert {one["kind"]: (one["count"], one["left"]) for one in done["pruned"]} == dict.fromkeys(
        KINDS, (1, 0)
    )
    assert counts(house) == AFTER
    assert sorted(house.sql("SELECT state FROM {p}dead_letter")) == [("dead",), ("discarded",)]
    assert sorted(house.sql("SELECT state FROM {p}job")) == [("running",), ("stopped",)]
    audit = house.sql("SELECT who, what, subject, why FROM {p}audit ORDER BY id")
    assert [subject.split()[0] for _, _, subject, _ in audit] == list(KINDS)
    assert {(what, why) for _, what, _, why in audit} == {("prune", "the disk is full")}
    assert all("@" in who for who, *_ in audit)

    again = said(here, "prune", *url(house))
    assert {one["count"] for one in again["pruned"]} == {0}
    assert house.count("audit") == len(audit)


def test_one_kind_and_an_age_of_its_own(here: Here, house: House) -> None:
    fill(here, house)
    asked = ("--only", "dedup", "--only", "inbox", "--older-than", "30s")
    done = said(here, "prune", *asked, *url(house))
    assert {one["kind"]: one["count"] for one in done["pruned"]} == {"dedup": 2, "inbox": 2}
    assert counts(house) == {**BEFORE, "dedup": 0, "inbox": 0}
    people = here("prune", "--only", "workers", *url(house))
    assert "workers: workers not seen" in people.stdout
    assert people.returncode == 0


def test_the_archive_keeps_what_the_relay_says(here: Here, house: House) -> None:
    """The relay here keeps for ten years: defaults of another machine do not undo that."""
    fill(here, house)
    house.sql("UPDATE {p}meta SET value = %s WHERE name = 'keep_delivered_seconds'",
              str(3650 * DAY))  # fmt: skip
    done = said(here, "prune", "--only", "archive", *url(house))
    assert done["pruned"][0]["count"] == 0
    assert house.count("archive") == 2
    done = said(here, "prune", "--only", "archive", "--older-than", "30d", *url(house))
    assert done["pruned"][0]["count"] == 1
    assert house.count("archive") == 1


def test_many_go_in_batches(here: Here, house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    old = house.ago(400 * DAY)
    for n in range(25):
        house.sql("INSERT INTO {p}dedup (dedup_key, message_id, created_at) VALUES (%s, %s, %s)",
                  f"old{n}", new_id(), old)  # fmt: skip
    job = new_id()
    house.sql("INSERT INTO {p}job (id, kind, state, wish, total, who, updated_at)"
              " VALUES (%s, 'redrive', 'done', '{}', 3, 'me', %s)", job, old)  # fmt: skip
    for position in range(25):
        house.sql("INSERT INTO {p}job_item (job, id, position) VALUES (%s, %s, %s)",
                  job, new_id(), position)  # fmt: skip
    monkeypatch.setattr(work, "ROWS", 4)
    done = said(here, "prune", *url(house))["pruned"]
    assert {one["kind"]: one["count"] for one in done if one["count"]} == {"dedup": 25, "jobs": 1}
    assert (house.count("dedup"), house.count("job"), house.count("job_item")) == (0, 0, 0)
    monkeypatch.setattr(work, "MOST", 3)
    for n in range(5):
        house.sql("INSERT INTO {p}dedup (dedup_key, message_id, created_at) VALUES (%s, %s, %s)",
                  f"old{n}", new_id(), old)  # fmt: skip
    assert "3+" in here("prune", "--dry-run", "--only", "dedup", *url(house)).stdout


async def test_two_may_prune_beside_a_relay(house: House) -> None:
    old = house.ago(400 * DAY)
    total = 400
    for n in range(total):
        house.sql("INSERT INTO {p}inbox (consumer, message_id, handled_at) VALUES ('c', %s, %s)",
                  f"old{n}", old)  # fmt: skip
    memory.broker(house.name)
    wanted = plan(RelaySettings(), (), None)
    async with Relay(house.url, f"memory://{house.name}", lease_seconds=6, send_timeout_seconds=1):
        answers = await asyncio.gather(*(prune(house.url, wanted, given=False) for _ in range(2)))
    gone = [one.count for answer in answers for one in answer if one.kind == "inbox"]
    assert sum(gone) <= 2 * total
    assert house.count("inbox") == 0


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("15m", 900), ("24h", DAY), ("7d", 7 * DAY), (" 1 d ", DAY)]
)
def test_time_spans(text: str, seconds: int) -> None:
    assert duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "7", "d", "-1d", "1.5h", "7 days", "1d1h", "999999999d", "٣d"]
)
def test_what_is_no_time_span(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"time span|hundred years"):
        duration(text)


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("--older-than", "7d"), 2, "--only"),
        (("--only", "outbox"), 2, "nothing that can be pruned"),
        (("--only", "dedup", "--older-than", "soon"), 2, "write 90s, 15m, 24h or 7d"),
        (("--older-than",), 2, "older-than"),
        (("--database", "sqlite:///gone.db"), 1, "postroom db install"),
        (("--database", "postgresql://127.0.0.1:9/x"), 3, "127.0.0.1"),
    ],
)
def test_wrong_input_is_one_sentence(
    here: Here, tmp_path: Any, arguments: tuple[str, ...], code: int, text: str
) -> None:
    house = House(f"sqlite:///{tmp_path}/app.db")
    house.install()
    given = () if "--database" in arguments else url(house)
    done = here("prune", *given, *arguments)
    assert done.returncode == code, done.stderr
    assert text in done.stderr
    assert done.stderr.startswith("postroom: ")
    assert done.stderr.count("\n") == 1
