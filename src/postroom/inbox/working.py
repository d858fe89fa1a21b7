"""One worker of a consumer: many messages in one transaction, or one by one when one of them fails.

    together ──► enter, claim, handlers in order, commit ──► acknowledged
       │ a handler raised: all of it is rolled back
       └──► each alone ──► commit ──► acknowledged
                │ raised
                └──► kept: to be tried again, or a dead letter ──► acknowledged

Promise: whatever is acknowledged was handled and committed, or is kept in the database. A crash
anywhere before lets the message come again, and what was committed is then a duplicate.
"""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Sequence

from postroom import signals
from postroom.brokers.cloudevents import UNREADABLE
from postroom.dead_letters.rules import add_history, storable
from postroom.errors import Rejected
from postroom.inbox.carrying import Call, Carrier, Conflict, Do, HandlerFailed, Steps, nobody
from postroom.inbox.rules import (
    LOST_TRIES,
    NAME_CHARACTERS,
    SUSPECT_AFTER,
    Bury,
    Letter,
    Retry,
    Verdict,
    chunks,
    first_line,
    places,
    verdict,
)
from postroom.inbox.store import Failure, Opened
from postroom.retry import RetryPolicy

__all__ = ["Worker"]


class Worker(Carrier):
    """Handles the messages of its keys, in order."""

    async def handle(self, letters: Sequence[Letter]) -> int:
        """Handle messages in order; returns how many it came to before it had to stop."""
        done = 0
        desk = self.desk
        for chunk in chunks(
            letters, rows=desk.chunk_rows, size=desk.chunk_bytes, apart=self._apart
        ):
            if desk.ending.is_set():
                break
            await self._chunk(chunk)
            done += len(chunk)
        return done

    def _apart(self, letter: Letter) -> object:
        """What may share a transaction: messages of one kind of handler. What was parked, or has
        come too often, goes alone."""
        if letter.position is not None or _seen(letter) >= SUSPECT_AFTER:
            return object()
        handler = self.desk.handlers.find(letter.type)
        return None if handler is None else handler.is_async

    async def _chunk(self, chunk: Sequence[Letter]) -> None:
        chunk = [letter for letter in chunk if self.desk.current(letter)]
        if not chunk:
            return
        if chunk[0].position is not None:
            await self._retry(chunk[0])
        elif self.desk.handlers.find(chunk[0].type) is None:
            await self._unknown(chunk)
        elif len(chunk) == 1:
            await self._alone(chunk[0])
        else:
            try:
                self._settle(await self.carry_out(self._open(chunk), chunk[0]))
            except (HandlerFailed, Conflict):
                # Only the one that fails shall fail.
                for letter in chunk:
                    if self.desk.ending.is_set():
                        break
                    if self.desk.current(letter):
                        await self._alone(letter)

    # ── what came from the broker ──────────────────────────────────────────────────────────────

    def _open(self, letters: Sequence[Letter]) -> Steps:
        store = self.desk.store
        opened: Opened = yield Do(store.open(letters, self.desk.seats_of(letters)))
        for letter in opened.fresh:
            yield Call(letter)
        for letter in opened.changed:
            yield Do(store.keep_changed(self._changed(letter)))
        return opened

    async def _alone(self, letter: Letter) -> None:
        store, seats = self.desk.store, self.desk.seats_of([letter])
        if _seen(letter) >= SUSPECT_AFTER:
            opened = await self.own(lambda: store.suspect(letter, seats))
            opened.behind, opened.fresh = [*opened.behind, *opened.fresh], []
            self._settle(opened)
            self.desk.hint()
            return
        try:
            self._settle(await self.persist(lambda: self._open([letter]), letter))
        except HandlerFailed as failed:
            await self._keep(letter, failed.error)

    async def _unknown(self, letters: Sequence[Letter]) -> None:
        """Skip and count messages of types without a handler, or bury them. Bury one that cannot be
        read in any case: its type is not known."""
        skipped = [each for each in letters if UNREADABLE not in each.headers]
        if self.desk.skips_unknown and skipped:
            self.desk.tally.skipped += len(skipped)
            for type in sorted({letter.type for letter in skipped}):
                count = sum(letter.type == type for letter in skipped)
                signals.emit("delivery.skipped", consumer=self.desk.name, type=type, count=count)
            self.desk.acknowledge(skipped)
        for letter in letters:
            if not self.desk.skips_unknown or UNREADABLE in letter.headers:
                await self._keep(letter, nobody(letter))

    async def _keep(self, letter: Letter, error: BaseException) -> None:
        """Its first attempt failed: keep it, to be tried again or as a dead letter."""
        store, seats = self.desk.store, self.desk.seats_of([letter])
        failure = self._failure(letter, error, attempt=1)
        opened = await self.own(lambda: store.keep(failure, seats))
        kept = bool(opened.fresh)
        for each in opened.changed:  # somebody else has handled its id meanwhile
            changed = self._changed(each)
            await self.own(lambda changed=changed: store.keep_changed(changed))  # type: ignore[misc]
        opened.behind, opened.fresh = [*opened.behind, *opened.fresh], []
        self._settle(opened)
        if kept:
            self._tell(failure)

    def _settle(self, opened: Opened) -> None:
        """All of this is committed: acknowledge it, and say what became of it."""
        desk, tally = self.desk, self.desk.tally
        if opened.lost:
            desk.lose(opened.lost)
        tally.handled += len(opened.fresh)
        tally.duplicates += len(opened.duplicates)
        if opened.fresh:
            self._handled(opened.fresh)
        if opened.duplicates:
            signals.emit("delivery.duplicate", consumer=desk.name, count=len(opened.duplicates))
        for letter in opened.changed:
            self._tell(self._changed(letter))
        desk.acknowledge(opened.fresh + opened.duplicates + opened.changed + opened.behind)

    # ── what waits to be tried again ───────────────────────────────────────────────────────────

    async def _retry(self, due: Letter) -> None:
        """Try a parked message; the attempt is counted before it begins.

        One that was lost with its process or its database may have been nobody's fault: after the
        last that the policy allows there are a few more, so that it takes several losses in a row
        to bury a message that did not fail.
        """
        letter: Letter | None = await self.own(lambda: self.desk.store.start(due))
        if letter is None:
            return
        handler = self.desk.handlers.find(letter.type)
        if handler is None or letter.attempts > self._policy(letter).attempts + LOST_TRIES:
            died = f"the process or its database was lost in attempt {due.attempts}, once too often"
            error = Rejected(died, code="worker_died") if handler else nobody(letter)
            await self._fail(self._failure(letter, error, attempt=letter.attempts))
            return
        try:
            done = await self.persist(lambda: self._again(letter), letter)
        except HandlerFailed as failed:
            await self._fail(self._failure(letter, failed.error, attempt=letter.attempts))
            return
        if done:
            self._count([letter])
            if letter.key is not None:
                await self._follow(letter)

    def _again(self, letter: Letter) -> Steps:
        store = self.desk.store
        if not (yield Do(store.lock(letter))):
            return False
        yield Call(letter)
        yield Do(store.done([letter]))
        return True

    async def _follow(self, head: Letter) -> None:
        """What waited behind a head that was handled goes right after it, many at a time."""
        before: int | None = None
        while not self.desk.ending.is_set():
            try:
                done = await self.carry_out(self._behind(head, before), head)
            except Conflict:
                break
            except HandlerFailed as failed:
                if before is not None:
                    break
                # Again, as far as the one that failed; that is then the head, and tried alone.
                before = failed.letter.position
                continue
            if not done:
                break
            self._count(done)
        self.desk.hint()

    def _behind(self, head: Letter, before: int | None) -> Steps:
        store, handlers = self.desk.store, self.desk.handlers
        found: list[Letter] = yield Do(store.behind(head, self.desk.chunk_rows))
        first = handlers.find(head.type)
        same: list[Letter] = []
        for letter in found:
            handler = handlers.find(letter.type)
            if handler is None or first is None or handler.is_async != first.is_async:
                break
            if letter.attempts or letter.position == before:
                break  # it has failed before: it goes alone, and its attempt is counted first
            same.append(letter)
        for letter in same:
            yield Call(letter)
        if same:
            yield Do(store.done(same))
        return same

    async def _fail(self, failure: Failure) -> None:
        if await self.own(lambda: self.desk.store.fail(failure)):
            self._tell(failure)

    def _count(self, letters: Sequence[Letter]) -> None:
        self.desk.tally.handled += len(letters)
        self._handled(letters)

    # ── words ──────────────────────────────────────────────────────────────────────────────────

    def _policy(self, letter: Letter) -> RetryPolicy:
        handler = self.desk.handlers.find(letter.type)
        return (handler.retry if handler else None) or self.desk.retry

    def _failure(self, letter: Letter, error: BaseException, *, attempt: int) -> Failure:
        found = verdict(error, attempt, self._policy(letter), random.random)
        return self._failed(letter, found, attempt, error)

    def _failed(
        self, letter: Letter, found: Verdict, attempt: int, cause: BaseException | None = None
    ) -> Failure:
        history = add_history(
            letter.history,
            attempt=attempt,
            at=dt.datetime.now(dt.UTC),
            code=found.code,
            text=found.text,
            worker=self.desk.owner,
            where=[] if cause is None else places(cause),
        )
        return Failure(letter, found, attempt, history, cause)

    def _changed(self, letter: Letter) -> Failure:
        said = (
            f"message {letter.id} came again with other content, of another type or from another "
            "source: its publisher used the id twice, or it was changed on its way"
        )
        return self._failed(letter.changed(), Bury("content_changed", storable(said)), 1)

    def _handled(self, letters: Sequence[Letter]) -> None:
        if signals.heard("delivery.handled"):
            signals.emit(
                "delivery.handled",
                consumer=self.desk.name,
                count=len(letters),
                ages_seconds=_ages(letters),
            )

    def _tell(self, failure: Failure) -> None:
        letter, found, desk = failure.letter, failure.verdict, self.desk
        named = storable(letter.id, NAME_CHARACTERS)  # its publisher's text, and goes into logs
        cause = failure.cause
        error = found.text if cause is None else first_line(cause)
        if cause is not None and cause.__traceback__ is None:
            cause = None  # an error of ours that nothing raised
        if isinstance(found, Retry):
            desk.tally.failed += 1
            signals.emit(
                "delivery.failed",
                cause,
                consumer=desk.name,
                id=named,
                type=letter.type,
                topic=letter.topic,
                key=letter.key,
                attempts=failure.attempts,
                last_error_code=found.code,
                error=error,
                delay_seconds=round(found.delay_seconds, 3),
            )
            return
        desk.tally.buried += 1
        signals.emit(
            "delivery.buried",
            cause,
            consumer=desk.name,
            id=named,
            type=letter.type,
            topic=letter.topic,
            key=letter.key,
            attempts=failure.attempts,
            last_error_code=found.code,
            error=error,
            incarnation=desk.owner,
        )


def _seen(letter: Letter) -> int:
    return 0 if letter.delivery is None else letter.delivery.seen


def _ages(letters: Sequence[Letter]) -> list[float]:
    now, found = dt.datetime.now(dt.UTC), []
    for letter in letters:
        try:
            made = dt.datetime.fromisoformat(letter.headers.get("ce-time", ""))
            found.append(max(0.0, (now - made).total_seconds()))
        except (ValueError, TypeError):
            continue
    return found
