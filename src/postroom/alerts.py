"""Alerts: what somebody should be told of now, once, and again only after a while.

    nothing ──it happens──► open: told ──more of it within repeat_seconds──► counted, not told
       ▲                      │  └── still so after repeat_seconds: told again, with the count
       └──── told once ◄──────┘ it is over

A relay hears of trouble through its own signals. Everything goes to the log; receivers get it from
a thread of their own, so that a slow one keeps no message waiting. What cannot be handed over in
time is dropped and said, never piled up.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import inspect
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from postroom import signals

__all__ = ["ALERTS", "Alert", "Alerts", "Receiver"]

ALERTS = {
    "attempts_spent": "a message became a dead letter",
    "key_held": "a dead letter holds its key, and later messages of it wait",
    "stale_backlog": "the oldest pending message is too old",
    "lane_unowned": "lanes are worked by nobody",
    "worker_silent": "a worker ended without stopping, or is stuck",
}
HEARD = ("message.buried", "outbox.measured", "outbox.unmeasured")
QUEUE_LIMIT = 100
STOP_SECONDS = 5.0
# What must be so twice in a row: a figure may be taken in the middle of a change.
LOOKS = 2


@dataclass(frozen=True, slots=True)
class Alert:
    """One thing to be told: its name from `ALERTS`, whether it begins or ends, and a sentence."""

    alert: str
    state: Literal["raised", "resolved"]
    text: str
    count: int
    since: str
    worker: str

    def document(self) -> dict[str, Any]:
        """The alert as plain values."""
        return asdict(self)


Receiver: TypeAlias = Callable[[Alert], Any]


@dataclass(slots=True)
class _Open:
    since: str
    text: str
    told_at: float
    count: int = 1
    told_count: int = 1
    quiet: int = 0


class Alerts:
    """The alerts of one relay."""

    def __init__(
        self,
        receivers: Sequence[Receiver] = (),
        *,
        incarnation: str,
        worker: str,
        stale_seconds: float,
        repeat_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._incarnation = incarnation
        self._worker = worker
        self._stale_seconds = stale_seconds
        self._repeat_seconds = repeat_seconds
        self._clock = clock
        self._open: dict[str, _Open] = {}
        self._seen: dict[str, int] = {}
        self._lock = threading.RLock()
        self._post = _Post(receivers)
        self._unlisten: Callable[[], None] | None = None

    def start(self) -> None:
        """Begin to listen."""
        if self._unlisten is None:
            self._unlisten = signals.listen(self._hear, only=HEARD)

    def stop(self) -> None:
        """Listen no more, and let receivers have what waits for them; not for long."""
        if self._unlisten is not None:
            self._unlisten()
            self._unlisten = None
        self._post.stop(STOP_SECONDS)

    @property
    def waiting(self) -> bool:
        """Whether an alert is open that ends when dead letters do."""
        return bool({"attempts_spent", "key_held"} & self._open.keys())

    def letters(self, dead: int, blocked_keys: int) -> None:
        """So many dead letters there are now, and so many of them hold their keys."""
        with self._lock:
            for name, number in (("attempts_spent", dead), ("key_held", blocked_keys)):
                if name not in self._open:
                    continue
                if number:
                    self._open[name].quiet = 0
                    self._remind(name)
                else:
                    self._open[name].quiet += 1
                    if self._open[name].quiet >= LOOKS:
                        self._resolve(name)

    def _hear(self, name: str, fields: dict[str, Any]) -> None:
        if fields.get("incarnation") != self._incarnation:
            return
        with self._lock:
            if name == "message.buried":
                self._buried(fields)
            elif name == "outbox.measured":
                self._measured(fields)
            elif name == "outbox.unmeasured":
                # Another relay speaks for the outbox now, and will tell if it is still so.
                for each in ("stale_backlog", "lane_unowned", "worker_silent"):
                    self._open.pop(each, None)
                    self._seen.pop(each, None)

    def _buried(self, fields: dict[str, Any]) -> None:
        id, topic = fields["id"], fields["topic"]
        self._raise(
            "attempts_spent",
            f"message {id} of topic {topic} became a dead letter after {fields['attempts']} "
            f"attempt(s), with the code {fields['last_error_code']}: see `postroom dead show {id}`",
        )
        if fields["holds_key"]:
            self._raise(
                "key_held",
                f"key {fields['key']!r} of topic {topic} is held by the dead letter {id}: "
                "later messages of it wait until somebody retries or discards it",
            )

    def _measured(self, fields: dict[str, Any]) -> None:
        self.letters(fields["dead"], fields["blocked_keys"])
        age = fields["oldest_pending_seconds"]
        self._while(
            "stale_backlog",
            age > self._stale_seconds,
            f"the oldest of {fields['pending']} pending message(s) has waited for {age:.0f} s: see "
            "`postroom status`, and `destination.down` in the relays' logs",
        )
        self._while(
            "lane_unowned",
            fields["lanes_unowned"] > 0,
            f"{fields['lanes_unowned']} lane(s) are worked by nobody: a relay has died, or too few "
            "run; see `postroom status`",
        )
        self._while(
            "worker_silent",
            fields["workers_silent"] > 0,
            f"{fields['workers_silent']} worker(s) ended without stopping, or are stuck: see "
            "`postroom status`, and the logs of their processes",
        )

    def _while(self, name: str, so: bool, text: str) -> None:
        """An alert that is open for as long as something is so."""
        self._seen[name] = self._seen.get(name, 0) + 1 if so else 0
        if not so and name in self._open:
            self._resolve(name)
        elif so and name in self._open:
            self._open[name].text = text
            self._open[name].count += 1
            self._remind(name)
        elif self._seen[name] >= LOOKS:
            self._raise(name, text)

    def _raise(self, name: str, text: str) -> None:
        now = self._clock()
        known = self._open.get(name)
        if known is None:
            since = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
            self._open[name] = _Open(since, text, now)
            self._tell(name, self._open[name])
        else:
            known.text, known.quiet = text, 0
            known.count += 1
            self._remind(name)

    def _remind(self, name: str) -> None:
        known = self._open[name]
        more = known.count > known.told_count
        if more and self._clock() - known.told_at >= self._repeat_seconds:
            known.told_at, known.told_count = self._clock(), known.count
            self._tell(name, known)

    def _tell(self, name: str, known: _Open) -> None:
        signals.emit("alert.raised", alert=name, text=known.text, count=known.count)
        self._hand_over(Alert(name, "raised", known.text, known.count, known.since, self._worker))

    def _resolve(self, name: str) -> None:
        known = self._open.pop(name)
        text = f"it is over: {ALERTS[name]}"
        signals.emit("alert.resolved", alert=name, text=text)
        self._hand_over(Alert(name, "resolved", text, known.count, known.since, self._worker))

    def _hand_over(self, alert: Alert) -> None:
        self._post.put(alert)


class _Post:
    """Hands alerts to receivers, one after the other, in a thread that ends when there is none."""

    def __init__(self, receivers: Sequence[Receiver]) -> None:
        self._receivers = tuple(receivers)
        self._queue: queue.Queue[Alert] = queue.Queue(QUEUE_LIMIT)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._dropped = 0

    def put(self, alert: Alert) -> None:
        if not self._receivers:
            return
        try:
            self._queue.put_nowait(alert)
        except queue.Full:
            self._dropped += 1
            text = f"{QUEUE_LIMIT} alerts wait already"
            signals.emit("alert.lost", receiver="all", error=text, count=self._dropped)
            return
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="postroom alerts", daemon=True
                )
                self._thread.start()

    def stop(self, seconds: float) -> None:
        thread = self._thread
        if thread is not None:
            thread.join(seconds)

    def _run(self) -> None:
        while True:
            try:
                alert = self._queue.get_nowait()
            except queue.Empty:
                with self._lock:
                    # Whoever puts one more sees that there is no thread any more.
                    if self._queue.empty():
                        self._thread = None
                        return
                continue
            for receiver in self._receivers:
                self._call(receiver, alert)

    def _call(self, receiver: Receiver, alert: Alert) -> None:
        try:
            answer = receiver(alert)
            if inspect.isawaitable(answer):
                asyncio.run(_wait(answer))
        except Exception as error:
            name = getattr(receiver, "__qualname__", None) or repr(receiver)
            text = f"{type(error).__name__}: {error}"
            signals.emit("alert.lost", receiver=name, error=text, count=1)


async def _wait(answer: Any) -> Any:
    return await answer
