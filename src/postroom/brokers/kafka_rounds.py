"""What becomes of the other messages when one has failed. No I/O.

Promise: nothing of a key goes again, in a later round of the same send, behind one that is lost to
this send.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from postroom.brokers.base import BEHIND, DELIVERED, Outcome, Permanent, Transient, Unknown
from postroom.brokers.kafka_link import Link, Sending
from postroom.brokers.kafka_wire import NOT_SENT
from postroom.messages import Message

__all__ = ["again", "conclude", "merge", "silent_topics", "waves", "without_blame"]


def conclude(link: Link, sending: Sending, *, silent: bool) -> list[Outcome]:
    """The outcomes, with what it means where there is no report. If nothing at all was heard of
    the cluster, the whole of it counts as down."""
    outcomes = sending.outcomes
    if sending.sound and sending.answered and sending.given == len(outcomes):
        return [DELIVERED] * len(outcomes)
    why = f": {link.error}" if link.error else ""
    unknown = Unknown("connection_lost", f"the producer ended before the report{why}", "broker")
    concluded: list[Outcome] = []
    for index, outcome in enumerate(outcomes):
        if outcome is None:
            outcome = unknown if sending.was_given(index) else NOT_SENT
        if silent and isinstance(outcome, Transient | Unknown) and outcome.down == "topic":
            outcome = replace(outcome, down="broker")
        concluded.append(outcome)
    return concluded


def again(
    batch: Sequence[Message], outcomes: list[Outcome], sent: Sequence[int], *, spent: bool
) -> list[int]:
    """Which of the messages just sent may go out again: refused as part of a batch, or without
    a report because another message ended the producer. `spent`: the producer's own fault. What
    follows a message that was refused on its own account is `BEHIND`."""
    found: list[int] = []
    stopped: dict[tuple[str, str], Outcome] = {}
    for index in sent:
        outcome = outcomes[index]
        if outcome == DELIVERED:
            continue
        order = batch[index].order
        if order in stopped:
            if _was_refused(stopped[order]) or _blames_the_batch(outcome):
                outcomes[index] = BEHIND
        elif _blames_the_batch(outcome) or outcome == BEHIND or (_unheard(outcome) and not spent):
            found.append(index)
        else:
            stopped[order] = outcome
    return found


def without_blame(outcome: Outcome) -> Outcome:
    """For one that was refused as part of a batch, and could not be tried alone."""
    return NOT_SENT if _blames_the_batch(outcome) else outcome


def silent_topics(batch: Sequence[Message], outcomes: Sequence[Outcome]) -> set[str]:
    """The topics of which nothing was heard in time, while the cluster answered."""
    return {
        message.topic
        for message, outcome in zip(batch, outcomes, strict=True)
        if isinstance(outcome, Unknown) and outcome.code == "timeout" and outcome.down == "topic"
    }


def merge(before: Outcome, now: Outcome) -> Outcome:
    """What is known after a message went out again: it may have arrived the first time."""
    if isinstance(before, Unknown) and isinstance(now, Transient) and now != BEHIND:
        return Unknown(now.code, now.text, now.down)
    return now


def waves(batch: Sequence[Message]) -> list[list[int]]:
    """The first message of every key, then the second of every key, and so on."""
    turns: dict[tuple[str, str], int] = {}
    result: list[list[int]] = []
    for index, message in enumerate(batch):
        turn = turns[message.order] = turns.get(message.order, -1) + 1
        if turn == len(result):
            result.append([])
        result[turn].append(index)
    return result


def _blames_the_batch(outcome: Outcome) -> bool:
    """Whether it was refused for ever by the broker, as part of a batch."""
    return isinstance(outcome, Permanent) and outcome.code not in ("bad_header", "bad_topic")


def _unheard(outcome: Outcome) -> bool:
    """Whether nothing was said of it: it was thrown away with its producer."""
    if isinstance(outcome, Transient):
        return outcome.code == NOT_SENT.code
    return isinstance(outcome, Unknown) and outcome.code in ("timeout", "connection_lost")


def _was_refused(outcome: Outcome) -> bool:
    """Whether it certainly did not arrive, on its own account."""
    return not isinstance(outcome, Unknown) and not _unheard(outcome)
