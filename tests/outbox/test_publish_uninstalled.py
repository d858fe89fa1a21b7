"""Publishing where Postroom's tables are not: the driver's own error, and what to do about it."""

import traceback
import uuid

import pytest

from doors import DOORS, Door, Open
from postroom import Outbox
from postroom.errors import PostroomError

REMEDY = "Postroom's tables are not in this database; run `postroom db install`."
ONE_DOOR_A_KIND = {(door.kind, door.database): door for door in DOORS}.values()


@pytest.fixture
def empty_url(request: pytest.FixtureRequest, door: Door, tmp_path: object) -> str:
    if door.database == "sqlite":
        return f"sqlite:///{tmp_path}/empty.db"
    fixture = {"postgresql": "postgres", "mariadb": "mariadb"}[door.database]
    server = request.getfixturevalue(fixture)
    return str(server.create_database(f"empty_{uuid.uuid4().hex[:12]}"))


async def published_and_committed(opened: Open) -> None:
    """A session writes what it has queued with its commit."""
    await opened.publish(Outbox(), b"1", type="t")
    await opened.commit()


@pytest.mark.parametrize("door", ONE_DOOR_A_KIND, ids=str)
async def test_the_error_says_what_to_do(door: Door, empty_url: str) -> None:
    async with door.open(empty_url) as opened:
        await opened.execute("CREATE TABLE thing (name VARCHAR(100))")
        await opened.commit()
        await opened.execute("INSERT INTO thing VALUES ('a')")
        with pytest.raises(Exception, match=r"postroom[._]outbox") as raised:
            await published_and_committed(opened)
        await opened.rollback()
    assert not isinstance(raised.value, PostroomError)
    assert traceback.format_exception_only(raised.value)[-1].strip() == REMEDY
