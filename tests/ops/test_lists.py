"""Lists fit a terminal of 80 columns, and every id can be copied from one."""

import asyncio
import json
import re
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from house_tools import House
from rich.console import Console as Terminal
from test_status import Screen

from helpers_messages import make_message
from postroom import Consumer, RetryPolicy
from postroom.brokers import memory
from postroom.brokers.base import Permanent
from postroom.ops.listing import listing
from postroom.outbox.relay import Relay

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
ERROR = "ValueError: the amount of the order must be positive, and it was -3 of SKU-4711-B"


@pytest.fixture(scope="module")
def filled(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[House, dict[str, list[str]]]]:
    """A database with something in every list; the ids that each list must show."""
    house = House(f"sqlite:///{tmp_path_factory.mktemp('lists')}/app.db")
    house.install()
    ids = asyncio.run(_fill(house))
    yield house, ids
    house.close()


async def _fill(house: House) -> dict[str, list[str]]:
    broker, name = memory.broker(house.name), f"memory://{house.name}"
    broker.fail(lambda m: b"poison" in m.payload, Permanent("refused_by_shop", ERROR), times=None)
    sent = [await asyncio.to_thread(house.publish, "poison", key=f"k{n}") for n in range(2)]
    await Relay(house.url, name).drain_once()
    how = {"topics": ["orders"], "retry": RetryPolicy(attempts=1), "gives": "session"}
    consumer = Consumer("billing", house.url, name, **how)  # type: ignore[arg-type]

    @consumer.on("order.placed.v1")
    async def bill(event: object, tx: object) -> None:
        raise ValueError(ERROR)

    orders = [make_message(b"{}", type="order.placed.v1", key=f"customer-{n}") for n in range(2)]
    await broker.send(orders)
    await consumer.drain_once()
    waiting = [await asyncio.to_thread(house.publish, "x", key=f"k{n}") for n in range(3)]
    jobs, keys = [str(uuid.uuid4()) for _ in range(2)], [str(uuid.uuid4()) for _ in range(2)]
    for job in jobs:
        house.sql(
            "INSERT INTO {p}job (id, kind, state, wish, total, queued, who, note)"
            " VALUES (%s, 'redrive', 'stopped', '{}', 3, 1, 'operator@a-long-host.example', %s)",
            job,
            "the canary was not delivered; look at it, then resume",
        )
    for key in keys:
        house.sql(
            "INSERT INTO {p}idempotency_key (scope, operation, key, fingerprint, mode, status,"
            " owner, expires_at, error)"
            " VALUES ('me', 'POST /orders', %s, 'f', 'external', 'indeterminate', '', %s, %s)",
            *(key, house.ago(-60), ERROR),
        )
        house.sql(
            "INSERT INTO {p}ledger (id, scope, key, digest, state, request, error_code)"
            " VALUES (%s, 'gateway', %s, 'd', 'unknown', %s, 'timeout')",
            *(str(uuid.uuid4()), key, b"{}"),
        )
    entries = [row[0] for row in house.sql("SELECT id FROM {p}ledger")]
    received = [message.id for message in orders]
    return {
        "dead list": sent + received, "inbox list": received, "inbox list --held": received,
        "messages list": waiting, "messages find --topic notes": waiting + sent, "jobs list": jobs,
        "keys list": keys, "ledger list": entries + keys, "keys-held list": sent, "lanes list": [],
        "prune --dry-run": [], "dead redrive --all --dry-run": [],
    }  # fmt: skip


LISTS = [
    "dead list", "inbox list", "inbox list --held", "messages list", "messages find --topic notes",
    "jobs list", "keys list", "ledger list", "keys-held list", "lanes list", "prune --dry-run",
    "dead redrive --all --dry-run",
]  # fmt: skip


@pytest.mark.parametrize("command", LISTS)
def test_a_list_fits_80_columns(filled: tuple[House, dict[str, list[str]]], command: str) -> None:
    house, ids = filled
    with closing(Screen(*command.split(), "--database", house.url, columns=80)) as terminal:
        assert terminal.end() == 0, terminal.text
        text = CONTROL.sub("", terminal.text.replace("\r\n", "\n"))
        lines = [line.rpartition("\r")[2] for line in text.split("\n")]
    assert lines
    assert max(map(len, lines)) <= 80, "\n".join(lines)
    for id in ids[command]:
        assert sum(id in line for line in lines) >= 1, f"{id} is torn:\n" + "\n".join(lines)
    if command == "keys-held list":  # a consumer's letter holds no key of the outbox
        assert not any(id in line for line in lines for id in ids["inbox list"])
    if command in ("dead list", "inbox list --held", "keys list"):  # not a column of scraps
        assert "SKU-4711-B" in "\n".join(lines)


def shown(columns: list[str], rows: list[list[object]], width: int) -> list[str]:
    terminal = Terminal(width=width, record=True, file=Path("/dev/null").open("w"))  # noqa: SIM115
    terminal.print(listing(columns, rows, width))
    return terminal.export_text().splitlines()


def test_a_wide_terminal_gets_a_table_and_a_narrow_one_blocks() -> None:
    columns = ["id", "state", "topic", "error"]
    rows: list[list[object]] = [
        [str(uuid.UUID(int=n)), "dead", "orders", f"{ERROR} {n}"] for n in range(2)
    ]
    wide = shown(columns, rows, 200)
    assert len(wide) == 3
    assert wide[0].split() == columns
    middle = shown(columns, rows, 100)
    assert middle[0].split() == columns, "an error wraps beside its id"
    narrow = shown(columns, rows, 60)
    assert narrow[0] == rows[0][0]
    assert narrow[-1] == "all: state dead, topic orders"


def test_what_all_rows_share_is_said_once_where_it_is_narrow() -> None:
    columns = ["id", "topic", "key", "source", "at"]
    rows: list[list[object]] = [
        [str(uuid.UUID(int=n)), "notifications.of.orders", f"k{n}", "outbox", "2026-11-15T12:00:00"]
        for n in range(3)
    ]
    assert len(shown(columns, rows, 200)) == 4
    narrow = shown(columns, rows, 90)
    assert narrow[0].split() == ["id", "key"]
    assert narrow[-1].startswith("all: topic notifications.of.orders, source outbox, at 2026")
    assert json.dumps(narrow).count("outbox") == 1
