"""Requests: a row in the ledger and a message in the outbox, in the caller's own transaction.

Promise: a key is accepted once. Whoever comes again with the same request is told what became of
it, whoever comes with another one under the same key is told that, and neither writes anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from postroom import signals
from postroom.databases.caller import carry_out, carry_out_async
from postroom.flow import Flow
from postroom.ledger import store
from postroom.ledger.rules import HEADER, Entry, canonical, checked_name, digest
from postroom.messages import DEFAULT_MAX_BYTES, Draft, encode
from postroom.outbox import wake, writing

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection, Engine

    Bind = Engine | Connection | None

__all__ = ["Ledger", "Receipt", "Request", "accept"]

_WHAT = "request"


@dataclass(frozen=True, slots=True)
class Receipt:
    """What `accept` says of a request.

    `entry` is what stands in the ledger. `new`: it was accepted now. `conflict`: the key belongs to
    another request, which is the one in `entry`.
    """

    entry: Entry
    new: bool
    conflict: bool


@dataclass(frozen=True, slots=True)
class Request:
    """A request ready to be accepted: its row, and the message that carries it."""

    wish: store.Wish
    item: writing.Item

    @classmethod
    def of(
        cls,
        document: Any,
        *,
        key: str,
        scope: str,
        type: str,
        topic: str,
        order_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        max_bytes: int = DEFAULT_MAX_BYTES,
    ) -> Request:
        """The request for a document that JSON can hold; its message's id is chosen here."""
        content = canonical(document)
        draft = Draft(
            payload=content,
            content_type="application/json",
            type=type,
            topic=topic,
            key=order_key,
            headers={**(headers or {}), HEADER: checked_name("key", key)},
        )
        message = encode(draft, max_bytes=max_bytes)
        wish = store.Wish(message.id, checked_name("scope", scope), key, digest(content), content)
        return cls(wish, writing.item(message, serialize_key=False, chosen_id=False))


def accept(request: Request) -> Flow[Receipt]:
    """Enter a request and publish its message, or find what its key stands for.

    May be carried out again with the same request: the second time finds the first.
    """
    wish = request.wish
    new = yield from store.enter(wish)
    if new:
        yield from writing.write([request.item])
        entry = Entry(
            *(wish.id, wish.scope, wish.key, wish.digest, "accepted", wish.request, None, 0),
            *(None, None, None, None, 0, 0, None),
        )
        return Receipt(entry, True, False)
    found = yield from store.known(wish.scope, wish.key)
    # Its own id: the commit of an earlier try took place, though its answer was lost.
    return Receipt(found, found.id == wish.id, found.digest != wish.digest)


class Ledger:
    """The register of requests sent through the outbox. Makes no connection and holds no state.

        receipt = ledger.accept(tx, {"to": "ada", "amount": 5}, key=key, type="pay", topic="pay")

    A `document` is what JSON can hold; requests are the same if it is, however it is spelled. The
    relay writes down what became of a request when it settles its message.
    """

    def accept(
        self,
        tx: Any,
        document: Any,
        *,
        key: str,
        type: str,
        topic: str,
        scope: str = "requests",
        order_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        bind: Bind = None,
    ) -> Receipt:
        """Accept a request on `tx`, your session or connection.

        `scope` keeps the keys of one user or purpose from those of others; `order_key` keeps
        messages in order, as the key of `publish` does.
        """
        request = Request.of(
            document,
            key=key,
            scope=scope,
            type=type,
            topic=topic,
            order_key=order_key,
            headers=headers,
        )
        return carry_out(tx, accept(request), what=_WHAT, instead="ledger.accept_async", bind=bind)

    async def accept_async(
        self,
        tx: Any,
        document: Any,
        *,
        key: str,
        type: str,
        topic: str,
        scope: str = "requests",
        order_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        bind: Bind = None,
    ) -> Receipt:
        """`accept` on a session or connection of any kind."""
        request = Request.of(
            document,
            key=key,
            scope=scope,
            type=type,
            topic=topic,
            order_key=order_key,
            headers=headers,
        )
        return await carry_out_async(tx, accept(request), what=_WHAT, bind=bind)

    def find(
        self, tx: Any, key: str, *, scope: str = "requests", bind: Bind = None
    ) -> Entry | None:
        """What stands under a key; None if nothing does."""
        flow = store.find(scope, key)
        return carry_out(tx, flow, what=_WHAT, instead="ledger.find_async", bind=bind)

    async def find_async(
        self, tx: Any, key: str, *, scope: str = "requests", bind: Bind = None
    ) -> Entry | None:
        """`find` on a session or connection of any kind."""
        return await carry_out_async(tx, store.find(scope, key), what=_WHAT, bind=bind)

    def committed(self, receipt: Receipt) -> None:
        """Tell of your own commit, right after it: relays wake at once, and it is logged."""
        if receipt.new:
            entry = receipt.entry
            wake.committed(1)
            signals.emit(
                "request.accepted",
                id=entry.id,
                idempotency_key=entry.key,
                status=entry.state,
                attempts=0,
                last_error_code=None,
                adapter=None,
            )
