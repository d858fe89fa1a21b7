"""The order gateway as an ASGI application: orders come in over HTTP and are accepted once each.

    app = create_app("postgresql://localhost/app", "call:shop.exchange:send")

`POST /do/order` enters an order in the ledger and its message in the outbox, in one commit, and
answers 202; the same key and order again are answered with what became of it, another order under
the same key with 409. The relay beside it sends orders through the adapter and writes down the end.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import re
import time
from collections import Counter as Tally
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from postroom import signals
from postroom.errors import (
    ConfigurationError,
    InvalidMessage,
    MissingDriver,
    PostroomError,
    Unreachable,
)
from postroom.gateway import TOKENS, answers, orders
from postroom.gateway.counter import Counter
from postroom.gateway.openapi import document
from postroom.gateway.serving import is_loopback
from postroom.idempotency.problems import HEADER, MEDIA_TYPE, PROBLEMS, REPLAYED
from postroom.idempotency.rules import BadKey, checked_key, parse_key, scope_name
from postroom.ledger.rules import Entry
from postroom.outbox.relay import Relay
from postroom.outbox.requests import Receipt, Request
from postroom.worker import version
from postroom.worker.vitals import Health

try:
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect
    from starlette.requests import Request as Call
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
except ImportError as error:
    raise MissingDriver(
        "The gateway needs Starlette and uvicorn: pip install 'postroom[gateway]'."
    ) from error

if TYPE_CHECKING:
    from postroom.config import RelaySettings, Routes

__all__ = ["SCOPE", "TOPIC", "create_app"]

SCOPE = "orders"
TOPIC = "orders.place"
TYPE = "order.place.v1"
FIELD = "idempotency_key"
MOST_WAIT_SECONDS = 30.0
MOST_WAITING = 1000
WAIT = r"-?[0-9]{1,20}(\.[0-9]{1,400})?([eE][+-]?[0-9]{1,3})?"
JSON_TYPE = r"application/([!#$&^_.+a-z0-9-]+\+)?json"
LOOK_FIRST_SECONDS = 0.01
LOOK_MOST_SECONDS = 0.2


class Problem(Exception):
    """An answer that is not what was asked for."""

    def __init__(self, status: int, kind: str, detail: str, *faults: orders.Fault) -> None:
        super().__init__(detail)
        self.status, self.kind, self.detail, self.faults = status, kind, detail, faults


class Status(JSONResponse):
    """Where an order stands, with its result as the exchange spelled it."""

    def render(self, content: Any) -> bytes:
        """The body."""
        return answers.body(content)


def create_app(
    database: str,
    adapter: str | Mapping[str, str] | Routes | None = None,
    *,
    tokens: Mapping[str, str | Sequence[str]] | None = None,
    connections: int = 8,
    patience_seconds: float = 5.0,
    settings: RelaySettings | None = None,
    **relay: Any,
) -> Starlette:
    """The gateway on a database that has Postroom's tables.

    `adapter` is where the relay sends orders, such as `call:module:function`; without one some
    other process must run a relay. `tokens` maps names of clients to their secrets, one or several:
    each then sees its own orders alone. A request waits `patience_seconds` for the database, then
    is told so. What else is given goes to the `Relay`.
    """
    counter = Counter(database, connections=connections, patience_seconds=patience_seconds)
    gateway = Gateway(counter, tokens or {}, sends=adapter is not None)
    how = {"settings": settings, **relay}

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        gateway.begin()
        app.state.closing = gateway.closing
        async with AsyncExitStack() as stack:
            stack.push_async_callback(gateway.counter.close)
            await gateway.counter.open()
            if adapter is not None:
                gateway.relay = Relay(database, adapter, **how)
                await stack.enter_async_context(gateway.relay)
                _warn(gateway.relay)
            try:
                yield
            except asyncio.CancelledError:
                # Whoever did not let requests end does not wait for the relay either.
                if (task := asyncio.current_task()) is not None:
                    task.cancel()
                raise

    app = Starlette(
        routes=[
            Route("/do/order", gateway.place, methods=["POST"]),
            Route("/do/order/{key:path}", gateway.look, methods=["GET"]),
            Route("/openapi.json", gateway.describe, methods=["GET"]),
            Route("/healthz", gateway.live, methods=["GET"]),
            Route("/readyz", gateway.ready, methods=["GET"]),
        ],
        lifespan=lifespan,
        exception_handlers={
            Problem: _tell_problem,
            HTTPException: _tell_http,
            PostroomError: _tell_trouble,
        },
    )
    app.router.redirect_slashes = False
    app.state.gateway = gateway
    return app


class Gateway:
    """What the routes do."""

    def __init__(
        self, counter: Counter, tokens: Mapping[str, str | Sequence[str]], *, sends: bool = False
    ) -> None:
        self.counter = counter
        self._tokens = [
            (name, _hashed(secret)) for name in tokens for secret in _secrets(name, tokens[name])
        ]
        _check_owners(self._tokens)
        self._sends = sends
        self._alone = len({name for name, _ in self._tokens}) < 2
        self.begin()

    def begin(self) -> None:
        """Before it is opened, each time: what waits belongs to one event loop."""
        self.relay: Relay | None = None  # there is one while it is open, if it `sends`
        self.closing = asyncio.Event()  # nobody waits any longer
        self._waiting: Tally[str] = Tally()
        self.counter.begin()

    async def place(self, call: Call) -> Response:
        """`POST /do/order`"""
        scope = self._scope(call)
        wait = _wait(call)
        body = orders_body(await _read(call))
        key = _key(call, body)
        order, faults = orders.checked(body)
        if faults:
            names = ", ".join(dict.fromkeys(fault.field for fault in faults))
            raise Problem(422, "invalid-order", f"wrong: {names}", *faults)
        receipt = await self._accept(order, key, scope)
        if receipt.conflict:
            raise Problem(409, "key-reused", f"the key {key!r} belongs to another order")
        entry = receipt.entry
        if wait and not entry.finished:
            entry = await self._finished(call, entry, wait)
        headers = {"Location": f"/do/order/{_in_a_path(key)}"}
        if not receipt.new:
            headers[REPLAYED] = "true"
        over = not receipt.new or entry.finished
        return Status(_shown(entry), status_code=200 if over else 202, headers=headers)

    async def _accept(self, order: dict[str, Any], key: str, scope: str) -> Receipt:
        try:
            request = Request.of(order, key=key, scope=scope, type=TYPE, topic=TOPIC)
        except InvalidMessage as error:
            raise Problem(422, "invalid-order", str(error)) from None
        return await self.counter.accept(request)

    async def look(self, call: Call) -> Response:
        """`GET /do/order/{key}`"""
        scope = self._scope(call)
        wait, key = _wait(call), call.path_params["key"]
        try:
            entry = await self.counter.find(scope, checked_key(key))
        except BadKey:
            entry = None
        if entry is None:
            raise Problem(404, "no-such-order", "there is no order under this key")
        if wait and not entry.finished:
            entry = await self._finished(call, entry, wait)
        return Status(_shown(entry))

    async def describe(self, call: Call) -> Response:
        """`GET /openapi.json`"""
        return JSONResponse(document(version(), secured=bool(self._tokens)))

    def health(self) -> Health:
        """Whether its relay lives, and whether it can work. May be asked from any thread."""
        if self.relay is not None:
            return self.relay.health()
        return Health(unready=("the relay is not started yet",) if self._sends else ())

    async def live(self, call: Call) -> Response:
        """`GET /healthz`: the loop runs, and so does the relay if there is one."""
        troubles = self.health().unhealthy
        return self._verdict(call, troubles) if troubles else JSONResponse({"ok": True})

    async def ready(self, call: Call) -> Response:
        """`GET /readyz`: the ledger can be read, and the relay can work if there is one."""
        try:
            await self.counter.open()
            await self.counter.find(SCOPE, "ready?")
        except PostroomError as error:
            said = await _tell_trouble(call, error)
            return said if self._knows(call) else JSONResponse({"ok": False}, 503)
        health = self.health()
        return self._verdict(call, health.unhealthy + health.unready)

    def _verdict(self, call: Call, troubles: tuple[str, ...]) -> Response:
        told: dict[str, Any] = {"ok": not troubles}
        # They name databases, users and routes: for those alone who may place orders.
        if self._knows(call):
            told["problems"] = list(troubles)
        return JSONResponse(told, 503 if troubles else 200)

    async def _finished(self, call: Call, entry: Entry, seconds: float) -> Entry:
        """The entry once it is finished, or as it stands after so long."""
        if not self._may_wait(entry.scope):
            return entry
        until, pause = time.monotonic() + seconds, LOOK_FIRST_SECONDS
        self._waiting[entry.scope] += 1
        try:
            while not entry.finished and (left := until - time.monotonic()) > 0:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.closing.wait(), min(pause, left))
                if self.closing.is_set() or await call.is_disconnected():
                    break
                entry = await self.counter.find(entry.scope, entry.key) or entry
                pause = min(pause * 1.5, LOOK_MOST_SECONDS)
        finally:
            self._waiting[entry.scope] -= 1
        return entry

    def _may_wait(self, scope: str) -> bool:
        """Whether there is room for one more: a client has at most as many as are left, so there
        always are some for another."""
        left = MOST_WAITING - self._waiting.total()
        return left > 0 and (self._alone or self._waiting[scope] < left)

    def _knows(self, call: Call) -> bool:
        """Whether it comes from somebody who may place orders."""
        try:
            self._scope(call)
        except Problem:
            return False
        return True

    def _scope(self, call: Call) -> str:
        """Whose keys these are: a client never sees another's order, nor does a web page that its
        browser has open."""
        if call.headers.get("sec-fetch-site", "").strip().lower() == "cross-site":
            raise Problem(403, "cross-site", "a page of another site sent this: call it from yours")
        if not self._tokens:
            _check_host(call)
            return SCOPE
        kind, _, token = call.headers.get("authorization", "").partition(" ")
        given = _hashed(token := token.strip())
        owners = [n for n, known in self._tokens if hmac.compare_digest(known, given)]
        if kind.lower() != "bearer" or not token or not owners:
            raise Problem(401, "unauthorized", "a bearer token is needed that somebody has")
        return scope_name((SCOPE, owners[0]))


# ── What comes in ──────────────────────────────────────────────────────────────────────────────


def orders_body(body: bytes) -> dict[str, Any]:
    """The body's document, or a problem."""
    try:
        return orders.parse(body)
    except orders.BadBody as error:
        faults = [orders.Fault(error.field, str(error))] if error.field else []
        raise Problem(400, "bad-body", str(error), *faults) from None


def _check_host(call: Call) -> None:
    """Raise unless it was called from this machine, and by an address of its own. A page whose name
    was made to lead here is a stranger, though its browser takes it for one of ours; tokens would
    keep strangers out."""
    served, port = call.scope.get("server") or ("", None)
    # Without a port it is a socket in a directory, which has owners of its own.
    if port is not None and not is_loopback(str(served)):
        text = f"anybody could place orders at {served}: set {TOKENS}, or serve it at 127.0.0.1"
        raise Problem(421, "tokens-needed", text)
    name = call.headers.get("host")
    if name is None:
        return  # no browser leaves it out
    try:
        host = urlsplit(f"//{name}").hostname or ""
    except ValueError:
        host = ""
    if not is_loopback(host):
        text = f"without tokens it is called by its address, such as 127.0.0.1, and not {name!r}"
        raise Problem(421, "wrong-host", f"{text}; or set {TOKENS}")


async def _read(call: Call) -> bytes:
    given = call.headers.get("content-type", "")
    # Without one a browser sends a body for any page, and does not ask first.
    if not re.fullmatch(JSON_TYPE, given.partition(";")[0].strip().lower()):
        said = f"not {given[:100]!r}" if given else "and Content-Type must say so"
        raise Problem(415, "not-json", f"the body must be application/json, {said}")
    body = bytearray()
    try:
        async for chunk in call.stream():
            body += chunk
            if len(body) > orders.BODY_BYTES:
                raise Problem(413, "too-large", f"the limit is {orders.BODY_BYTES:,} bytes")
    except ClientDisconnect:
        raise Problem(400, "bad-body", "the body ended early") from None
    return bytes(body)


def _key(call: Call, body: dict[str, Any]) -> str:
    """The key, from the header or the body, which it is taken out of."""
    inside = body.pop(FIELD, None)
    where = HEADER
    try:
        key = parse_key(call.headers.getlist(HEADER))
        if inside is not None:
            where, outside = FIELD, key
            key = checked_key(inside)
            if outside not in (None, key):
                raise BadKey("it differs from the header's")
    except BadKey as error:
        text = str(error)
        raise Problem(400, "key-invalid", f"{where}: {text}", orders.Fault(where, text)) from None
    if key is None:
        fault = orders.Fault(HEADER, "is required")
        text = f"Say which order this is: {HEADER}, or {FIELD} in the body"
        raise Problem(400, "key-missing", text, fault)
    return key


def _wait(call: Call) -> float:
    given = call.query_params.get("wait")
    if given is None:
        return 0.0
    # float() alone would take "1_0", " 5" and "nan" too.
    seconds = float(given) if re.fullmatch(WAIT, given) else -1.0
    if not 0 <= seconds <= MOST_WAIT_SECONDS:
        text = f"must be seconds from 0 to {MOST_WAIT_SECONDS:g}"
        raise Problem(400, "bad-wait", f"wait {text}", orders.Fault("wait", text))
    return seconds


# ── What goes out ──────────────────────────────────────────────────────────────────────────────


def _in_a_path(key: str) -> str:
    """A key as a part of a path that nobody takes for a step upwards."""
    return key.replace(".", "%2E") if key in (".", "..") else quote(key, safe="")


def _shown(entry: Entry) -> dict[str, Any]:
    error = {"code": entry.error_code, "detail": entry.error} if entry.error_code else None
    return {
        "idempotency_key": entry.key,
        "client_order_id": entry.id,
        "status": entry.state,
        "finished": entry.finished,
        "attempts": entry.attempts,
        "order": json.loads(entry.request),
        "result": answers.as_json(entry.answer),
        "last_error": error,
    }


def _problem(
    status: int, kind: str, detail: str, faults: tuple[orders.Fault, ...] = ()
) -> Response:
    body: dict[str, Any] = {
        "type": f"urn:postroom:problem:{kind}",
        "title": PROBLEMS[kind][1] if kind in PROBLEMS else kind.replace("-", " ").capitalize(),
        "status": status,
        "detail": detail,
    }
    if faults:
        body["errors"] = [{"field": each.field, "detail": each.detail} for each in faults]
    return JSONResponse(body, status_code=status, media_type=MEDIA_TYPE)


async def _tell_problem(call: Call, error: Exception) -> Response:
    assert isinstance(error, Problem)
    response = _problem(error.status, error.kind, error.detail, error.faults)
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


async def _tell_http(call: Call, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = {404: "no-such-page", 405: "no-such-method"}.get(error.status_code, "refused")
    response = _problem(error.status_code, kind, error.detail)
    for name, value in (error.headers or {}).items():
        response.headers[name] = value
    return response


async def _tell_trouble(call: Call, error: Exception) -> Response:
    """The database's fault: whether the order was accepted is told to whoever asks again."""
    kind = "unreachable" if isinstance(error, Unreachable) else "trouble"
    why = str(error.__cause__ or error) or type(error).__name__
    signals.emit("gateway.trouble", path=call.url.path, error=signals.redact(why))
    detail = "the database does not answer; try again with the same key"
    response = _problem(503, kind, detail)
    response.headers["Retry-After"] = "1"
    return response


def _warn(relay: Relay) -> None:
    """Say at the start what could not be said of an order later."""
    if not relay.sender.can_be_asked(TOPIC):
        advice = "give it a `lookup`, or orders that got no answer stay unknown and may be repeated"
        signals.emit("gateway.unasked", adapter=relay.sender.adapter(TOPIC), advice=advice)


def _secrets(name: str, given: Any) -> list[str]:
    """A client's secrets, or an error if anybody could send one, or nobody. None is shown."""
    if not name.strip():
        raise ConfigurationError("a client of tokens has no name: its orders are kept under it.")
    many = isinstance(given, Iterable) and not isinstance(given, str)
    secrets = list(given) if many else [given]
    if not secrets or any(each is None or not str(each).strip() for each in secrets):
        raise ConfigurationError(
            f"the client {name} has no secret, or an empty one, and anybody could send that: give "
            "it one, or leave the client out."
        )
    if not all(isinstance(each, str) and re.fullmatch(r"[!-~]+", each) for each in secrets):
        raise ConfigurationError(
            f"the secret of {name} holds what no HTTP header can, so nobody could send it: use "
            "letters, digits and signs of ASCII, without spaces."
        )
    return secrets


def _check_owners(tokens: Sequence[tuple[str, bytes]]) -> None:
    """Raise if a secret has two owners: nobody could tell who of them sends it."""
    owners: dict[bytes, str] = {}
    for name, hashed in tokens:
        if (other := owners.setdefault(hashed, name)) != name:
            raise ConfigurationError(
                f"the clients {other} and {name} have the same secret, so both would be {other}: "
                "give each its own."
            )


def _hashed(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()
