"""ASGI middleware for idempotency keys: Starlette, FastAPI, Litestar and whatever speaks ASGI.

    app.add_middleware(IdempotencyMiddleware, keys=Keys(url, scope=…))

The body of a request with a key is read up to a limit and compared; the application then runs in a
task of its own, which a client that hangs up does not end. Its answer is held back until it is
written down. Streamed answers are not kept: a tombstone stands for them before their first byte.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from dataclasses import replace
from typing import Any, TypeAlias

from postroom.errors import PostroomError
from postroom.idempotency import problems
from postroom.idempotency.exchange import (
    Asked,
    closing,
    drive_async,
    may_run_without,
    opening,
)
from postroom.idempotency.keys import Keys, Seen, asked_of, needs_body
from postroom.idempotency.leases import kept_in_loop
from postroom.idempotency.policy import Policy
from postroom.idempotency.rules import Answer, Mine, bodiless
from postroom.idempotency.telling import give_up_async, refused, tell_replay, tell_unprotected
from postroom.idempotency.turn import Turn, refuse_twice, turn_in

__all__ = ["IdempotencyMiddleware", "turn_of"]

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

STATE = "postroom.idempotency"
LARGE_BYTES = 1 << 16  # a body that is compared in a thread: others wait for the event loop
# Ways to send a file that pass by whoever wants to keep its bytes.
_PAST_US = ("http.response.pathsend", "http.response.zerocopysend")
_log = logging.getLogger("postroom")


def turn_of(scope: Any) -> Turn:
    """The turn of a request, by its scope or by anything that has one (Starlette, Litestar)."""
    inside = scope if isinstance(scope, MutableMapping) else getattr(scope, "scope", {})
    return turn_in(inside.get(STATE), "IdempotencyMiddleware")


class IdempotencyMiddleware:
    """One request, one effect: see the module."""

    def __init__(self, app: App, keys: Keys) -> None:
        self.app = app
        self.keys = keys
        self._left: set[asyncio.Task[None]] = set()  # clients hung up, work goes on

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = None
        if scope["type"] == "http":
            seen = _seen(scope)
            found = self.keys.find(seen.method, seen.path)
        if found is None:
            await self.app(scope, receive, send)
            return
        operation, policy = found
        request = _Request(receive)
        if needs_body(policy, seen):
            body = await request.read(policy.most_request_bytes)
            if body is None:
                if not request.gone:
                    await _send(problems.too_large(policy.most_request_bytes), send)
                return
            seen = replace(seen, body=body)
        asked = await self._asked(scope, seen, operation, policy)
        if STATE in scope:
            refuse_twice(scope[STATE], asked)
        if isinstance(asked, Answer):
            await _send(asked, send)
        elif asked is None and policy.mode == "external":
            scope[STATE] = Turn(None)
            await self.app(scope, request.receive, send)
        elif asked is not None and policy.mode == "external":
            await self._in_task(self._external(asked, scope, request, send), request)
        else:
            run = _Inside(self, Turn(asked, policy), scope, request, send)
            run.limit = policy.most_stored_bytes
            await self._in_task(run.run(), request)

    async def _asked(
        self, scope: Scope, seen: Seen, operation: str, policy: Policy
    ) -> Asked | Answer | None:
        whose = await self.keys.whose_async(scope)
        if len(seen.body) > LARGE_BYTES:
            return await asyncio.to_thread(asked_of, seen, operation, policy, whose)
        return asked_of(seen, operation, policy, whose)

    async def _external(self, asked: Asked, scope: Scope, request: _Request, send: Send) -> None:
        try:
            verdict = await drive_async(opening(asked), self.keys.engines)
        except PostroomError as error:
            if may_run_without(asked, error):
                scope[STATE] = Turn(asked)
                await self.app(scope, request.receive, send)
                return
            await _send(refused(asked, error), send)
            return
        if not isinstance(verdict, Mine):
            tell_replay(asked, verdict)
            await _send(problems.answer_to(verdict, asked.policy), send)
            return
        await _Outside(self, asked, verdict, scope, request, send).run()

    async def _in_task(self, work: Coroutine[Any, Any, None], request: _Request) -> None:
        """Carry it to its end, even if whoever waits for it is cancelled."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.done():
                raise
            request.gone = True
            self._left.add(task)
            task.add_done_callback(self._ended)
            raise

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._left.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a request whose client hung up ended with an error", exc_info=error)


class _Request:
    """The body, read at most once and said again."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._messages: list[Message] = []
        self._whole = False
        self.gone = False
        self.answered = asyncio.Event()

    async def read(self, limit: int) -> bytes | None:
        """All of it; None if it is too large, or if the client is gone."""
        parts, size, more = [], 0, True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.gone = True
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > limit:
                return None
            more = message.get("more_body", False)
        body = b"".join(parts)
        self._messages.append({"type": "http.request", "body": body, "more_body": False})
        self._whole = True
        return body

    async def receive(self) -> Message:
        """As the application receives it."""
        if self._messages:
            return self._messages.pop()
        return await self._receive()

    async def receive_undisturbed(self) -> Message:
        """The same, and a client that hangs up is told of after the answer is written down."""
        if self._messages:
            return self._messages.pop()
        if not self._whole:
            message = await self._receive()
            self._whole = not message.get("more_body", False)
            return message
        await self.answered.wait()
        return {"type": "http.disconnect"} if self.gone else await self._receive()


class _Run(ABC):
    """The application at work, and its answer held back until it is settled."""

    def __init__(
        self, middleware: IdempotencyMiddleware, scope: Scope, request: _Request, send: Send
    ) -> None:
        self.middleware = middleware
        self.scope = scope
        self.request = request
        self._sender = send
        self._started: Message | None = None
        self._parts: list[bytes] = []
        self._size = 0
        self.settled = False
        self._passes = False
        self._dropped = False
        self.limit = 0

    @abstractmethod
    async def run(self) -> None:
        """Claim, and let the application work."""

    @abstractmethod
    async def settle(self, answer: Answer) -> Answer | None:
        """Write its answer down: None, or what is to be answered in its place."""

    async def call(self) -> None:
        """Run the application."""
        extensions = self.scope.get("extensions") or {}
        self.scope["extensions"] = {k: v for k, v in extensions.items() if k not in _PAST_US}
        await self.middleware.app(self.scope, self.request.receive_undisturbed, self.take)

    async def take(self, message: Message) -> None:
        """What the application sends."""
        if self._dropped:
            return
        if self._passes:
            await self.send(message)
        elif message["type"] == "http.response.start":
            self._started = message
        elif message["type"] == "http.response.body" and self._started is not None:
            await self._take_body(message, self._started)
        else:
            await self.send(message)

    async def _take_body(self, message: Message, started: Message) -> None:
        body, more = message.get("body", b""), message.get("more_body", False)
        self._parts.append(body)
        self._size += len(body)
        given = [(n.decode("latin-1"), v.decode("latin-1")) for n, v in started.get("headers", ())]
        names = {name.lower() for name, _ in given}
        streamed = more and "content-length" not in names
        too_large = self._size > self.limit
        if more and not streamed and not too_large:
            return
        answer = Answer(started["status"], tuple(given), b"".join(self._parts))
        if streamed or too_large:
            answer = answer.without_body("streamed" if streamed else "too_large")
        instead = await self.settle(answer)
        self.settled = True
        self.request.answered.set()
        if instead is not None:
            self._dropped = True
            await self.reply(instead)
            return
        await self.send(started)
        whole = b"".join(self._parts)
        await self.send({"type": "http.response.body", "body": whole, "more_body": more})
        self._parts = []
        self._passes = True

    async def reply(self, answer: Answer) -> None:
        """Send an answer of ours."""
        if not self.request.gone:
            await _send(answer, self._sender)

    async def send(self, message: Message) -> None:
        if not self.request.gone:
            await self._sender(message)


class _Outside(_Run):
    """`external`: a claim stands, with a lease that is kept while the application works."""

    def __init__(
        self,
        middleware: IdempotencyMiddleware,
        asked: Asked,
        mine: Mine,
        scope: Scope,
        request: _Request,
        send: Send,
    ) -> None:
        super().__init__(middleware, scope, request, send)
        self.turn = scope[STATE] = Turn(asked)
        self.asked = asked
        self.mine = mine
        self.limit = asked.policy.most_stored_bytes

    async def run(self) -> None:
        try:
            with kept_in_loop(self.asked, self.mine.claim, self.middleware.keys.engines):
                await self.call()
            if not self.settled:
                raise RuntimeError("the application ended without an answer")
        except BaseException as error:
            if not self.settled:
                engines = self.middleware.keys.engines
                kept = self.turn.kept
                await give_up_async(self.asked, self.mine, error, engines, kept=kept)
            raise
        finally:
            self.turn.over = True
            self.request.answered.set()

    async def settle(self, answer: Answer) -> Answer | None:
        engines = self.middleware.keys.engines
        try:
            steps = closing(self.asked, self.mine, answer, kept=self.turn.kept)
            instead = await drive_async(steps, engines)
        except PostroomError as error:
            # It was carried out, and whoever waits for the answer shall have it. Once its lease is
            # over the key is indeterminate.
            tell_unprotected(self.asked, error)
            return None
        return None if instead is None else problems.answer_to(instead, self.asked.policy)


class _Inside(_Run):
    """`same_transaction` and `resume`: the route claims, on what it works on."""

    def __init__(
        self,
        middleware: IdempotencyMiddleware,
        turn: Turn,
        scope: Scope,
        request: _Request,
        send: Send,
    ) -> None:
        super().__init__(middleware, scope, request, send)
        self.turn = scope[STATE] = turn

    async def run(self) -> None:
        try:
            await self.call()
        except Exception as error:
            # `Answered`, or whatever the framework made of it. A mounted application answers it and
            # raises it again: what was ours to say is said then.
            instead = self.turn.told_instead(error)
            if instead is None or (self.settled and not self._dropped):
                raise
            if not self._dropped:
                self._dropped = True
                await self.turn.end_async()
                await self.reply(instead)
        finally:
            self.request.answered.set()
            await self.turn.end_async()

    async def settle(self, answer: Answer) -> Answer | None:
        if self.turn.instead is not None:  # whatever the framework made of our exception
            await self.turn.end_async()
            return self.turn.instead
        return await self.turn.settle_async(answer)


def _seen(scope: Scope) -> Seen:
    headers = [(n.decode("latin-1").lower(), v.decode("latin-1")) for n, v in scope["headers"]]
    query = scope.get("query_string", b"").decode("latin-1")
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    if not f"{path}/".startswith(f"{root}/"):
        root = ""  # a proxy has taken it away, and /api-tokens is not under /api
    return Seen(scope["method"], path[len(root) :] or "/", query, headers, root=root)


async def _send(answer: Answer, send: Send) -> None:
    headers = [(n.encode("latin-1"), v.encode("latin-1")) for n, v in answer.headers]
    body = b"" if bodiless(answer.status) else answer.body
    if not bodiless(answer.status):
        headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
