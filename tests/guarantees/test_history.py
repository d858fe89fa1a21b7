"""The judge is judged first: every promise broken on purpose must be found."""

from dataclasses import replace

import pytest
from history import Delivery, Fact, History, check

pytestmark = pytest.mark.guarantee

FACTS = [Fact(f"{key}{n}", key, n) for n in (1, 2, 3) for key in ("a", "b")]
ONE, OTHER = 11, 12


def good() -> History:
    """Two keys of three messages: five delivered, one of them twice, and one waits."""
    history = History(disturbed={ONE}, in_flight=2)
    history.commit(FACTS)
    history.deliveries = [
        Delivery("a1", "a", 1, 1, ONE),
        Delivery("b1", "b", 1, 1, ONE),
        Delivery("a1", "a", 1, 2, OTHER),
        Delivery("a2", "a", 2, 2, OTHER),
        Delivery("b2", "b", 2, 2, OTHER),
        Delivery("a3", "a", 3, 2, OTHER),
    ]
    history.pending = {"b3"}
    return history


def test_a_good_history_is_good() -> None:
    report = check(good())
    assert not report.violations
    assert report.duplicates == {ONE: 1}


@pytest.mark.parametrize("place", ["pending", "held", "dead"])
def test_a_message_may_wait_in_any_table(place: str) -> None:
    history = good()
    history.pending = set()
    assert [line[:7] for line in check(history).violations] == ["I1 lost"]
    setattr(history, place, {"b3"})
    assert not check(history).violations


def test_a_delivery_of_nothing_committed_is_a_ghost() -> None:
    history = good()
    history.deliveries.append(Delivery("z1", "z", 1, 1, ONE))
    assert check(history).violations == ["I2 ghost: z1"]


def test_a_row_of_nothing_committed_is_a_ghost() -> None:
    history = good()
    history.held = {"z1"}
    assert check(history).violations == ["I2 ghost: z1"]


def test_an_unanswered_commit_may_or_may_not_have_happened() -> None:
    history = good()
    history.unknown = {"z1": Fact("z1", "z", 1)}
    assert not check(history).violations
    history.deliveries.append(Delivery("z1", "z", 1, 1, ONE))
    assert not check(history).violations


def test_passing_an_earlier_message_is_found_whether_that_comes_later_or_never() -> None:
    history = good()
    first, second = history.deliveries[3], history.deliveries[5]
    history.deliveries[3], history.deliveries[5] = second, first
    assert [line[:8] for line in check(history).violations] == ["I3 order"]
    history = good()
    history.deliveries.append(Delivery("b3", "b", 3, 2, OTHER))
    history.deliveries.remove(Delivery("b2", "b", 2, 2, OTHER))
    history.held = {"b2"}
    assert [line[:8] for line in check(history).violations] == ["I3 order"]


def test_without_a_key_or_a_number_there_is_no_order() -> None:
    history = good()
    history.commit([Fact("x1", None, 1), Fact("x2", None, 2), Fact("late", "a", None)])
    history.deliveries.insert(0, Delivery("late", "a", 9, 1, ONE))
    history.deliveries += [Delivery("x2", None, 2, 2, OTHER), Delivery("x1", None, 1, 2, OTHER)]
    assert not check(history).violations


def test_a_duplicate_needs_somebody_to_whom_something_happened() -> None:
    history = replace(good(), disturbed=set())
    assert [line[:12] for line in check(history).violations] == ["I4 duplicate"]


def test_duplicates_are_bounded_by_what_may_be_in_flight() -> None:
    history = good()
    history.deliveries += [Delivery("a1", "a", 1, 3, OTHER), Delivery("b1", "b", 1, 3, OTHER)]
    report = check(history)
    assert report.duplicates == {ONE: 3}
    assert [line[:13] for line in report.violations] == ["I4 duplicates"]


def test_where_faults_are_noted_only_what_stood_in_a_table_may_come_again() -> None:
    assert not check(replace(good(), faults=[{"a1", "b3"}])).violations
    for faults in ([], [{"b1"}]):
        violations = check(replace(good(), faults=faults)).violations
        assert [line[:17] for line in violations] == ["I4 duplicates: a1"]
    history = replace(good(), faults=[{"a1"}])
    history.deliveries.append(Delivery("a1", "a", 1, 3, OTHER))
    assert "a1 came again 2 times, and stood in a table at 1 faults" in str(check(history))
    assert check(history).repeated == {"a1": 2}
