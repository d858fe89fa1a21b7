"""The relay's decisions, without a database or a clock."""

import datetime as dt
import json
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers_messages import make_message, make_messages
from postroom import signals
from postroom.brokers.base import (
    DELIVERED,
    Delivered,
    Outcome,
    Permanent,
    Transient,
    Unknown,
)
from postroom.config import Routes
from postroom.dead_letters.rules import HISTORY_ENTRIES
from postroom.errors import ConfigurationError
from postroom.messages import LANES, Message
from postroom.outbox.relay import Relay
from postroom.outbox.rules import (
    CAP_SECONDS,
    DEATHS_ALONE,
    ERROR_CHARACTERS,
    LATE_DEATHS,
    SETTLED,
    Breaker,
    Bury,
    Down,
    Hold,
    Leftover,
    Settled,
    Verdict,
    add_history,
    after_a_look,
    fence_number,
    learnt,
    may_be_sent,
    segments,
    verdict,
    waves,
)
from postroom.retry import DEFAULT_DELAYS_SECONDS, LONGEST_DELAY_SECONDS, RetryPolicy

WEEK_SECONDS = 7 * 24 * 3600


# ── Waves ──────────────────────────────────────────────────────────────────────────────────────


@given(st.lists(st.one_of(st.none(), st.integers(0, 4)), max_size=40))
def test_waves_hold_one_message_of_a_key_and_keep_its_order(keys: list[int | None]) -> None:
    batch = [
        make_message(b"%d" % n, key=None if key is None else f"k{key}", position=n + 1)
        for n, key in enumerate(keys)
    ]
    result = waves(batch)
    assert Counter(m.id for wave in result for m in wave) == Counter(m.id for m in batch)
    for wave in result:
        assert len({m.order for m in wave}) == len(wave)
    sent = [m for wave in result for m in wave]
    for order in {m.order for m in batch}:
        positions = [m.position for m in sent if m.order == order]
        assert positions == sorted(positions)
    longest = max(Counter(m.order for m in batch).values(), default=0)
    assert len(result) == longest


def test_one_key_in_two_topics_has_two_orders() -> None:
    assert len(waves([make_message(key="k", topic="a"), make_message(key="k", topic="b")])) == 1


# ── Suspects ───────────────────────────────────────────────────────────────────────────────────


def parts(batch: list[Message], leftovers: list[Leftover]) -> list[int]:
    return [len(segment.messages) for segment in segments(batch, leftovers)]


def test_without_a_death_a_batch_goes_as_one() -> None:
    assert parts(make_messages(500), []) == [500]
    assert parts([], []) == []


def test_suspicion_narrows_with_every_death() -> None:
    batch = make_messages(1000)
    crowd = Leftover(1, 1000, 1000, alone=False)
    sizes = parts(batch, [crowd])
    assert sizes[:-1] == [31] * 4 + [62] * 4 + [93] * 4 + [124] * 2
    part = Leftover(1, 31, 31, alone=False)
    assert parts(batch, [crowd, part])[:8] == [1] * 4 + [2] * 4
    assert not any(s.alone for s in segments(batch, [crowd, part]))
    one = Leftover(3, 3, 1, alone=False)
    suspects = segments(batch, [crowd, part, one])
    assert [[m.position for m in s.messages] for s in suspects if s.alone] == [[3]]
    assert [m.position for s in suspects for m in s.messages] == list(range(1, 1001))


def test_only_a_message_that_was_alone_is_blamed() -> None:
    batch = make_messages(5)
    crowd = [Leftover(1, 5, 5, alone=False)] * 10
    assert [s.deaths for s in segments(batch, crowd)] == [0] * 5
    alone = [Leftover(3, 3, 1, alone=True)] * DEATHS_ALONE
    assert [s.deaths for s in segments(batch, alone)] == [0, DEATHS_ALONE, 0]
    assert [s.blamed for s in segments(batch, alone)] == [False, True, False]
    assert parts(batch, alone) == [2, 1, 2]


def test_a_death_late_in_a_send_weighs_little() -> None:
    batch = make_messages(3)
    late = Leftover(2, 2, 1, alone=False)
    quick = Leftover(2, 2, 1, alone=True)

    def blamed(*leftovers: Leftover) -> bool:
        (suspect,) = (s for s in segments(batch, leftovers) if s.alone)
        return suspect.blamed

    assert not blamed(quick, quick, *[late] * (LATE_DEATHS - 1))
    assert blamed(quick, quick, quick, late)
    assert blamed(*[late] * LATE_DEATHS)


@given(st.integers(1, 400), st.data())
def test_a_killer_is_found_within_a_few_deaths(count: int, data: st.DataObject) -> None:
    killer = data.draw(st.integers(1, count))
    batch, leftovers, deaths = make_messages(count), list[Leftover](), 0
    while True:
        cut = segments(batch, leftovers)
        where = next(s for s in cut if s.messages[-1].position >= killer)
        if where.blamed:
            break
        # The parts before it are delivered, and the process dies with this part under way.
        lo, hi, deaths = where.messages[0].position, where.messages[-1].position, deaths + 1
        leftovers.append(Leftover(lo, hi, len(where.messages), where.alone))
        batch = [m for m in batch if m.position >= lo]
        assert deaths <= 8
    assert [m.position for m in where.messages] == [killer]


@given(
    st.integers(1, 200),
    st.lists(st.tuples(st.integers(1, 200), st.integers(0, 99), st.booleans()), max_size=5),
)
def test_segments_lose_nothing_and_keep_the_order(
    count: int, deaths: list[tuple[int, int, bool]]
) -> None:
    batch = make_messages(count)
    left = [Leftover(lo, lo + more, more + 1, alone) for lo, more, alone in deaths]
    cut = segments(batch, left)
    assert [m for segment in cut for m in segment.messages] == batch
    for segment in cut:
        assert not segment.alone or len(segment.messages) == 1


# ── Lanes and their owners ─────────────────────────────────────────────────────────────────────


@given(st.integers(0, LANES - 1), st.integers(0, 2**40), st.integers(0, LANES - 1))
def test_fence_numbers_differ(lane: int, epoch: int, other: int) -> None:
    assert fence_number(lane, epoch) != fence_number(other, epoch + 1)
    assert (fence_number(lane, epoch) == fence_number(other, epoch)) == (lane == other)


# ── Destination down ───────────────────────────────────────────────────────────────────────────


def test_a_breaker_opens_and_lets_one_probe_through_at_a_time() -> None:
    breaker = Breaker(first_seconds=1, probe_seconds=15)
    assert breaker.admits(0) is None
    assert breaker.failed(0, "down", "no", lambda: 1.0) == 1
    assert breaker.is_open(0.9)
    assert breaker.admits(0.9) == 0
    assert breaker.admits(1.1) == 1
    assert breaker.admits(1.2) == 0
    assert breaker.admits(16.0) == 0
    assert breaker.admits(16.2) == 1  # nobody ever told how the first probe ended


def test_others_wait_for_the_next_try_but_not_for_the_time_limit_of_a_probe() -> None:
    # Else a key that meets a probe under way stands aside for half a minute after a short outage.
    breaker = Breaker(first_seconds=1, probe_seconds=15)
    assert breaker.seconds_left(0) == 0
    breaker.failed(0, "down", "no", lambda: 1.0)
    assert breaker.seconds_left(0.25) == 0.75
    assert breaker.seconds_left(1.5) == 0
    breaker.admits(1.5)
    assert breaker.seconds_left(1.5) == 0


def test_back_off_grows_to_its_cap_and_only_by_probes() -> None:
    breaker = Breaker(first_seconds=1, cap_seconds=8)
    now, delays = 0.0, []
    for _ in range(40):
        delays.append(breaker.failed(now, "down", "no", lambda: 1.0))
        now += delays[-1] + 0.01
        assert breaker.admits(now) == 1
    assert delays == [1, 2, 4] + [8] * 37


def test_an_answered_ping_brings_one_probe_forward() -> None:
    breaker = Breaker(first_seconds=1, failures=9)
    breaker.answered(0)  # it is up, and stays so
    assert breaker.admits(0) is None
    assert breaker.failed(0, "down", "no", lambda: 1.0) == CAP_SECONDS <= 5
    breaker.answered(0.5)
    assert breaker.admits(0.5) == 1
    breaker.answered(0.6)  # the probe is in flight
    assert breaker.admits(0.6) == 0


def test_sends_that_fail_together_count_once() -> None:
    # Sixteen lanes have a send under way when a broker goes down: that is one outage.
    breaker = Breaker(first_seconds=1)
    for _ in range(16):
        breaker.failed(0.1, "down", "no", lambda: 1.0)
    assert breaker.retry_at is not None
    assert breaker.retry_at <= 1.2
    assert breaker.failures == 1


@given(st.integers(0, 60), st.floats(0, 1, exclude_max=True))
def test_jitter_stays_between_half_and_all_of_the_delay(failures: int, draw: float) -> None:
    breaker = Breaker(first_seconds=0.2, cap_seconds=30, failures=failures)
    full = min(0.2 * 2.0**failures, 30)
    assert full / 2 <= breaker.failed(0, "down", "no", lambda: draw) <= full


def test_it_ramps_up_after_an_outage() -> None:
    breaker = Breaker()
    breaker.failed(0, "down", "no", lambda: 0.5)
    assert breaker.admits(10) == 1
    assert breaker.succeeded(1)
    admitted = []
    while (allowance := breaker.admits(10)) is not None:
        admitted.append(allowance)
        assert not breaker.succeeded(allowance)
    assert admitted == [2, 4, 8, 16, 32, 64, 128, 256, 512]
    assert breaker.failures == 0


def test_a_little_traffic_does_not_prove_that_much_would_pass() -> None:
    breaker = Breaker(allowance=64)
    breaker.succeeded(3)
    assert breaker.admits(0) == 64


# ── Verdicts ───────────────────────────────────────────────────────────────────────────────────

TWO = RetryPolicy((5.0,), attempts=2)


@pytest.mark.parametrize(
    ("outcome", "attempts", "expected"),
    [
        (DELIVERED, 0, SETTLED),
        (DELIVERED, 9, SETTLED),
        (Transient("busy", "no"), 0, Hold(5, "busy", "no")),
        (Transient("busy", "no"), 1, Bury("busy", "no")),
        (Transient("busy", "no", retry_after_seconds=7), 0, Hold(7, "busy", "no")),
        (Transient("busy", "no", retry_after_seconds=7), 1, Bury("busy", "no")),
        (Permanent("bad", "never"), 0, Bury("bad", "never")),
        (Unknown("lost", "silence"), 0, Hold(5, "lost", "silence", doubt=True)),
        (Unknown("lost", "silence"), 1, Bury("lost", "outcome unknown: silence", doubt=True)),
        (Delivered("order 7"), 0, Settled("order 7")),
        (Transient("off", "no", down="broker"), 1, Down("broker", "off", "no")),
        (Transient("off", "no", down="topic"), 99, Down("topic", "off", "no")),
        (Unknown("off", "no", down="broker"), 99, Down("broker", "off", "no", doubt=True)),
    ],
)
def test_verdicts(outcome: Outcome, attempts: int, expected: Verdict) -> None:
    message = make_message()._replace(attempts=attempts)
    assert verdict(outcome, message, TWO, lambda: 0.5) == expected


@pytest.mark.parametrize(
    ("outcome", "sent", "expected"),
    [
        (Transient("busy", "no"), True, Bury("busy", "outcome unknown: no", doubt=True)),
        (Permanent("bad", "never"), True, Bury("bad", "never", doubt=True)),
        (Transient("off", "no", down="broker"), True, Down("broker", "off", "no", doubt=True)),
        (Unknown("off", "?"), False, Bury("off", "outcome unknown: ?", doubt=True)),
        (
            Unknown("off", "?", down="broker"),
            False,
            Hold(5, "off", "?", doubt=True, spent=False),
        ),
        (DELIVERED, False, SETTLED),
    ],
)
def test_verdicts_in_doubt(outcome: Outcome, sent: bool, expected: Verdict) -> None:
    message = make_message()._replace(attempts=1)
    assert verdict(outcome, message, TWO, lambda: 0.5, True, sent) == expected


# ── Doubt ──────────────────────────────────────────────────────────────────────────────────────

YES, NO = Delivered("booked"), Permanent("refused", "no")
ABSENT, NOBODY = Transient("not_arrived", "not there"), Unknown("still_unknown", "cannot tell")
BUSY, BAD, SILENCE = Transient("busy", "no"), Permanent("bad", "never"), Unknown("lost", "silence")


@pytest.mark.parametrize("found", [YES, NO, ABSENT, NOBODY, Unknown("off", "?", down="broker")])
def test_a_clear_answer_is_what_it_is(found: Outcome) -> None:
    assert learnt(found) == found
    assert may_be_sent(found) is (found == ABSENT)


@pytest.mark.parametrize(
    ("found", "worth"),
    [
        (Transient("busy", "ask later"), Unknown("busy", "ask later")),
        (Transient("off", "x", down="broker"), Unknown("off", "x", down="broker")),
        (Transient("not_arrived", "x", down="topic"), Unknown("not_arrived", "x", down="topic")),
    ],
)
def test_other_answers_say_nothing_of_the_message(found: Outcome, worth: Outcome) -> None:
    assert learnt(found) == worth
    assert not may_be_sent(learnt(found))


@pytest.mark.parametrize(
    ("sent", "answer", "outcome", "doubt"),
    [
        *((sent, YES, YES, False) for sent in (BUSY, BAD, SILENCE)),
        *((sent, NO, NO, False) for sent in (BUSY, BAD, SILENCE)),
        (BUSY, ABSENT, BUSY, False),
        (BAD, ABSENT, BAD, False),
        (SILENCE, ABSENT, Unknown("not_arrived", "not there"), True),
        (SILENCE, NOBODY, NOBODY, True),
        (SILENCE, Unknown("off", "?", down="broker"), Unknown("off", "?"), True),
        (BUSY, NOBODY, Unknown("busy", "no; asked again: cannot tell"), True),
        (BAD, NOBODY, Unknown("bad", "never; asked again: cannot tell"), True),
        *((DELIVERED, answer, DELIVERED, False) for answer in (ABSENT, NOBODY)),
    ],
)
def test_after_a_look(sent: Outcome, answer: Outcome, outcome: Outcome, doubt: bool) -> None:
    assert after_a_look(sent, answer) == (outcome, doubt)


# ── When to try again ──────────────────────────────────────────────────────────────────────────

delays = st.floats(0.001, LONGEST_DELAY_SECONDS)
policies = st.one_of(
    st.builds(
        RetryPolicy,
        st.lists(delays, min_size=1, max_size=8).map(tuple),
        st.integers(1, 12),
        st.booleans(),
    ),
    st.builds(
        RetryPolicy.exponential,
        initial_seconds=st.floats(0.01, 10),
        multiplier=st.floats(1, 100),
        cap_seconds=st.floats(10, 1e5),
        attempts=st.integers(1, 40),
    ),
)
wishes = st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True))


@given(policies, st.integers(1, 50), wishes, st.floats(0, 1, exclude_max=True))
def test_every_delay_is_bounded(
    policy: RetryPolicy, attempt: int, wish: float | None, draw: float
) -> None:
    delay = policy.delay_after(attempt, retry_after_seconds=wish, random=lambda: draw)
    assert (delay is None) == (attempt >= policy.attempts)
    if delay is not None:
        assert 0 < delay <= LONGEST_DELAY_SECONDS
        if wish is not None and not math.isnan(wish):
            assert delay >= min(wish, LONGEST_DELAY_SECONDS)
        else:
            assert delay <= max(policy.delays_seconds)


def test_six_attempts_use_the_first_five_delays() -> None:
    policy = RetryPolicy()
    answers = [policy.delay_after(attempt) for attempt in range(1, 8)]
    assert answers == [*DEFAULT_DELAYS_SECONDS[:5], None, None]
    assert answers[:5] == [5, 10, 20, 40, 80]


@given(st.integers(1, 30), st.floats(0, 1, exclude_max=True))
def test_jitter_stays_below_the_growing_cap(attempt: int, draw: float) -> None:
    policy = RetryPolicy.exponential(initial_seconds=1, cap_seconds=60, attempts=40)
    delay = policy.delay_after(attempt, random=lambda: draw)
    assert delay is not None
    assert delay <= min(2.0 ** (attempt - 1), 60)
    assert delay == pytest.approx(max(draw * min(2.0 ** (attempt - 1), 60), 0.001))


def test_jitter_spreads() -> None:
    policy = RetryPolicy.exponential(initial_seconds=1, cap_seconds=60)
    drawn = {policy.delay_after(3) for _ in range(50)}
    assert len(drawn) > 40


def test_a_receivers_wish_is_honoured_within_bounds() -> None:
    policy = RetryPolicy((5.0,))
    assert policy.delay_after(1, retry_after_seconds=60) == 60
    assert policy.delay_after(1, retry_after_seconds=1) == 5
    assert policy.delay_after(1, retry_after_seconds=1e12) == WEEK_SECONDS
    assert policy.delay_after(1, retry_after_seconds=float("nan")) == 5


@pytest.mark.parametrize(
    "wrong",
    [{"attempts": 0}, {"delays_seconds": ()}, {"delays_seconds": (0.0,)}],
)
def test_a_policy_that_cannot_work_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError):
        RetryPolicy(**wrong)  # type: ignore[arg-type]


# ── History ────────────────────────────────────────────────────────────────────────────────────


def test_history_is_bounded_and_keeps_the_newest() -> None:
    at = dt.datetime(2026, 1, 2, tzinfo=dt.UTC)
    history = None
    for attempt in range(1, HISTORY_ENTRIES + 21):
        history = add_history(
            history, attempt=attempt, at=at, code="c", text="ü" * 10_000, worker="w"
        )
    assert history is not None
    entries = json.loads(history)
    assert [entry["attempt"] for entry in entries] == list(range(21, HISTORY_ENTRIES + 21))
    assert all(len(entry["error"]) == ERROR_CHARACTERS for entry in entries)
    assert entries[0].keys() == {"attempt", "at", "code", "error", "worker"}


# ── Where it goes ──────────────────────────────────────────────────────────────────────────────


def test_the_first_pattern_that_fits_wins() -> None:
    routes = Routes((("orders.eu.*", "memory://eu"), ("orders.*", "memory://all")), None)
    assert routes.url_for("orders.eu.placed") == "memory://eu"
    assert routes.url_for("orders.us.placed") == "memory://all"
    assert routes.url_for("Orders.us") is None
    assert Routes(routes.patterns, "memory://rest").url_for("other") == "memory://rest"
    assert routes.urls == ("memory://eu", "memory://all")


def test_a_relay_without_any_broker_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="needs a broker"):
        Relay("sqlite:///nowhere.db", {})


SECRET = "s3cr3t-Canary"


@pytest.mark.parametrize(
    "url",
    [
        f"nats://app:{SECRET}@host:4222",
        f"nats://app:{SECRET}@host:4222,nats://app:{SECRET}@other:4222",
        f"https://host/hook?token={SECRET}",
        f"https://host/hook?api_key={SECRET}&x=1",
        f"amqp://app:p@{SECRET}@host/v",
        f"nats://{SECRET}@host:4222",
    ],
)
def test_what_is_on_record_of_the_routes_holds_no_secret(url: str) -> None:
    for routes in (Routes((("a.*", url),), None), Routes((), url)):
        fingerprint = routes.fingerprint(signals.redact)
        assert SECRET not in fingerprint
        assert "host" in fingerprint


def test_fingerprints_tell_tables_apart() -> None:
    tables = [
        Routes((), "memory://a"),
        Routes((), "memory://b"),
        Routes((("*", "memory://a"),), None),
        Routes((("x", "memory://a"),), "memory://a"),
        Routes((("x", "memory://a"), ("y", "memory://b")), None),
        Routes((("y", "memory://b"), ("x", "memory://a")), None),
    ]
    assert len({table.fingerprint(signals.redact) for table in tables}) == len(tables)


def test_another_password_is_not_another_table() -> None:
    one, two = (Routes((), f"nats://app:{word}@host").fingerprint(signals.redact) for word in "ab")
    assert one == two
