"""`postroom verify`: the equation holds, and each planted defect is found, on every database."""

import asyncio
import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import receivers
from commands import Here
from house_tools import House, said

from postroom.messages import new_id

BROKER = ("--broker", "call:receivers:refuse_poison", "--rebind")


@pytest.fixture(autouse=True)
def _forget() -> None:
    receivers.received.clear()


def url(house: House) -> tuple[str, str]:
    return ("--database", house.url)


def relay(here: Here, house: House, *options: str) -> None:
    done = here("relay", "--once", *url(house), *BROKER, *options)
    assert done.returncode == 0, done.stderr


def a_day(here: Here, house: House) -> dict[str, str]:
    """One message in each state there is; returns their ids by the state."""
    ids = {
        "delivered": house.publish("fine", key="a"),
        "dead": house.publish("poison", key="b"),
        "held": house.publish("behind", key="b"),
        "discarded": house.publish("poison", key="c"),
        "resolved": house.publish("poison", key=None),
    }
    relay(here, house)
    said(here, "dead", "discard", ids["discarded"], "--reason", "nobody needs it", *url(house))
    said(here, "dead", "retry", ids["resolved"], *url(house))
    done = here("relay", "--once", *url(house), "--broker", "call:receivers:take", "--rebind")
    assert done.returncode == 0
    ids["pending"] = house.publish("new", key="d")
    ids["delayed"] = house.publish("later", key="e", delay_seconds=3600)
    return ids


def test_everything_is_counted_where_it_is(here: Here, house: House) -> None:
    a_day(here, house)
    report = said(here, "verify", *url(house))
    assert report["ok"]
    assert report["findings"] == []
    assert report["counts"] == {
        "pending": 1, "delayed": 1, "held": 1, "held_by_dead": 1, "delivered": 2, "dead": 1,
        "queued": 0, "resolved": 1, "discarded": 1, "expired": 0,
    }  # fmt: skip
    assert report["balance"] is None
    assert report["kept_seconds"] == 7 * 86_400
    people = here("verify", *url(house))
    assert people.returncode == 0
    assert "Nothing is wrong." in people.stdout
    assert "cannot be told" in people.stdout


def test_the_equation_of_a_file(here: Here, house: House, tmp_path: Path) -> None:
    ids = a_day(here, house)
    lost, old = new_id(), "01800000-0000-7000-8000-000000000001"  # of the year 2022
    file = tmp_path / "ids.txt"
    file.write_text("# orders\n\n" + "\n".join([*ids.values(), ids["held"].upper(), old]))
    report = said(here, "verify", "--committed", str(file), *url(house))
    balance = report["balance"]
    assert report["ok"]
    assert (balance["committed"], balance["repeated"]) == (8, 1)
    assert (balance["missing"], balance["untold"], balance["unknown"]) == (0, 1, 0)
    assert {place for place, count in balance["places"].items() if count} == {
        "delivered", "dead", "held", "discarded", "pending", "delayed"
    }  # fmt: skip
    assert balance["places"]["delivered"] == 2

    with file.open("a") as more:
        more.write(f"\n{lost}\n")
    report = said(here, "verify", "--committed", str(file), *url(house), code=1)
    assert not report["ok"]
    assert report["balance"]["missing_ids"] == [lost]
    people = here("verify", "--committed", str(file), *url(house))
    assert people.returncode == 1
    assert "9 committed = 2 delivered + 1 pending" in people.stdout
    assert "1 missing" in people.stdout
    assert lost in people.stdout


def test_the_equation_of_a_query_runs_in_the_same_snapshot(here: Here, house: House) -> None:
    ids = a_day(here, house)
    kind = {"postgresql": "uuid", "mariadb": "char(36)", "sqlite": "text"}[house.dialect]
    house.sql(f"CREATE TABLE orders (n int, message_id {kind})")
    for id in ids.values():
        house.sql("INSERT INTO orders VALUES (1, %s)", id)
    query = ("--committed-sql", "SELECT message_id FROM orders;")
    report = said(here, "verify", *query, "--invented", *url(house))
    assert report["ok"]
    assert report["balance"]["committed"] == 7

    stranger = house.publish("not of orders", key="z")
    report = said(here, "verify", *query, *url(house))
    assert (report["ok"], report["balance"]["unknown"]) == (True, 1)
    report = said(here, "verify", *query, "--invented", *url(house), code=1)
    assert report["balance"]["unknown_ids"] == [stranger]
    house.sql("INSERT INTO orders VALUES (2, %s)", new_id())
    report = said(here, "verify", *query, *url(house), code=1)
    assert [finding["check"] for finding in report["findings"]] == ["missing"]


def test_ids_as_sixteen_bytes(here: Here, house: House) -> None:
    kind = {"postgresql": "bytea", "mariadb": "binary(16)", "sqlite": "blob"}[house.dialect]
    id = house.publish("x")
    house.sql(f"CREATE TABLE orders (message_id {kind})")
    house.sql("INSERT INTO orders VALUES (%s)", uuid.UUID(id).bytes)
    query = ("--committed-sql", "SELECT message_id FROM orders")
    assert said(here, "verify", *query, *url(house))["balance"]["places"]["pending"] == 1


def test_where_delivered_ones_are_not_kept_it_says_that_it_cannot_know(
    here: Here, house: House, tmp_path: Path
) -> None:
    id = house.publish("fine")
    relay(here, house, "--keep-delivered-seconds", "0")
    (tmp_path / "ids.txt").write_text(id)
    report = said(here, "verify", "--committed", str(tmp_path / "ids.txt"), *url(house))
    assert (report["balance"]["missing"], report["balance"]["untold"]) == (0, 1)
    people = here("verify", "--committed", str(tmp_path / "ids.txt"), *url(house))
    assert "1 that cannot be told" in people.stdout
    assert "delivered or lost cannot be told" in people.stdout


def test_what_was_pruned_by_hand_is_not_called_lost(
    here: Here, house: House, tmp_path: Path
) -> None:
    id = house.publish("fine")
    relay(here, house)
    if house.dialect == "postgresql":
        house.sql("DELETE FROM postroom.archive")
    else:
        house.sql("UPDATE {p}archive SET day = %s", "2020-01-01")
    (tmp_path / "ids.txt").write_text(id)
    committed = ("--committed", str(tmp_path / "ids.txt"))
    if house.dialect == "postgresql":
        assert said(here, "verify", *committed, *url(house), code=1)["balance"]["missing"] == 1
    house.sql("INSERT INTO {p}audit (who, what, subject) VALUES ('me', 'prune', %s)",
              "archive before 2099-01-01T00:00:00+00:00")  # fmt: skip
    house.sql("DELETE FROM {p}archive")
    assert said(here, "verify", *committed, *url(house))["balance"]["untold"] == 1


# ── defects ────────────────────────────────────────────────────────────────────────────────────


def _swap_lane(house: House) -> None:
    ((lane,),) = house.sql("SELECT lane FROM {p}outbox")
    house.sql("UPDATE {p}outbox SET lane = %s", (lane + 1) % 16)


def _stale_journal(house: House) -> None:
    house.sql(
        "INSERT INTO {p}lane_batch (lane, incarnation, batch, lo, hi, messages, alone, held)"
        " VALUES (3, 'gone', 1, 1000, 1010, 11, %s, %s)",
        False,
        False,
    )


def _own_lanes(house: House) -> None:
    house.sql("UPDATE {p}lane SET owner = 'someone', lease_until = %s", house.ago(-3600))
    house.publish("late", key="e", delay_seconds=-120)


def _copy_to_outbox(house: House, table: str) -> None:
    columns = (
        "lane, position, id, topic, {key}, type, content_type, payload, size, redrives, created_at"
    )
    override = "OVERRIDING SYSTEM VALUE" if house.dialect == "postgresql" else ""
    house.sql(f"INSERT INTO {{p}}outbox ({columns}) {override} SELECT {columns} FROM {{p}}{table}"
              " WHERE position = (SELECT min(position) FROM {p}held)")  # fmt: skip


def _second_letter(house: House) -> None:
    columns = (
        "source, lane, position, topic, {key}, type, content_type, payload, size, created_at,"
        " state, holds_key, error_code, error, attempts, history, died_at"
    )
    house.sql(
        f"INSERT INTO {{p}}dead_letter (id, {columns}) SELECT %s, {columns} FROM {{p}}dead_letter"
        " WHERE state = 'discarded'",
        new_id(),
    )


def _rewind(house: House) -> None:
    house.sql("UPDATE {p}held SET position = position + 1000000")
    house.sql("UPDATE {p}dead_letter SET position = position + 1000000")


DEFECTS: dict[str, tuple[set[str], Callable[[House], Any]]] = {
    "another lane": ({"lane_of_key"}, _swap_lane),
    "another size": ({"size"}, lambda h: h.sql("UPDATE {p}outbox SET size = size + 1")),
    "a lane row gone": ({"lanes"}, lambda h: h.sql("DELETE FROM {p}lane WHERE lane = 7")),
    "blocked without a letter": (
        {"blocked_alone"},
        lambda h: h.sql("DELETE FROM {p}dead_letter WHERE state = 'dead'"),
    ),
    "a letter that holds nothing": (
        {"letter_alone", "stuck_heads"},
        lambda h: h.sql("DELETE FROM {p}held WHERE blocked = %s", True),
    ),
    "queued without a message": (
        {"queued_alone"},
        lambda h: h.sql("UPDATE {p}dead_letter SET state = 'queued' WHERE state = 'discarded'"),
    ),
    "a head without its turn": (
        {"blocked_alone", "stuck_heads"},
        lambda h: (
            h.sql("UPDATE {p}held SET blocked = %s", False),
            h.sql("DELETE FROM {p}dead_letter WHERE state = 'dead'"),
            h.sql("UPDATE {p}held SET blocked = %s WHERE error_code IS NULL", True),
        ),
    ),
    "a follower that is armed": (
        {"armed_followers"},
        lambda h: h.sql("UPDATE {p}held SET next_attempt_at = %s WHERE error_code IS NULL",
                        h.ago(-60)),
    ),
    "an armed dead letter": (
        {"armed_followers"},
        lambda h: h.sql("UPDATE {p}held SET next_attempt_at = %s WHERE blocked = %s", h.ago(-60),
                        True),
    ),
    "two rows for one position": (
        {"two_places", "decided_and_pending"}, lambda h: _copy_to_outbox(h, "held")
    ),
    "two letters for one position": ({"two_letters"}, _second_letter),
    "one id for two contents": (
        {"reused_ids"},
        lambda h: h.sql("UPDATE {p}outbox SET id = (SELECT min(CAST(id AS CHAR(36)))"
                        " FROM {p}archive)" if h.dialect != "postgresql" else
                        "UPDATE {p}outbox SET id = (SELECT id FROM {p}archive LIMIT 1)"),
    ),
    "overdue while owned": ({"overdue"}, _own_lanes),
    "positions beyond the sequence": ({"positions"}, _rewind),
}  # fmt: skip


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_planted_defect_is_found(here: Here, house: House, defect: str) -> None:
    a_day(here, house)
    expected, plant = DEFECTS[defect]
    plant(house)
    report = said(here, "verify", *url(house), code=1)
    assert not report["ok"]
    assert {finding["check"] for finding in report["findings"]} == expected
    for finding in report["findings"]:
        assert finding["level"] == "wrong"
        assert finding["count"] >= 1
        assert finding["examples"]
        assert finding["remedy"]
    people = here("verify", *url(house))
    assert people.returncode == 1
    assert report["findings"][0]["text"].split(":")[0][:30] in people.stdout


def test_what_a_dead_worker_left_is_a_note(here: Here, house: House) -> None:
    a_day(here, house)
    _stale_journal(house)
    report = said(here, "verify", *url(house))
    assert [(f["check"], f["level"]) for f in report["findings"]] == [("stale_journal", "note")]


def test_a_stuck_key_is_mended(here: Here, house: House) -> None:
    stuck = house.publish("poison", key="b")
    behind = house.publish("behind", key="b")
    alone = house.publish("poison", key=None)
    relay(here, house)
    # As if a bug had taken the dead letters' blocks and forgotten their turns.
    house.sql("DELETE FROM {p}dead_letter")
    house.sql("UPDATE {p}held SET blocked = %s, next_attempt_at = NULL", False)
    found = said(here, "verify", *url(house), code=1)["findings"]
    (finding,) = [each for each in found if each["check"] == "stuck_heads"]
    assert [example["id"] for example in finding["examples"]] == [stuck]
    assert "postroom verify --mend" in finding["remedy"]

    report = said(here, "verify", "--mend", "--reason", "stuck", *url(house))
    assert (report["ok"], report["mended"]) == (True, 1)
    assert house.sql("SELECT what, subject, why FROM {p}audit") == [
        ("verify.mend", stuck, "stuck")
    ]  # fmt: skip
    done = here("relay", "--once", *url(house), "--broker", "call:receivers:take", "--rebind")
    assert done.returncode == 0
    arrived = [message.id for message in receivers.received]
    assert arrived == [stuck, behind]
    assert alone not in arrived
    assert said(here, "verify", "--mend", *url(house))["mended"] == 0


def test_many_rows_come_in_pages(
    here: Here, house: House, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from postroom.ops import committed, verify

    ids = [house.publish(str(n), key=f"k{n % 5}") for n in range(20)]
    relay(here, house)
    ids += [house.publish("poison", key=f"p{n}") for n in range(7)]
    relay(here, house)
    ids += [house.publish(str(n), key=None, delay_seconds=3600) for n in range(7)]
    ids += [house.publish(str(n), key=f"k{n % 3}") for n in range(13)]
    monkeypatch.setattr(verify, "ROWS", 2)
    monkeypatch.setattr(committed, "ROWS", 3)
    house.sql("CREATE TABLE orders (message_id char(36))")
    for id in ids:
        house.sql("INSERT INTO orders VALUES (%s)", id)
    file = tmp_path / "ids"
    file.write_text("\n".join(ids))
    for given in (("--committed", str(file)), ("--committed-sql", "SELECT message_id FROM orders")):
        report = said(here, "verify", *given, "--invented", *url(house))
        places = report["balance"]["places"]
        assert (places["delivered"], places["dead"], places["delayed"], places["pending"]) == (
            *(20, 7, 7, 13),
        )  # fmt: skip
        assert report["balance"]["committed"] == len(ids)


async def test_it_holds_beside_a_relay_at_work(house: House) -> None:
    """One snapshot: messages on their way from table to table are in exactly one of them."""
    from postroom.brokers import memory
    from postroom.ops.verify import Truth, verify
    from postroom.outbox.relay import Relay

    house.sql("CREATE TABLE orders (message_id char(36))")
    total = 300

    def publish() -> None:
        for n in range(total):
            id = house.publish(str(n), key=f"k{n % 7}")
            house.sql("INSERT INTO orders VALUES (%s)", id)

    broker = memory.broker(house.name)
    async with Relay(house.url, f"memory://{house.name}", lease_seconds=6, send_timeout_seconds=1):
        publishing = asyncio.create_task(asyncio.to_thread(publish))
        seen = []
        while not publishing.done() or not seen:
            truth = Truth(query="SELECT message_id FROM orders")
            report = await verify(house.url, truth)
            assert report.ok, json.dumps(report.document)
            seen.append(report.balance.committed if report.balance else 0)
        await publishing
    assert seen == sorted(seen)
    assert broker.messages


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("--committed", "nowhere.txt"), 2, "nowhere.txt"),
        (("--committed", "bad.txt"), 2, "line 2 of bad.txt"),
        (("--committed", "binary.txt"), 2, "not text"),
        (("--committed", "."), 2, "cannot be read"),
        (("--committed", "good.txt", "--committed-sql", "SELECT 1"), 2, "not both"),
        (("--invented",), 2, "--invented needs"),
        (("--mend", "--committed", "-"), 2, "--mend"),
        (("--committed-sql", "DELETE FROM postroom_outbox"), 2, "one SELECT"),
        (("--committed-sql", "SELECT 1; DROP TABLE x"), 2, "semicolon"),
        (("--committed-sql", "SELECT x FROM nowhere"), 2, "--committed-sql cannot be run"),
        (("--committed-sql", "SELECT 'x', 'y'"), 2, "one column"),
        (("--committed-sql", "SELECT 'x'"), 2, "no message id"),
        (("--committed-sql", "SELECT NULL"), 2, "IS NOT NULL"),
    ],
)
def test_wrong_input_is_one_sentence(
    here: Here, house: House, tmp_path: Path, arguments: tuple[str, ...], code: int, text: str
) -> None:
    id = house.publish("x")
    (tmp_path / "good.txt").write_text(id)
    (tmp_path / "bad.txt").write_text(f"{id}\nnonsense\n")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    done = here("verify", *arguments, *url(house))
    assert done.returncode == code, done.stderr
    assert text in done.stderr
    assert done.stderr.startswith("postroom: ")
    assert done.stderr.count("\n") == 1


def test_a_query_cannot_change_anything(here: Here, house: House) -> None:
    house.publish("x")
    query = {
        "postgresql": "WITH gone AS (DELETE FROM postroom.outbox RETURNING id) SELECT id FROM gone",
        "mariadb": "SELECT id FROM postroom_outbox FOR UPDATE",
        "sqlite": "WITH x AS (SELECT 1) DELETE FROM postroom_outbox RETURNING id",
    }[house.dialect]
    here("verify", "--committed-sql", query, *url(house))
    assert house.count("outbox") == 1
