"""`publish` distinguishes arguments in the wrong order from messages that cannot be sent."""

import dataclasses
import sqlite3
from contextlib import closing
from typing import Any

import pytest
from sqlalchemy.orm import Session

from postroom import Outbox, message
from postroom.errors import WrongCall


@message("mistake.v1")
@dataclasses.dataclass
class Mistake:
    n: int = 1


@pytest.mark.parametrize("wishes", [{}, {"type": "t"}], ids=["declared", "named"])
def test_the_session_comes_first(wishes: dict[str, Any]) -> None:
    with pytest.raises(WrongCall, match="a Session is not a message: the session or connection"):
        Outbox().publish(Mistake(), Session(), **wishes)
    with (
        closing(sqlite3.connect(":memory:")) as connection,
        pytest.raises(WrongCall, match=r"comes first, `publish\(session, message\)`"),
    ):
        Outbox().publish({"n": 1}, connection, **wishes)
