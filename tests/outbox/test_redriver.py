"""Dead letters that a rule redrives: which, how many, how often, and the audit entries."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from relaying import Post, by_key, note

from helpers import eventually_async
from postroom import failpoints
from postroom.brokers.base import Permanent
from postroom.config import ConsumerSettings, RedriveRule, RelaySettings
from postroom.databases.database import Database, DatabaseLost
from postroom.dead_letters import redriver as redriving
from postroom.dead_letters.redriver import Redriver, round_rows
from postroom.errors import ConfigurationError

pytest_plugins = ("relay_fixtures",)

BUSY, BROKEN = Permanent("busy", "later"), Permanent("broken", "never")
FAST = RedriveRule(("busy",), after_seconds=0, per_minute=60_000, times=2)


@pytest.fixture(autouse=True)
def _disarm() -> Iterator[None]:
    yield
    failpoints.clear()


def redriver(post: Post, rule: RedriveRule = FAST) -> Redriver:
    return Redriver(Database(post.url), "outbox", rule, "relay-1")


async def bury(post: Post, count: int, outcome: Permanent = BUSY) -> list[str]:
    """Letters of as many keys, and a message behind each."""
    post.broker.fail(lambda m: m.payload == b"1", outcome, times=count)
    keys = [f"{outcome.code}{number}" for number in range(count)]
    ids = post.publish(*(note(key, 1) for key in keys))
    post.publish(*(note(key, 2) for key in keys))
    await post.relay().drain_once()
    assert len(post.sql("SELECT id FROM {p}dead_letter WHERE state = 'dead'")) >= count
    return ids


def states(post: Post) -> dict[str, int]:
    return {
        state: int(count)
        for state, count in post.sql("SELECT state, count(*) FROM {p}dead_letter GROUP BY state")
    }


async def test_letters_that_match_go_again_in_their_order(post: Post) -> None:
    ids = await bury(post, 3)
    await bury(post, 2, BROKEN)
    assert await redriver(post).round() == 3
    assert states(post) == {"queued": 3, "dead": 2}
    await post.relay().drain_once()
    assert by_key(post.broker.messages) == {f"busy{number}": [1, 2] for number in range(3)}
    entries = post.sql("SELECT who, what, subject, why FROM {p}audit")
    assert sorted(str(entry[2]) for entry in entries) == sorted(ids)
    assert {(entry[0], entry[1], entry[3]) for entry in entries} == {
        ("redrive rule of relay-1", "dead.redrive", "busy, redrive 1 of 2")
    }
    assert [said["count"] for said in post.of("letter.redriven")] == [3]


async def test_a_letter_goes_so_many_times_and_then_waits_for_a_person(post: Post) -> None:
    await bury(post, 1)
    for _ in range(FAST.times):
        post.broker.fail(lambda m: m.payload == b"1", BUSY, times=1)
        assert await redriver(post).round() == 1
        await post.relay().drain_once()
        await asyncio.sleep(0.002)  # the next slot of the rate
    assert await redriver(post).round() == 0
    assert states(post) == {"dead": 1}
    assert post.broker.messages == []


async def test_a_fresh_letter_waits(post: Post) -> None:
    await bury(post, 1)
    patient = RedriveRule(("busy",), after_seconds=3600, per_minute=60_000, times=2)
    assert await redriver(post, patient).round() == 0
    assert post.sql("SELECT source FROM {p}redrive_pace") == []


async def test_the_rate_holds_for_all_workers_together(post: Post) -> None:
    """Several relays and restarts share one limit, which is kept in the database."""
    await bury(post, 6)
    slow = RedriveRule(("busy",), after_seconds=0, per_minute=8, times=2)
    assert round_rows(slow) == 2
    counts = await asyncio.gather(*(redriver(post, slow).round() for _ in range(4)))
    assert sorted(counts) == [0, 0, 0, 2]
    assert await redriver(post, slow).round() == 0
    assert states(post) == {"queued": 2, "dead": 4}


async def test_a_clock_that_was_set_back_does_not_stop_the_rule(post: Post) -> None:
    await bury(post, 2)
    slow = RedriveRule(("busy",), after_seconds=0, per_minute=4, times=2)
    assert await redriver(post, slow).round() == 1
    ahead = {
        "postgresql": "next_at + interval '1 hour'",
        "mariadb": "next_at + INTERVAL 1 HOUR",
        "sqlite": "next_at + 3600000000",
    }[post.dialect]
    post.sql(f"UPDATE {{p}}redrive_pace SET next_at = {ahead}")
    assert await redriver(post, slow).round() == 1


async def test_requests_of_the_ledger_are_left_to_people(post: Post) -> None:
    await bury(post, 1)
    headers = '{"postroom-ledger": "accepted"}'
    post.sql(f"UPDATE {{p}}dead_letter SET headers = '{headers}'")
    assert await redriver(post).round() == 0


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("statement", ["pace_lock", "queue", "record", "pace_set"])
async def test_a_round_that_breaks_off_leaves_nothing(
    post: Post, statement: str, moment: str
) -> None:
    await bury(post, 1)
    before = [post.count(table) for table in ("held", "dead_letter", "audit")]

    def fail() -> None:
        raise failpoints.FailpointError(statement)

    failpoints.arm(f"sql.{statement}.{moment}", fail)
    with pytest.raises(DatabaseLost, match=statement):
        await redriver(post).round()
    failpoints.clear()
    assert [post.count(table) for table in ("held", "dead_letter", "audit")] == before
    assert states(post) == {"dead": 1}
    assert await redriver(post).round() == 1


async def test_a_relay_redrives_by_its_settings(
    post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bury(post, 2)
    monkeypatch.setattr(redriving, "ROUND_SECONDS", 0.05)
    how: dict[str, Any] = {"redrive_codes": "busy, slow", "redrive_after_seconds": 0}
    async with post.relay(**how, redrive_per_minute=60_000):
        await eventually_async(lambda: len(post.broker.messages) == 4)
    assert by_key(post.broker.messages) == {"busy0": [1, 2], "busy1": [1, 2]}


async def test_a_failed_round_is_logged_and_the_relay_works_on(
    post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bury(post, 1)
    monkeypatch.setattr(redriving, "ROUND_SECONDS", 0.05)
    post.sql("ALTER TABLE {p}redrive_pace RENAME TO elsewhere")
    how: dict[str, Any] = {"redrive_codes": "busy", "redrive_after_seconds": 0}
    async with post.relay(**how) as relay:
        await eventually_async(lambda: len(post.of("redrive.failed")) > 1)
        await post.put(note("fresh", 7))
        await eventually_async(lambda: len(post.broker.messages) == 1)
        assert relay.health().healthy


@pytest.mark.parametrize("kind", [RelaySettings, ConsumerSettings])
def test_the_settings_of_a_rule(kind: Any) -> None:
    assert kind().redrive() is None
    rule = kind(redrive_codes="busy, http_503", redrive_times=1).redrive()
    assert rule == RedriveRule(("busy", "http_503"), 900, 10, 1)
    with pytest.raises(ConfigurationError, match="postroom dead retry"):
        kind(redrive_codes="busy, suspected_killer")
    with pytest.raises(ConfigurationError, match="redrive_per_minute must be above zero"):
        kind(redrive_per_minute=0)
