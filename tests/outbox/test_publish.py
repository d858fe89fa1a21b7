"""The publishing suite: every kind of connection, on every database it speaks, in the ways users
set it up."""

import datetime as dt
import json
import os
from collections.abc import AsyncIterator

import pytest

import doors
import doors_handed
from doors import Door, Open
from postroom import Draft, Outbox, Published
from postroom.databases.kinds import KINDS, WRAPPERS, bare, kind_of
from postroom.errors import (
    CommitUnknown,
    IdReused,
    InvalidMessage,
    MessageTooLarge,
    WouldCommitAlone,
    WrongCall,
)
from postroom.messages import lane_of
from stages import Stage, Stages

MOMENT = dt.datetime(2031, 3, 30, 1, 59, 59, 999_999, tzinfo=dt.UTC)
MOMENT_US = 1_932_602_399_999_999
outbox = Outbox(routes={"order.*": "orders"})
DOORS = [*doors.DOORS, *doors_handed.HANDED_DOORS]

each_door = pytest.mark.parametrize("door", DOORS, ids=str)
one_door_a_kind = pytest.mark.parametrize(
    "door", {(d.kind, d.database): d for d in DOORS}.values(), ids=str
)


# SQLAlchemy's AUTOCOMMIT has no transactions of its own, DBUtils wants to be told of them, and
# Django knows of none but its blocks.
WITHOUT_BEGIN = (
    doors.session,
    doors.async_session,
    doors.core,
    doors.async_core,
    doors.django_connection,
    doors_handed.flask_session,
    doors_handed.sqlmodel_session,
    doors_handed.sqlmodel_async_session,
    doors_handed.dbutils,
)


@pytest.fixture
def stage(door: Door, stages: Stages) -> Stage:
    return stages[door.database]


@pytest.fixture
async def opened(door: Door, stage: Stage) -> AsyncIterator[Open]:
    async with door.open(stage.url) as opened:
        yield opened


def test_every_kind_is_in_the_suite() -> None:
    wrappers = {f"{library}.{cls}" for library, cls in WRAPPERS}
    assert {door.kind for door in DOORS} == {kind.name for kind in KINDS} | wrappers


@each_door
async def test_a_message_is_committed_with_the_change(opened: Open, stage: Stage) -> None:
    await opened.execute("INSERT INTO thing VALUES ('a')")
    published = await opened.publish(
        outbox,
        {"name": "Zoë 🚀", "total": 12.5},
        type="order.placed",
        key="k-1",
        aggregate_type="order",
        aggregate_id="17",
        headers={"traceparent": "00-1-2-01", "note": "a'b\\%s"},
        expires_at=MOMENT,
    )
    assert stage.messages() == []
    await opened.commit()
    assert stage.things() == ["a"]
    payload = '{"name":"Zoë 🚀","total":12.5}'.encode()
    headers = '{"traceparent":"00-1-2-01","note":"a\'b\\\\%s"}'
    assert stage.messages() == [
        {
            "id": published.id,
            "topic": "orders",
            "key": "k-1",
            "type": "order.placed",
            "aggregate_type": "order",
            "aggregate_id": "17",
            "content_type": "application/json",
            "headers": headers,
            "payload": payload,
            "size": len(payload) + len(headers),
            "lane": lane_of("orders", "k-1", published.id),
            "expires_us": MOMENT_US,
        }
    ]
    assert not published.duplicate


@each_door
async def test_a_rollback_leaves_nothing(opened: Open, stage: Stage) -> None:
    await opened.execute("INSERT INTO thing VALUES ('a')")
    await opened.publish(outbox, {}, type="t", dedup_key="d", deliver_at=MOMENT)
    await opened.publish(outbox, {}, type="t", key="k", serialize_key=True)
    await opened.rollback()
    assert stage.things() == []
    assert stage.messages() == []
    assert stage.messages("delayed") == []
    assert stage.query("SELECT * FROM {p}dedup") == []
    await opened.publish(outbox, b"after", type="t", dedup_key="d")
    await opened.commit()
    assert stage.payloads() == [b"after"]


@each_door
async def test_a_fresh_connection_begins_with_the_message(opened: Open, stage: Stage) -> None:
    await opened.publish(outbox, b"1", type="t")
    assert stage.payloads() == []
    await opened.commit()
    assert stage.payloads() == [b"1"]


@each_door
async def test_many_at_once_keep_call_order(opened: Open, stage: Stage) -> None:
    drafts = [
        Draft(
            payload=b"%d\x00\xff\xfe" % n,
            type="t",
            topic=f"topic-{n % 3}",
            key=None if n % 4 == 0 else f"key {n % 7}",
            headers={"n": str(n)} if n % 2 else {},
            deliver_at=MOMENT if n % 10 == 9 else None,
            expires_at=MOMENT if n % 5 == 0 else None,
        )
        for n in range(50)
    ]
    published = await opened.publish_many(outbox, drafts)
    await opened.commit()
    assert len({each.id for each in published}) == 50
    at_once = [n for n in range(50) if n % 10 != 9]
    messages = stage.messages()
    assert [m["id"] for m in messages] == [published[n].id for n in at_once]
    assert [m["payload"] for m in messages] == [drafts[n].payload for n in at_once]
    assert [m["key"] for m in messages] == [drafts[n].key for n in at_once]
    assert [m["expires_us"] for m in messages] == [None if n % 5 else MOMENT_US for n in at_once]
    delayed = stage.messages("delayed")
    assert {m["id"] for m in delayed} == {published[n].id for n in range(9, 50, 10)}
    assert {m["deliver_us"] for m in delayed} == {MOMENT_US}
    assert await opened.publish_many(outbox, []) == []


@each_door
async def test_a_delayed_message_waits_in_its_own_table(opened: Open, stage: Stage) -> None:
    published = await opened.publish(outbox, b"x", type="t", deliver_at=MOMENT, expires_at=MOMENT)
    await opened.commit()
    assert stage.messages() == []
    (row,) = stage.messages("delayed")
    assert (row["id"], row["deliver_us"], row["expires_us"]) == (
        published.id,
        MOMENT_US,
        MOMENT_US,
    )


@each_door
async def test_a_savepoint_takes_its_messages_along(opened: Open, stage: Stage) -> None:
    await opened.execute("INSERT INTO thing VALUES ('outer')")
    await opened.publish(outbox, b"outer", type="t")
    savepoint = await opened.savepoint()
    await opened.execute("INSERT INTO thing VALUES ('inner')")
    await opened.publish(outbox, b"inner", type="t", dedup_key="d")
    await savepoint.rollback()
    await opened.publish(outbox, b"between", type="t")
    savepoint = await opened.savepoint()
    await opened.execute("INSERT INTO thing VALUES ('kept')")
    await opened.publish(outbox, b"kept", type="t", dedup_key="d")
    await savepoint.release()
    await opened.commit()
    assert stage.things() == ["kept", "outer"]
    assert stage.payloads() == [b"outer", b"between", b"kept"]


@each_door
async def test_a_taken_dedup_key_is_a_value(opened: Open, stage: Stage) -> None:
    first = await opened.publish(outbox, b"first", type="t", dedup_key="Order 1")
    await opened.commit()
    assert not first.duplicate
    await opened.execute("INSERT INTO thing VALUES ('second')")
    second = await opened.publish(outbox, b"second", type="t", dedup_key="Order 1")
    other_case = await opened.publish(outbox, b"case", type="t", dedup_key="order 1")
    await opened.commit()
    assert second.duplicate
    assert second.id == first.id
    assert not other_case.duplicate
    assert stage.things() == ["second"]
    assert stage.payloads() == [b"first", b"case"]


@each_door
async def test_dedup_keys_in_one_call(opened: Open, stage: Stage) -> None:
    taken = await opened.publish(outbox, b"0", type="t", dedup_key="taken")
    await opened.commit()
    published = await opened.publish_many(
        outbox,
        [
            Draft(payload=b"1", type="t", dedup_key="z"),
            Draft(payload=b"2", type="t"),
            Draft(payload=b"3", type="t", dedup_key="a"),
            Draft(payload=b"4", type="t", dedup_key="z"),
            Draft(payload=b"5", type="t", dedup_key="taken"),
            Draft(payload=b"6", type="t", dedup_key="b", deliver_at=MOMENT),
        ],
    )
    await opened.commit()
    assert [each.duplicate for each in published] == [False, False, False, True, True, False]
    assert published[3].id == published[0].id
    assert published[4].id == taken.id
    assert stage.payloads() == [b"0", b"1", b"2", b"3"]
    assert [m["payload"] for m in stage.messages("delayed")] == [b"6"]


@each_door
async def test_the_same_chosen_id_and_dedup_key_are_a_duplicate(opened: Open, stage: Stage) -> None:
    id = "018f0000-0000-7000-8000-00000000abcd"
    first = await opened.publish(outbox, b"1", type="t", id=id, dedup_key="d")
    await opened.commit()
    again = await opened.publish(outbox, b"1", type="t", id=id.upper(), dedup_key="d")
    await opened.commit()
    assert (first.id, first.duplicate, again.id, again.duplicate) == (id, False, id, True)
    assert stage.payloads() == [b"1"]


async def published_and_committed(opened: Open, drafts: list[Draft]) -> None:
    """A session writes what it has queued with its commit."""
    await opened.publish_many(outbox, drafts)
    await opened.commit()


ID = "018f0000-0000-7000-8000-00000000abcd"


@each_door
async def test_a_chosen_id_stands_for_one_content(opened: Open, stage: Stage) -> None:
    first = await opened.publish(outbox, b"1", type="t", key="k", id=ID, headers={"trace": "1"})
    again = await opened.publish(outbox, b"1", type="t", key="k", id=ID.upper())
    await opened.commit()
    late = await opened.publish(outbox, b"1", type="t", key="k", id=ID)
    await opened.commit()
    assert (first.id, first.duplicate) == (ID, False)
    assert (again.id, again.duplicate, late.id, late.duplicate) == (ID, True, ID, True)
    for other in (
        Draft(payload=b"2", type="t", key="k", id=ID),
        Draft(payload=b"1", type="u", key="k", id=ID),
        Draft(payload=b"1", type="t", key="l", id=ID),
        Draft(payload=b"1", type="t", key="k", id=ID, topic="elsewhere"),
        Draft(payload=b"1", type="t", key="k", id=ID, content_type="text/plain"),
        Draft(payload=b"1", type="t", key="k", id=ID, aggregate_id="a"),
    ):
        with pytest.raises(IdReused, match=f"another message has the id {ID}"):
            await published_and_committed(opened, [other])
        await opened.rollback()
    assert stage.payloads() == [b"1"]


@each_door
async def test_a_refused_call_claims_no_id(opened: Open, stage: Stage) -> None:
    """The transaction may continue, and publish the other message of the call alone."""
    await opened.publish(outbox, b"1", type="t", id=ID)
    await opened.commit()
    fresh = Draft(payload=b"2", type="t", id="018f0000-0000-7000-8000-00000000abce", dedup_key="d")
    clash = Draft(payload=b"3", type="t", id=ID)
    with pytest.raises(IdReused):
        await published_and_committed(opened, [fresh, clash])
    if kind_of(bare(opened.tx, to_write=False)).is_session:  # refuses to commit after an error
        await opened.rollback()
    (published,) = await opened.publish_many(outbox, [fresh])
    await opened.commit()
    assert not published.duplicate
    assert stage.payloads() == [b"1", b"2"]


@each_door
async def test_one_id_twice_in_a_call(opened: Open, stage: Stage) -> None:
    same = [Draft(payload=b"1", type="t", id=ID), Draft(payload=b"1", type="t", id=ID)]
    published = await opened.publish_many(outbox, same)
    await opened.commit()
    assert [each.duplicate for each in published] == [False, True]
    other = "018f0000-0000-7000-8000-00000000abce"
    clash = [Draft(payload=b"1", type="t", id=other), Draft(payload=b"2", type="t", id=other)]
    with pytest.raises(IdReused):
        await published_and_committed(opened, clash)
    await opened.rollback()
    assert stage.payloads() == [b"1"]


@each_door
async def test_keys_are_serialised_where_asked(opened: Open, stage: Stage) -> None:
    drafts = [Draft(payload=b"%d" % n, type="t", key=f"ключ {n % 3}") for n in range(6)]
    for _ in range(2):  # the second time the lock rows are there already
        await opened.publish_many(outbox, drafts, serialize_key=True)
        await opened.publish(outbox, b"6", type="t", key="ключ 1", serialize_key=True)
        await opened.commit()
    assert stage.payloads() == [b"0", b"1", b"2", b"3", b"4", b"5", b"6"] * 2


NASTY = {
    "nul": b"\x00",
    "all bytes": bytes(range(256)),
    "not utf-8": b"\xff\xfe\x00\xc3\x28",
    "quotes": b"'; DROP TABLE thing; -- \\' \\\\ %s %% ? $1 :name \"",
    "empty": b"",
    "text": {"nul": "\x00", "emoji": "👩\u200d👩\u200d👧", "line": "\u2028", "rtl": "\u202e"},
    "numbers": [2**53 + 1, -(2**63), 10**40, -0.0, 1e308, 5e-324, 0.1],
    "deep": [[[[[[{"a": [{}]}]]]]]],
    "keys": {"": 1, "a\x00b": 2, "$ne": 3, "é": 4, "e\u0301": 5},
}


@each_door
async def test_payloads_come_back_byte_for_byte(opened: Open, stage: Stage) -> None:
    blobs = [os.urandom(n) for n in (1, 100, 70_000)]
    for payload in [*NASTY.values(), *blobs]:
        await opened.publish(outbox, payload, type="t", headers={"x": "größer 😀"})
    many = [Draft(payload=payload, type="t") for payload in [*NASTY.values(), *blobs]]
    await opened.publish_many(outbox, many)
    await opened.commit()
    stored = stage.messages()
    wanted = [*NASTY.values(), *blobs] * 2
    for row, payload in zip(stored, wanted, strict=True):
        assert row["headers"] in (None, '{"x":"größer 😀"}')
        if isinstance(payload, bytes):
            assert row["payload"] == payload
            assert row["content_type"] == "application/octet-stream"
        else:
            assert json.loads(row["payload"]) == payload
            assert repr(json.loads(row["payload"])) == repr(payload)


@each_door
async def test_names_that_look_alike_stay_apart(opened: Open, stage: Stage) -> None:
    keys = ["a", "A", "a ", "ä", "a\u0308", "%s", "?", "$1", ":x", "'", "\\", "😀" * 255]
    await opened.publish_many(outbox, [Draft(payload=b"", type="t", key=key) for key in keys])
    await opened.commit()
    assert [row["key"] for row in stage.messages()] == keys


@each_door
async def test_a_refused_message_leaves_the_transaction_as_it_was(
    opened: Open, stage: Stage
) -> None:
    await opened.execute("INSERT INTO thing VALUES ('a')")
    small = Outbox(max_bytes=10)
    await opened.publish(small, b"0123456789", type="t")
    with pytest.raises(MessageTooLarge, match=r"11 bytes, the limit is 10: .*Outbox\(max_bytes"):
        await opened.publish(small, b"01234567890", type="t")
    with pytest.raises(InvalidMessage, match="NaN and Infinity are not JSON"):
        await opened.publish(outbox, {"x": float("nan")}, type="t")
    with pytest.raises(InvalidMessage, match="an object is not JSON"):
        await opened.publish(outbox, {"x": object()}, type="t")
    with pytest.raises(InvalidMessage, match=r"deliver_at must be a datetime with a time zone"):
        await opened.publish(outbox, b"", type="t", deliver_at=dt.datetime(2030, 1, 1))
    with pytest.raises(InvalidMessage, match="bad topic 'a b'"):
        await opened.publish(outbox, b"", type="t", topic="a b")
    with pytest.raises(InvalidMessage, match="serialize_key needs a key"):
        await opened.publish(outbox, b"", type="t", serialize_key=True)
    with pytest.raises(InvalidMessage, match=r"pass type=\.\.\., or declare its class"):
        await opened.publish(outbox, {"a": 1})
    with pytest.raises(InvalidMessage, match="NaN"):
        await opened.publish_many(
            outbox, [Draft(payload=b"", type="t"), Draft(payload=[float("inf")], type="t")]
        )
    await opened.commit()
    assert stage.things() == ["a"]
    assert stage.payloads() == [b"0123456789"]


@each_door
async def test_was_committed(opened: Open, stage: Stage) -> None:
    written = await opened.publish(outbox, b"", type="t")
    later = await opened.publish(outbox, b"", type="t", deliver_at=MOMENT)
    await opened.commit()
    lost = await opened.publish(outbox, b"", type="t")
    await opened.rollback()
    assert await opened.was_committed(outbox, written)
    assert await opened.was_committed(outbox, later.id.upper())
    assert not await opened.was_committed(outbox, lost)
    await opened.rollback()
    stage.query("INSERT INTO {p}meta VALUES ('keep_delivered_seconds', '0')")
    assert await opened.was_committed(outbox, written)
    with pytest.raises(CommitUnknown, match="Set keep_delivered"):
        await opened.was_committed(outbox, lost)
    with pytest.raises(InvalidMessage, match="an id is a UUID, not 'x'"):
        await opened.was_committed(outbox, "x")
    await opened.rollback()


@one_door_a_kind
async def test_was_committed_looks_everywhere_and_needs_no_transaction(
    door: Door, stage: Stage
) -> None:
    async with door.open(stage.url, alone=True) as opened:
        for n, table in enumerate(("archive", "held", "dead_letter")):
            id = f"018f0000-0000-7000-8000-00000000000{n}"
            assert not await opened.was_committed(outbox, id)
            values = {"id": id, "lane": 1, "position": 1, "topic": "t", "type": "t", "size": 0}
            values |= {"content_type": "t", "payload": b"", "created_at": 0, "redrives": 0}
            values |= {"attempts": 1}
            moment = 0 if door.database == "sqlite" else "2030-01-01"
            values["created_at"] = moment
            if table == "archive":
                values |= {"day": "2030-01-01", "delivered_at": moment}
            if table == "dead_letter":
                values |= {"source": "s", "state": "dead", "holds_key": False, "error_code": "e"}
                values |= {"error": "e", "history": "[]", "died_at": moment}
            marks = ", ".join(["%s"] * len(values))
            stage.query(
                f"INSERT INTO {{p}}{table} ({', '.join(values)}) VALUES ({marks})",
                *values.values(),
            )
            assert await opened.was_committed(outbox, id)


REMEDIES = {
    "asyncpg": "async with connection.transaction",
    "psycopg": "with connection.transaction",
    "psycopg2": "with connection:",
    "sqlalchemy": "isolation_level='AUTOCOMMIT'",
    "sqlite3": "execute BEGIN first",
    "aiosqlite": "execute BEGIN first",
    "django": "with transaction.atomic(using='door_",
}


@each_door
async def test_refused_where_it_would_commit_by_itself(door: Door, stage: Stage) -> None:
    async with door.open(stage.url, alone=True) as opened:
        remedy = REMEDIES.get(kind_of(bare(opened.tx, to_write=False)).library, "connection.begin")
        if door.kind.startswith("dbutils"):
            remedy = "connection.begin"
        with pytest.raises(WouldCommitAlone) as refused:
            await opened.publish(outbox, b"", type="t")
        assert remedy in str(refused.value)
    assert stage.messages() == []


@pytest.mark.parametrize("door", [d for d in DOORS if d.opener not in WITHOUT_BEGIN], ids=str)
async def test_welcome_once_a_transaction_is_open(door: Door, stage: Stage) -> None:
    """Autocommit is no reason to refuse: what counts is whether this INSERT would commit."""
    begin = "BEGIN" if door.database != "mariadb" else "START TRANSACTION"
    async with door.open(stage.url, alone=True) as opened:
        await opened.execute(begin)
        await opened.publish(outbox, b"no", type="t")
        await opened.execute("ROLLBACK")
        await opened.execute(begin)
        await opened.publish(outbox, b"yes", type="t")
        await opened.execute("COMMIT")
    assert stage.payloads() == [b"yes"]


@each_door
async def test_the_wrong_call_names_the_right_one(opened: Open, stage: Stage) -> None:
    if isinstance(opened, doors.Threaded):  # Django's, and this is asynchronous code
        for call in (outbox.publish, outbox.publish_async):
            with pytest.raises(WrongCall, match=r"await sync_to_async\(place_order\)"):
                await doors.answer(call(opened.tx, b"", type="t"))
        return
    if not opened.is_async:
        published = await outbox.publish_async(opened.tx, b"1", type="t")
        (other,) = await outbox.publish_many_async(opened.tx, [Draft(payload=b"2", type="t")])
        await opened.commit()
        assert await outbox.was_committed_async(opened.tx, published)
        assert await outbox.was_committed_async(opened.tx, other)
        return
    with pytest.raises(WrongCall, match=r"await outbox\.was_committed_async"):
        outbox.was_committed(opened.tx, "018f0000-0000-7000-8000-000000000000")
    if "ession" in type(opened.tx).__name__:
        return
    with pytest.raises(WrongCall, match=r"await outbox\.publish_async"):
        outbox.publish(opened.tx, b"", type="t")
    with pytest.raises(WrongCall, match=r"await outbox\.publish_async"):
        outbox.publish_many(opened.tx, [Draft(payload=b"", type="t")])


async def test_published_may_be_awaited() -> None:
    published = Published("x")
    assert await published is published
