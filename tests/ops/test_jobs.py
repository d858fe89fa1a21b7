"""`dead redrive`, `messages replay`, `jobs`: many messages sent again by a worker that may die."""

import asyncio
import datetime as dt
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import receivers
from commands import COMMAND, Here, postroom
from counter import arrived, audited, draft, publish, refused, said
from house_tools import House
from test_cli_lanes import relaying

from helpers import eventually
from postroom import Draft
from postroom.errors import Refused
from postroom.ops import jobs

REFUSE = ("--broker", "call:receivers:refuse_poison")


@pytest.fixture(autouse=True)
def _forget() -> None:
    receivers.received.clear()


def bury(here: Here, url: str, count: int, *, key: Callable[[int], str] = str) -> list[str]:
    """Dead letters, each at the head of its key, and one message waiting behind each."""
    ids = publish(
        url,
        *(
            Draft(payload={"is": f"{what} {n}"}, type=f"{what}.v1", topic="notes", key=key(n))
            for n in range(count)
            for what in ("poison", "behind")
        ),
    )
    said(here, "relay", "--once", "--database", url, *REFUSE)
    assert len(said(here, "dead", "list", "--limit", "1000", "--database", url)) == count
    return ids[::2]


def by_key() -> dict[str | None, list[str]]:
    keys: dict[str | None, list[str]] = {}
    for message in receivers.received:
        keys.setdefault(message.key, []).append(json.loads(message.payload)["is"])
    return keys


def test_a_redrive_from_the_count_to_the_end(here: Here, database_url: str) -> None:
    url = ("--database", database_url)
    poisons = bury(here, database_url, 12)
    wish = ("--type", "poison.v1")
    counted = said(here, "dead", "redrive", *wish, "--dry-run", *url)
    group = {"topic": "notes", "type": "poison.v1", "error_code": "unreadable", "count": 12}
    group["source"] = "outbox"
    assert counted == {"total": 12, "groups": [group]}
    assert "0 messages" in here("dead", "redrive", "--topic", "other", "--dry-run", *url).stdout
    assert len(said(here, "dead", "list", *url)) == 12, "a dry run changes nothing"

    with relaying(database_url):
        told = said(here, "dead", "redrive", *wish, "--canary", "2", "--reason", "mended", *url)
        assert (told["state"], told["queued"], told["total"]) == ("done", 12, 12)
        eventually(lambda: len(receivers.received) == 24, 60)
    assert by_key() == {str(n): [f"poison {n}", f"behind {n}"] for n in range(12)}
    assert {m.id for m in receivers.received if b"poison" in m.payload} == set(poisons)
    shown = said(here, "jobs", "show", told["job"], *url)
    assert (shown["delivered"], shown["died_again"], shown["why"]) == (12, 0, "mended")
    (listed,) = said(here, "jobs", "list", *url)
    assert listed["job"] == told["job"]
    assert told["job"] in here("jobs", "list", *url).stdout
    what = [(row[1], row[2]) for row in audited(database_url)]
    done = [("redrive.begin", told["job"]), ("redrive.done", told["job"])]
    assert [each for each in what if each[0] != "relay.rebind"] == done


def test_a_canary_that_dies_again_stops_the_job(here: Here, database_url: str) -> None:
    url = ("--database", database_url)
    bury(here, database_url, 6)
    with relaying(database_url, "call:receivers:refuse_poison"):
        done = here("dead", "redrive", "--all", "--canary", "2", "--json", *url)
    told = json.loads(done.stdout)
    assert (done.returncode, told["state"], told["queued"]) == (1, "stopped", 2)
    assert "canary" in told["note"]
    assert told["died_again"] >= 1
    assert len(said(here, "dead", "list", *url)) == 6
    with relaying(database_url):
        told = said(here, "dead", "redrive", "--resume", told["job"], *url)
        assert (told["state"], told["queued"]) == ("done", 6)
        # The two of the canary died again, and are a new decision.
        eventually(lambda: len(said(here, "dead", "list", *url)) == 2, 60)


def test_a_canary_without_a_relay_does_not_wait_for_ever(here: Here, database_url: str) -> None:
    url = ("--database", database_url)
    bury(here, database_url, 3)
    canary = ("--canary", "1", "--canary-seconds", "1")
    done = here("dead", "redrive", "--all", *canary, "--json", *url)
    told = json.loads(done.stdout)
    assert (done.returncode, told["state"], told["queued"]) == (1, "stopped", 1)


def test_errors_stop_the_job(here: Here, database_url: str) -> None:
    url = ("--database", database_url)
    bury(here, database_url, 40)
    with relaying(database_url, "call:receivers:refuse_poison"):
        slow = ("--rate", "8", "--max-errors", "3")
        done = here("dead", "redrive", "--all", *slow, "--json", *url)
    told = json.loads(done.stdout)
    assert (done.returncode, told["state"]) == (1, "stopped")
    assert "more than 3 died again" in told["note"]
    assert 3 < told["queued"] < 40
    eventually(lambda: len(said(here, "dead", "list", *url)) > 30, 60)


def test_the_rate_is_kept(here: Here, database_url: str) -> None:
    """Nothing is asserted of how fast it could be: only that it is not faster than asked."""
    bury(here, database_url, 12)
    begun = time.monotonic()
    told = said(here, "dead", "redrive", "--all", "--rate", "6", "--database", database_url)
    assert told["queued"] == 12
    assert time.monotonic() - begun > 11 / 6 * 0.9


def test_letters_of_one_key_come_back_in_their_order(here: Here, database_url: str) -> None:
    """With on_dead = continue a key has many letters; they go out by position, not by death."""
    url = ("--database", database_url)
    drafts = [Draft(payload={"is": f"poison {n}"}, type="p", topic="t", key="k") for n in range(30)]
    publish(database_url, *drafts)
    said(here, "relay", "--once", "--on-dead", "continue", *url, *REFUSE)
    with relaying(database_url, on_dead="continue"):
        said(here, "dead", "redrive", "--all", "--rate", "40", *url)
        eventually(lambda: len(receivers.received) == 30, 60)
    assert arrived() == [f"poison {n}" for n in range(30)]


def test_a_worker_killed_in_the_middle_is_resumed(
    here: Here, database_url: str, tmp_path: Path
) -> None:
    """SIGKILL between two pages, and at the commit of one: each letter is queued exactly once."""
    url, house = ("--database", database_url), House(database_url)
    bury(here, database_url, 20)
    clean = {k: v for k, v in os.environ.items() if not k.startswith("POSTROOM_")}
    script = (
        "import asyncio, sys; from postroom.ops import jobs\n"
        "async def main():\n"
        "    job = await jobs.begin(sys.argv[1], 'redrive', jobs.Wish(rate=20), why=None)\n"
        "    print(job.id, flush=True)\n"
        "    await jobs.work(sys.argv[1], job.id, lease_seconds=600)\n"
        "asyncio.run(main())\n"
    )
    # take_over is the second transaction; pages follow: the kill is before a page's commit.
    for point in ("tx.commit.before=kill@4", "tx.commit.after=kill@4"):
        process = subprocess.run(
            [sys.executable, "-c", script, database_url],
            env={**clean, "POSTROOM_FAILPOINTS": point},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        assert process.returncode == -signal.SIGKILL, process.stderr
        id = process.stdout.strip()
        left = said(here, "jobs", "show", id, *url)
        assert (left["state"], left["idle"]) == ("running", False)
        assert "is being worked on by" in refused(here, 1, "dead", "redrive", "--resume", id, *url)
        # The time passes that its lease would still last.
        house.sql("UPDATE {p}job SET lease_until = %s", house.ago(1))
        assert said(here, "jobs", "show", id, *url)["idle"]
        told = said(here, "dead", "redrive", "--resume", id, *url)
        assert told["state"] == "done"
        with relaying(database_url, "call:receivers:refuse_poison"):
            eventually(lambda: len(said(here, "dead", "list", *url)) == 20, 60)
        letters = [
            said(here, "dead", "show", one["id"], *url) for one in said(here, "dead", "list", *url)
        ]
        assert {letter["redrives"] for letter in letters} == {letters[0]["redrives"]}
    assert letters[0]["redrives"] == 2
    house.close()


def test_a_job_is_stopped_from_elsewhere(here: Here, database_url: str) -> None:
    url = ("--database", database_url)
    bury(here, database_url, 20)

    async def both() -> tuple[Any, jobs.Job]:
        job = await jobs.begin(database_url, "redrive", jobs.Wish(rate=4), why=None)
        working = asyncio.create_task(jobs.work(database_url, job.id))
        while (await jobs.show(database_url, job.id)).queued < 2:
            await asyncio.sleep(0.05)
        stopped = await jobs.stop(database_url, job.id, why="enough")
        (error,) = await asyncio.gather(working, return_exceptions=True)
        return error, stopped

    error, stopped = asyncio.run(both())
    assert isinstance(error, Refused)
    assert "stopped or taken over" in str(error)
    assert (stopped.state, stopped.note) == ("stopped", "enough")
    after = said(here, "jobs", "show", stopped.id, *url)
    assert after["queued"] == stopped.queued < 20
    assert "stopped already" in refused(here, 1, "jobs", "stop", stopped.id, *url)


def test_an_interrupted_job_is_given_back(database_url: str, here: Here, tmp_path: Path) -> None:
    """Ctrl-C: nothing half done, and the job may be resumed at once."""
    url = ("--database", database_url)
    bury(here, database_url, 30)
    process = subprocess.Popen(
        [COMMAND, "dead", "redrive", "--all", "--rate", "5", *url],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    eventually(lambda: any(j["queued"] > 1 for j in said(here, "jobs", "list", *url)), timeout=60)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    (job,) = said(here, "jobs", "list", *url)
    assert (job["state"], job["idle"]) == ("stopped", True)
    assert 1 < job["queued"] < 30
    assert said(here, "dead", "redrive", "--resume", job["job"], "--json", *url)["queued"] == 30


def test_a_replay_of_what_was_delivered(here: Here, database_url: str) -> None:
    url = ("--database", database_url)
    ids = publish(database_url, *(draft(f"{n}", key=f"k{n % 3}") for n in range(12)))
    with relaying(database_url):
        eventually(lambda: len(receivers.received) == 12, 60)
        receivers.received.clear()
        replay = ("messages", "replay", "--since", "1h", "--topic", "notes")
        eventually(lambda: said(here, *replay, "--dry-run", *url)["total"] == 12, 60)
        told = said(here, *replay, "--key", "k1", "--reason", "new index", *url)
        assert (told["kind"], told["state"], told["queued"]) == ("replay", "done", 4)
        eventually(lambda: arrived() == ["1", "4", "7", "10"], 60)
        assert [m.id for m in receivers.received] == ids[1::3]
        assert {m.broker_id.removeprefix(m.id) for m in receivers.received} == {":r1"}
        receivers.received.clear()
        said(here, *replay, "--key", "k1", "--to", "notes.again", *url)
        eventually(lambda: len(receivers.received) == 4, 60)
        assert {m.topic for m in receivers.received} == {"notes.again"}
        assert {m.broker_id.removeprefix(m.id) for m in receivers.received} == {":r2"}
        assert "0 messages" in here(*replay, "--until", "1d", "--dry-run", *url).stdout


def test_a_message_with_several_deliveries_is_replayed_once(here: Here, database_url: str) -> None:
    url, house = ("--database", database_url), House(database_url)
    (id,) = publish(database_url, draft("1", key="k"))
    replay = ("messages", "replay", "--since", "3d", "--topic", "notes")
    with relaying(database_url):
        eventually(lambda: house.sql("SELECT 1 FROM {p}archive"), 60)
        yesterday = (dt.datetime.now(dt.UTC) - dt.timedelta(days=1)).date().isoformat()
        house.sql("UPDATE {p}archive SET day = %s", yesterday)
        said(here, *replay, *url)
        eventually(lambda: len(house.sql("SELECT 1 FROM {p}archive")) == 2, 60)
        assert said(here, *replay, "--dry-run", *url)["total"] == 1
        assert said(here, *replay, *url)["queued"] == 1
        eventually(lambda: len(receivers.received) == 3, 60)
        eventually(lambda: house.sql("SELECT count(*) FROM {p}outbox")[0][0] == 0, 60)
    assert [m.broker_id.removeprefix(id) for m in receivers.received] == ["", ":r1", ":r2"]
    house.close()


JOB = "00000000-0000-4000-8000-00000000000a"

WRONG = [
    (2, ("dead", "redrive"), "say which: --topic"),
    (2, ("dead", "redrive", "--all", "--topic", "t"), "say which: --topic"),
    (2, ("dead", "redrive", "--all", "--rate", "0"), "the rate must be above 0"),
    (2, ("dead", "redrive", "--since", "yesterday"), "--since must be a time such as"),
    (2, ("dead", "redrive", "--resume", "7"), "'7' is not a job"),
    (1, ("dead", "redrive", "--resume", JOB), "there is no job"),
    (2, ("messages", "replay"), "say from when on: --since"),
    (2, ("messages", "replay", "--since", "1h", "--to", "bad topic!"), "topic"),
    (1, ("jobs", "show", JOB), "there is no job"),
    (1, ("jobs", "stop", JOB), "there is no job"),
    (2, ("jobs", "show", "x"), "'x' is not a job"),
]


@pytest.mark.parametrize(("code", "arguments", "sentence"), WRONG, ids=lambda w: str(w)[:60])
def test_wrong_input_of_jobs(
    here: Here, database_url: str, code: int, arguments: tuple[str, ...], sentence: str
) -> None:
    publish(database_url)
    assert sentence in refused(here, code, *arguments, "--database", database_url)
    assert audited(database_url) == []


def test_a_replay_is_not_resumed_as_a_redrive(here: Here, database_url: str) -> None:
    publish(database_url, draft("one"))
    said(here, "relay", "--once", "--broker", "call:receivers:take", "--database", database_url)
    job = asyncio.run(jobs.begin(database_url, "replay", jobs.Wish(since=1), why=None))
    sentence = refused(here, 1, "dead", "redrive", "--resume", job.id, "--database", database_url)
    assert "is a replay, not a redrive" in sentence


def test_the_command_shows_its_help(tmp_path: Path) -> None:
    done = postroom("dead", "redrive", "--help", cwd=tmp_path)
    assert done.returncode == 0
    assert "--canary" in done.stdout
