"""Messages that do not go through: tried again, buried in the end, not passed by their key."""

import asyncio
import json
from collections.abc import Sequence

import pytest
from relaying import QUICK_RETRY, Post, by_key, note, told

from helpers import eventually_async
from postroom.brokers.base import (
    BEHIND,
    CROWDED,
    DELIVERED,
    BrokerOptions,
    Capabilities,
    Delivered,
    Outcome,
    Permanent,
    Transient,
    Unknown,
)
from postroom.brokers.call import CallBroker
from postroom.messages import Message, lane_of
from postroom.outbox.relay import Drained, Relay
from postroom.retry import RetryPolicy

pytest_plugins = ("relay_fixtures",)

BUSY = Transient("busy", "try later")
BAD = Permanent("bad", "never")
SLOW_RETRY = RetryPolicy((3600.0,), attempts=9)


def numbered(key: str, number: int) -> object:
    return lambda m: m.key == key and m.payload == b"%d" % number


async def drain_until_empty(post: Post, relay: Relay) -> None:
    async def drained() -> bool:
        await relay.drain_once()
        return post.empty()

    await eventually_async(drained)


# ── Tried again ────────────────────────────────────────────────────────────────────────────────


async def test_a_failed_message_waits_with_its_key_while_others_flow(post: Post) -> None:
    post.broker.fail(numbered("k", 2), BUSY)
    post.publish(*(note(key, n) for n in range(1, 5) for key in ("k", "other")))
    drained = await post.relay(retry=SLOW_RETRY).drain_once()
    assert drained == Drained(delivered=5, held=1, dead=0, elsewhere=0)
    assert by_key(post.broker.messages) == {"k": [1], "other": [1, 2, 3, 4]}
    assert post.numbers("held") == [2, 3, 4]
    assert post.count("outbox") == 0
    rows = post.sql(
        "SELECT attempts, error_code, next_attempt_at IS NOT NULL FROM {p}held ORDER BY position"
    )
    assert [tuple(row) for row in rows] == [(1, "busy", 1), (0, None, 0), (0, None, 0)]
    post.publish(note("k", 5), note("other", 5))
    await post.relay(retry=SLOW_RETRY).drain_once()
    assert by_key(post.broker.messages) == {"k": [1], "other": [1, 2, 3, 4, 5]}
    assert post.numbers("held") == [2, 3, 4, 5]


async def test_attempts_are_spent_with_back_off_and_then_it_is_buried(post: Post) -> None:
    post.broker.fail(numbered("k", 1), BUSY, times=None)
    post.publish(note("k", 1), note("k", 2), note("other", 1))
    async with post.relay() as relay:
        await eventually_async(lambda: post.count("dead_letter") == 1)
        await post.put(note("k", 3), note("other", 2))
        await eventually_async(lambda: post.numbers("held") == [1, 2, 3])
        await eventually_async(lambda: by_key(post.broker.messages) == {"other": [1, 2]})
        worker = relay.owner
    letter = post.sql("SELECT state, error_code, error, attempts, holds_key FROM {p}dead_letter")
    assert [tuple(row) for row in letter] == [("dead", "busy", "try later", 3, 1)]
    ((history,),) = post.sql("SELECT history FROM {p}dead_letter")
    entries = json.loads(history)
    assert [entry["attempt"] for entry in entries] == [1, 2, 3]
    assert {(entry["code"], entry["error"]) for entry in entries} == {("busy", "try later")}
    assert {entry["worker"] for entry in entries} == {worker}
    assert [entry["at"] for entry in entries] == sorted(entry["at"] for entry in entries)
    blocked = post.sql("SELECT blocked, next_attempt_at FROM {p}held ORDER BY position")
    assert [tuple(row) for row in blocked] == [(1, None), (0, None), (0, None)]
    delays = [fields["delay_seconds"] for fields in post.of("message.held")]
    assert delays == [0.03, 0.03]


async def test_a_dead_letter_keeps_holding_its_key_for_the_next_relay(post: Post) -> None:
    post.broker.fail(numbered("k", 1), BAD)
    post.publish(note("k", 1))
    await post.relay().drain_once()
    post.publish(note("k", 2), note("other", 1))
    await post.relay().drain_once()
    await post.relay().drain_once()
    assert told(post.broker.messages) == [("other", 1)]
    assert post.numbers("held") == [1, 2]


@pytest.mark.parametrize("outcome", [BAD, BUSY], ids=["refused", "attempts spent"])
async def test_on_dead_continue_lets_the_key_go_on(post: Post, outcome: Outcome) -> None:
    post.broker.fail(numbered("k", 2), outcome, times=None)
    post.publish(*(note("k", n) for n in range(1, 6)))
    await drain_until_empty(post, post.relay(on_dead="continue"))
    assert told(post.broker.messages) == [("k", 1), ("k", 3), ("k", 4), ("k", 5)]
    rows = post.sql("SELECT state, holds_key, attempts FROM {p}dead_letter")
    assert [tuple(row) for row in rows] == [("dead", 0, 1 if outcome is BAD else 3)]


async def test_a_permanent_refusal_is_buried_at_once(post: Post) -> None:
    post.broker.fail(numbered("k", 1), BAD, times=None)
    (id, _) = post.publish(note("k", 1), note("k", 2))
    drained = await post.relay().drain_once()
    assert drained == Drained(delivered=0, held=0, dead=1, elsewhere=0)
    rows = post.sql("SELECT id, error_code, attempts FROM {p}dead_letter")
    assert [(str(row[0]), *row[1:]) for row in rows] == [(id, "bad", 1)]
    assert post.numbers("held") == [1, 2]


async def test_a_dead_message_without_a_key_holds_nothing(post: Post) -> None:
    post.broker.fail(lambda m: m.payload == b"1", BAD)
    post.publish(note(None, 1), note(None, 2))
    await post.relay().drain_once()
    assert told(post.broker.messages) == [(None, 2)]
    assert post.empty()
    assert post.sql("SELECT holds_key FROM {p}dead_letter")[0][0] in (False, 0)


async def test_a_receivers_wish_for_time_is_kept(post: Post) -> None:
    post.broker.fail(numbered("k", 1), Transient("busy", "no", retry_after_seconds=3600))
    post.publish(note("k", 1))
    await post.relay().drain_once()
    await post.relay().drain_once()
    assert post.numbers("held") == [1]
    (fields,) = post.of("message.held")
    assert fields["delay_seconds"] == 3600


async def test_the_archive_tells_how_many_attempts_it_took(post: Post) -> None:
    post.broker.fail(numbered("k", 1), BUSY, times=2)
    post.publish(note("k", 1), note("k", 2))
    await drain_until_empty(post, post.relay())
    rows = post.sql("SELECT attempts FROM {p}archive ORDER BY position")
    assert rows == [(3,), (1,)]


async def test_a_policy_for_a_topic_applies_to_it_alone(post: Post) -> None:
    post.broker.fail(lambda m: True, BUSY, times=None)
    post.publish(note("k", 1, topic="mail.welcome"), note("k", 2))
    once = {"mail.*": RetryPolicy(attempts=1), "*": QUICK_RETRY}
    await post.relay(retry=once).drain_once()
    rows = post.sql("SELECT topic FROM {p}dead_letter")
    assert rows == [("mail.welcome",)]
    assert 2 in post.numbers("held")


# ── Partial failure (F28) ──────────────────────────────────────────────────────────────────────


async def test_exactly_what_was_confirmed_is_settled(post: Post) -> None:
    # Keys of one lane, so that in every wave one message fails and the others do not.
    lane = lane_of("orders", "k0", "")
    keys = [f"k{n}" for n in range(500) if lane_of("orders", f"k{n}", "") == lane][:6]
    for place, key in enumerate(keys):
        post.broker.fail(numbered(key, place), BUSY)
    post.publish(*(note(key, n) for n in range(len(keys)) for key in keys))
    await post.relay(retry=SLOW_RETRY).drain_once()
    confirmed = sorted(message.id for message in post.broker.messages)
    archived = sorted(str(id) for (id,) in post.sql("SELECT id FROM {p}archive"))
    assert archived == confirmed
    expected = {key: list(range(place)) for place, key in enumerate(keys) if place}
    assert by_key(post.broker.messages) == expected
    assert post.count("held") == len(keys) ** 2 - len(confirmed)
    assert post.count("outbox") == 0
    assert post.count("lane_batch") == 0


# ── Unknown outcomes ───────────────────────────────────────────────────────────────────────────


async def test_an_unknown_outcome_is_sent_again_with_the_same_id(post: Post) -> None:
    post.broker.fail(numbered("k", 1), Unknown("lost", "no answer"), arrives=True)
    ids = post.publish(note("k", 1), note("k", 2))
    await drain_until_empty(post, post.relay())
    assert [message.id for message in post.broker.messages] == [ids[0], *ids]
    assert not post.count("dead_letter")


class Stub:
    """A broker that answers as it is told, and remembers what it was sent."""

    def __init__(self, *answers: object) -> None:
        self.capabilities = Capabilities()
        self.answers = list(answers)
        self.sent: list[int] = []

    async def send(self, batch: Sequence[Message], *, epoch: int = 0) -> list[Outcome]:
        self.sent += [int(message.payload) for message in batch]
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, list):
            return answer
        return [DELIVERED] * len(batch)

    async def ping(self) -> None: ...
    async def close(self) -> None: ...


class Searchable(Stub):
    def __init__(self, found: Outcome, *answers: object) -> None:
        super().__init__(*answers)
        self.found = found
        self.asked: list[int] = []
        self.crowded = 0

    async def lookup(self, message: Message) -> Outcome:
        self.asked.append(int(message.payload))
        self.crowded -= 1
        return CROWDED if self.crowded >= 0 else self.found


@pytest.mark.parametrize("on_dead", ["hold", "continue"])
async def test_what_is_behind_a_failure_of_its_key_spends_nothing(post: Post, on_dead: str) -> None:
    stub = Stub([DELIVERED, BAD, BEHIND, BEHIND])
    stub.capabilities = Capabilities(ordered_pipeline=True)
    relay = post.relay("memory://stub", brokers={"memory://stub": stub}, on_dead=on_dead)
    post.publish(*(note("k", n) for n in range(1, 5)))
    await relay.drain_once()
    assert stub.sent == ([1, 2, 3, 4] if on_dead == "hold" else [1, 2, 3, 4, 3, 4])
    assert post.numbers("held") == ([2, 3, 4] if on_dead == "hold" else [])
    assert post.of("destination.down") == []
    assert post.of("message.held") == []


async def test_what_found_no_room_goes_soon_in_order_and_spends_nothing(post: Post) -> None:
    stub = Stub([DELIVERED], [CROWDED], [CROWDED])
    relay = post.relay("memory://stub", brokers={"memory://stub": stub})
    post.publish(*(note("k", n) for n in range(1, 4)))
    drained = await relay.drain_once()
    assert drained == Drained(delivered=3, held=0, dead=0, elsewhere=0)
    assert stub.sent == [1, 2, 2, 2, 3]
    assert post.of("destination.down") == post.of("message.held") == []
    assert {fields["transient"] for fields in post.of("message.attempted")} == {0}


async def test_a_slow_receiver_gets_all_in_order_and_is_never_called_down(post: Post) -> None:
    got: list[Message] = []

    async def slow(message: Message) -> None:
        await asyncio.sleep(0.15)
        got.append(message)

    broker = CallBroker(slow, BrokerOptions(send_timeout_seconds=1.0, concurrency=2))
    relay = post.relay("call:x:y", brokers={"call:x:y": broker})
    post.publish(*(note(f"k{n % 20}", n) for n in range(40)))
    drained = await relay.drain_once()
    assert drained == Drained(delivered=40, held=0, dead=0, elsewhere=0)
    assert by_key(got) == {f"k{n}": [n, n + 20] for n in range(20)}
    assert post.of("destination.down") == post.of("message.held") == []


@pytest.mark.parametrize(
    "found",
    [Delivered(), Transient("not_arrived", "nowhere")],
    ids=["arrived", "did not arrive"],
)
async def test_a_broker_that_can_look_up_is_asked(post: Post, found: Outcome) -> None:
    stub = Searchable(found, [Unknown("lost", "no answer")])
    relay = post.relay("memory://stub", brokers={"memory://stub": stub})
    post.publish(note("k", 1))
    await drain_until_empty(post, relay)
    arrived = isinstance(found, Delivered)
    # At once, and once more before it is sent again: it may have been on its way.
    assert stub.asked == ([1] if arrived else [1, 1])
    assert stub.sent == ([1] if arrived else [1, 1])


async def test_who_found_no_room_to_ask_asks_again(post: Post) -> None:
    stub = Searchable(Delivered(), [Unknown("lost", "no answer")])
    stub.crowded = 2
    relay = post.relay("memory://stub", brokers={"memory://stub": stub})
    post.publish(note("k", 1))
    drained = await relay.drain_once()
    assert drained == Drained(delivered=1, held=0, dead=0, elsewhere=0)
    assert stub.asked == [1, 1, 1]
    assert stub.sent == [1]


@pytest.mark.parametrize(
    "wrong", [RuntimeError("boom password=s3cr3t"), [DELIVERED] * 9], ids=["raises", "miscounts"]
)
async def test_a_broker_that_misbehaves_has_told_us_nothing(post: Post, wrong: object) -> None:
    stub = Stub(wrong)
    relay = post.relay("memory://stub", brokers={"memory://stub": stub})
    post.publish(note("k", 1), note("k", 2))
    await relay.drain_once()
    assert "s3cr3t" not in str(post.sql("SELECT error, history FROM {p}held"))
    await drain_until_empty(post, relay)
    assert stub.sent == [1, 1, 2]
