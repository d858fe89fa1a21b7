"""WSGI middleware for idempotency keys: Flask, and whatever speaks WSGI.

    app.wsgi_app = IdempotencyMiddleware(app.wsgi_app, keys=Keys(url, scope=…))

As in `asgi`, with threads: leases are kept by one thread for the whole process.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from http import HTTPStatus
from typing import Any, TypeAlias

from postroom.errors import PostroomError
from postroom.idempotency import problems
from postroom.idempotency.exchange import (
    Asked,
    closing,
    drive,
    may_run_without,
    opening,
)
from postroom.idempotency.keys import Keys, Seen, asked_of, needs_body
from postroom.idempotency.policy import Policy
from postroom.idempotency.rules import Answer, Mine, bodiless
from postroom.idempotency.telling import give_up, refused, tell_replay, tell_unprotected
from postroom.idempotency.turn import Answered, Turn, refuse_twice, turn_in

__all__ = ["IdempotencyMiddleware", "turn_of"]

Environ: TypeAlias = dict[str, Any]
Start: TypeAlias = Callable[..., Any]
App: TypeAlias = Callable[[Environ, Start], Iterable[bytes]]

STATE = "postroom.idempotency"


def turn_of(environ: Any) -> Turn:
    """The turn of a request, by its environ or by anything that has one (Flask, Werkzeug)."""
    inside = environ if isinstance(environ, dict) else getattr(environ, "environ", {})
    return turn_in(inside.get(STATE), "IdempotencyMiddleware")


class IdempotencyMiddleware:
    """One request, one effect: see the module."""

    def __init__(self, app: App, keys: Keys) -> None:
        keys.for_threads()
        self.app = app
        self.keys = keys

    def __call__(self, environ: Environ, start_response: Start) -> Iterable[bytes]:
        seen = _seen(environ)
        found = self.keys.find(seen.method, seen.path)
        if found is None:
            return self.app(environ, start_response)
        operation, policy = found
        if needs_body(policy, seen):
            body = _read(environ, policy.most_request_bytes)
            if isinstance(body, Answer):
                return _say(body, start_response)
            environ["wsgi.input"] = io.BytesIO(body)
            environ["CONTENT_LENGTH"] = str(len(body))
            seen = replace(seen, body=body)
        asked = asked_of(seen, operation, policy, self.keys.whose(environ))
        refuse_twice(environ.get(STATE), asked)
        if isinstance(asked, Answer):
            return _say(asked, start_response)
        if policy.mode != "external":
            return self._inside(asked, policy, environ, start_response)
        if asked is None:
            return self.app({**environ, STATE: Turn(None)}, start_response)
        return self._external(asked, environ, start_response)

    def _external(self, asked: Asked, environ: Environ, start: Start) -> Iterable[bytes]:
        engines = self.keys.engines
        try:
            verdict = drive(opening(asked), engines)
        except PostroomError as error:
            if may_run_without(asked, error):
                return self.app({**environ, STATE: Turn(asked)}, start)
            return _say(refused(asked, error), start)
        if not isinstance(verdict, Mine):
            tell_replay(asked, verdict)
            return _say(problems.answer_to(verdict, asked.policy), start)
        turn = Turn(asked)
        environ[STATE] = turn
        settled = False

        def settle(answer: Answer) -> Answer | None:
            nonlocal settled
            settled = True
            try:
                instead = drive(closing(asked, verdict, answer, kept=turn.kept), engines)
            except PostroomError as error:
                tell_unprotected(asked, error)
                return None
            return None if instead is None else problems.answer_to(instead, asked.policy)

        with self.keys.beats.kept(asked, verdict.claim):
            try:
                return _carry_out(self.app, environ, start, asked.policy, settle)
            except BaseException as error:
                if not settled:
                    give_up(asked, verdict, error, engines, kept=turn.kept)
                raise
            finally:
                turn.over = True

    def _inside(
        self, asked: Asked | None, policy: Policy, environ: Environ, start: Start
    ) -> Iterable[bytes]:
        turn = Turn(asked, policy)
        environ[STATE] = turn

        def settle(answer: Answer) -> Answer | None:
            return turn.instead if turn.instead is not None else turn.settle(answer)

        try:
            return _carry_out(self.app, environ, start, policy, settle)
        except Answered as answered:
            return _say(answered.answer, start)
        except Exception as error:
            if (instead := turn.told_instead(error)) is None:
                raise
            return _say(instead, start)
        finally:
            turn.end()


def _carry_out(
    app: App,
    environ: Environ,
    start: Start,
    policy: Policy,
    settle: Callable[[Answer], Answer | None],
) -> Iterable[bytes]:
    """Run the application, settle its answer, and only then let it out."""
    told: list[Any] = []
    parts: list[bytes] = []

    def start_response(status: str, headers: list[tuple[str, str]], *error: Any) -> Any:
        told[:] = [status, headers]
        return parts.append

    answered = app(environ, start_response)
    streaming = False
    try:
        chunks = iter(answered)
        size = sum(map(len, parts))
        first = next(chunks, None)
        if first is not None:
            parts.append(first)
        if not told:
            raise RuntimeError("the application ended without an answer")
        status, headers = told
        known = any(name.lower() == "content-length" for name, _ in headers)
        whole = isinstance(answered, list | tuple)
        streamed = first is not None and not known and not whole
        if first is not None and not streamed:
            for chunk in chunks:
                parts.append(chunk)
                size += len(chunk)
                if size > policy.most_stored_bytes:
                    break
        answer = Answer(int(status.split()[0]), tuple(headers), b"".join(parts))
        too_large = len(answer.body) > policy.most_stored_bytes
        if streamed or too_large:
            answer = answer.without_body("streamed" if streamed else "too_large")
        instead = settle(answer)
        if instead is not None:
            return _say(instead, start)
        start(status, headers)
        if not streamed and not too_large:
            return [b"".join(parts)]
        streaming = True
        return _rest(parts, chunks, answered)
    finally:
        if not streaming and hasattr(answered, "close"):
            answered.close()


def _rest(parts: list[bytes], chunks: Iterator[bytes], answered: Any) -> Iterator[bytes]:
    try:
        yield from parts
        yield from chunks
    finally:
        if hasattr(answered, "close"):
            answered.close()


def _seen(environ: Environ) -> Seen:
    headers = [
        (name[5:].replace("_", "-").lower(), value)
        for name, value in environ.items()
        if name.startswith("HTTP_")
    ]
    headers.append(("content-type", environ.get("CONTENT_TYPE", "")))
    # WSGI gives bytes of the path as latin-1.
    path = environ.get("PATH_INFO", "").encode("latin-1").decode("utf-8", "replace")
    query = environ.get("QUERY_STRING", "")
    root = environ.get("SCRIPT_NAME", "").encode("latin-1").decode("utf-8", "replace")
    return Seen(environ["REQUEST_METHOD"], path or "/", query, headers, root=root)


def _read(environ: Environ, limit: int) -> bytes | Answer:
    """The whole body, or what is wrong with it: half of one is nobody's request."""
    text = environ.get("CONTENT_LENGTH") or ""
    if text.isdecimal():
        if int(text) > limit:
            return problems.too_large(limit)
        whole: bytes = environ["wsgi.input"].read(int(text))
        return whole if len(whole) == int(text) else problems.incomplete()
    if not environ.get("wsgi.input_terminated"):
        return b""
    body: bytes = environ["wsgi.input"].read(limit + 1)
    return problems.too_large(limit) if len(body) > limit else body


def _say(answer: Answer, start: Start) -> Iterable[bytes]:
    try:
        phrase = HTTPStatus(answer.status).phrase
    except ValueError:
        phrase = "Status"
    headers = [(name.title(), value) for name, value in answer.headers]
    told = not bodiless(answer.status)
    if told:
        headers.append(("Content-Length", str(len(answer.body))))
    start(f"{answer.status} {phrase}", headers)
    return [answer.body] if told else []
