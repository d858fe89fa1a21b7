"""What becomes of a test whose server is not to be had: a skip that says how, or a failure."""

import os
from collections import Counter
from collections.abc import Iterable
from typing import Any, NoReturn

import pytest

_MARK = "left out: "


class Unavailable(Exception):
    """This machine has no such server; the text says how to get one."""


def require_all() -> bool:
    """Whether every server must be had (`POSTROOM_REQUIRE=all`)."""
    return os.environ.get("POSTROOM_REQUIRE") == "all"


def leave_out(reason: str) -> NoReturn:
    """Skip the running test, or fail it where every server is required."""
    if require_all():
        pytest.fail(f"POSTROOM_REQUIRE=all, but {reason}", pytrace=False)
    pytest.skip(_MARK + reason)


def left_out(reports: Iterable[Any]) -> Counter[str]:
    """Count tests by the reason they were left out.

    It reads the reports, not memory of ours, because under pytest-xdist the skips happen in other
    processes and only their reports come home.
    """
    reasons: Counter[str] = Counter()
    for report in reports:
        if isinstance(report.longrepr, tuple):
            _, mark, reason = str(report.longrepr[2]).partition(_MARK)
            if mark:
                reasons[reason] += 1
    return reasons
