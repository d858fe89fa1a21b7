"""The parsers of test traffic: a sweep is worth nothing if its requests are counted wrongly."""

import asyncio
import struct
from typing import Any

import asyncpg
import psycopg
import pymysql
import pytest

from doors import mysql_options
from lossy import Fault, LossyProxy
from servers import MariaDBServer, PostgresServer
from wires import MariaDBTalk, NatsTalk, PostgresTalk, Request, Talk, shortened


def message(tag: bytes, body: bytes) -> bytes:
    return tag + struct.pack("!i", len(body) + 4) + body


def packet(number: int, body: bytes) -> bytes:
    return len(body).to_bytes(3, "little") + bytes([number]) + body


GREETING = struct.pack("!ii", 8, 196608)
SELECT = message(b"P", b"one\0SELECT 1\0\0\0") + message(b"S", b"")
BIND = message(b"B", b"\0one\0") + message(b"E", b"\0\0\0\0\0") + message(b"S", b"")
PUBLISH = b"HPUB facts _INBOX.7 12 14\r\nNATS/1.0\r\n\r\nhi\r\n"

CONVERSATIONS: list[tuple[type[Talk], bytes, list[str]]] = [
    (PostgresTalk, GREETING + SELECT + BIND, ["greeting", "prepare SELECT ?", "SELECT ?"]),
    (
        PostgresTalk,
        GREETING + message(b"Q", b"COMMIT\0") + message(b"X", b""),
        ["greeting", "COMMIT"],
    ),
    (
        MariaDBTalk,
        packet(1, b"me") + packet(0, b"\x03COMMIT") + packet(0, b"\x01"),
        ["login", "COMMIT"],
    ),
    (NatsTalk, b"CONNECT {}\r\nPING\r\nPUB a 2\r\nhi\r\n" + PUBLISH, ["publish"]),
]


@pytest.mark.parametrize(("talk", "data", "names"), CONVERSATIONS)
def test_requests_are_found_however_they_are_cut(
    talk: type[Talk], data: bytes, names: list[str]
) -> None:
    for size in (1, 2, 7, len(data)):
        listener, found = talk(), []
        for start in range(0, len(data), size):
            found += [request.what for request in listener.requests(data[start : start + size])]
        assert found == names


def test_a_request_begins_where_the_last_one_ended() -> None:
    requests = list(PostgresTalk().requests(GREETING + SELECT + BIND))
    assert [(r.start, r.end) for r in requests] == [
        (0, 8),
        (8, 8 + len(SELECT)),
        (8 + len(SELECT), 8 + len(SELECT + BIND)),
    ]


def test_a_reply_of_postgresql_is_complete_when_the_server_is_ready() -> None:
    talk = PostgresTalk()
    done, ready = message(b"C", b"COMMIT\0"), message(b"Z", b"I")
    assert talk.reply(done + ready) == (len(done + ready), False)
    talk.expect(Request("COMMIT", 0, 0, b"Q"))
    assert talk.reply(done) == (0, False)
    assert talk.reply(ready[:3]) == (0, False)
    assert talk.reply(ready[3:]) == (0, True)


def test_an_acknowledgement_of_nats_is_known_by_its_subject() -> None:
    talk = NatsTalk()
    first, second = (b"MSG _INBOX.%d 1 2\r\n{}\r\n" % number for number in (6, 7))
    (request,) = talk.requests(PUBLISH)
    talk.expect(request)
    assert talk.reply(b"PONG\r\n" + first) == (len(first) + 6, False)
    assert talk.reply(first + second) == (len(first), True)


def test_a_statement_has_one_name_whatever_its_values() -> None:
    one = shortened(b"INSERT INTO t VALUES (1, 'it\\'s', _binary'x'),\n (NULL, 2, '')")
    assert one == "INSERT INTO t VALUES (?), (?)"


# ── With real servers ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("lost", [True, False])
def test_the_reply_to_a_commit_of_postgresql_is_lost(postgres: PostgresServer, lost: bool) -> None:
    with psycopg.connect(postgres.url, autocommit=True) as beside:
        beside.execute("DROP TABLE IF EXISTS lossy")
        beside.execute("CREATE TABLE lossy (id int)")

        async def insert(proxy: LossyProxy) -> None:
            connection: Any = await asyncpg.connect(proxy.url)
            try:
                async with connection.transaction():
                    await connection.execute("INSERT INTO lossy VALUES ($1)", 1)
            finally:
                connection.terminate()

        with LossyProxy(postgres.url) as proxy:
            fault = Fault("COMMIT;", 1, lost)
            proxy.begin([fault])
            with pytest.raises((asyncpg.PostgresConnectionError, asyncpg.InterfaceError)):
                asyncio.run(insert(proxy))
            assert fault.happened
        assert beside.execute("SELECT count(*) FROM lossy").fetchone() == (int(lost),)


@pytest.mark.parametrize("lost", [True, False])
def test_the_reply_to_a_commit_of_mariadb_is_lost(mariadb: MariaDBServer, lost: bool) -> None:
    def connect(url: str) -> Any:
        options = mysql_options(url)
        return pymysql.connect(database=options.pop("db"), **options)

    with connect(mariadb.url) as beside, beside.cursor() as looking:
        looking.execute("CREATE OR REPLACE TABLE lossy (id int)")
        with LossyProxy(mariadb.url) as proxy, connect(proxy.url) as client:
            fault = Fault("COMMIT", 1, lost)
            proxy.begin([fault])
            with client.cursor() as cursor:
                cursor.execute("INSERT INTO lossy VALUES (1)")
            with pytest.raises(pymysql.OperationalError):
                client.commit()
            assert fault.happened
        looking.execute("SELECT count(*) FROM lossy")
        assert looking.fetchone() == (int(lost),)
