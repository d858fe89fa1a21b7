"""What about exchanges and queues in RabbitMQ would lose messages.

AMQP cannot tell how queues are bound and what they are made of; RabbitMQ's management plugin can,
and is asked where the URL names it.
"""

from __future__ import annotations

import asyncio
import base64
import json
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from postroom.brokers.address import Address
from postroom.brokers.amqp_link import Wire
from postroom.brokers.amqp_wire import no_queue
from postroom.brokers.invoke import describe
from postroom.errors import Unreachable

__all__ = ["examine", "matches"]

_SECONDS = 5.0
_MOST_BYTES = 16 * 1024 * 1024


async def examine(wire: Wire, address: Address, exchange: str, topics: Sequence[str]) -> list[str]:
    """What would lose messages to these topics, a sentence each."""
    from aiormq.exceptions import ChannelNotFoundEntity

    found: list[str] = []
    queues: set[str] = set()
    management = address.options.get("management")
    if not exchange:
        for topic in topics:
            channel: Any = await wire.connection.channel(publisher_confirms=False)
            try:
                await channel.queue_declare(topic, passive=True)
                queues.add(topic)
            except ChannelNotFoundEntity:
                found.append(no_queue(topic, exchange).text)
    elif management:
        vhost = quote(address.path[1:] or "/", safe="")
        name = quote(exchange, safe="")
        where = f"{management.rstrip('/')}/api/exchanges/{vhost}/{name}/bindings/source"
        bindings = await _get(where, address) or []
        for topic in topics:
            bound = {
                each["destination"]
                for each in bindings
                if each["destination_type"] == "queue" and matches(each["routing_key"], topic)
            }
            queues |= bound
            if not bound:
                found.append(no_queue(topic, exchange).text)
    if not management:
        found.append(
            "how queues are bound and what becomes of what they reject cannot be seen over AMQP: "
            "add ?management=http://host:15672 to the URL to have it looked at"
        )
        return found
    for queue in sorted(queues):
        vhost, name = quote(address.path[1:] or "/", safe=""), quote(queue, safe="")
        about = await _get(f"{management.rstrip('/')}/api/queues/{vhost}/{name}", address)
        found += faults(queue, about or {})
    return found


def matches(pattern: str, topic: str) -> bool:
    """Whether a topic exchange gives a routing key to a binding: * is a word, # any number."""
    return _matches(pattern.split("."), topic.split("."))


def _matches(pattern: Sequence[str], words: Sequence[str]) -> bool:
    reached = {0}  # how many words the pattern so far may have used up
    for part in pattern:
        if part == "#":
            reached = set(range(min(reached, default=len(words) + 1), len(words) + 1))
        else:
            reached = {n + 1 for n in reached if n < len(words) and part in ("*", words[n])}
    return len(words) in reached


def faults(queue: str, about: Mapping[str, Any]) -> Iterable[str]:
    """What about one queue loses messages, going by what the management plugin says of it."""
    policy = about.get("effective_policy_definition") or {}
    arguments = about.get("arguments") or {}
    settings = {**policy, **{name.removeprefix("x-"): each for name, each in arguments.items()}}
    if about.get("durable") is False:
        yield f"queue {queue} is not durable: a restart of RabbitMQ loses it with all it holds"
    if not settings.get("dead-letter-exchange"):
        yield (
            f"queue {queue} has no dead-letter exchange: what is rejected, expires or comes too "
            "often is dropped; set dead-letter-exchange by a policy"
        )
    if "message-ttl" in settings:
        yield f"queue {queue} drops messages after {settings['message-ttl']} ms (message-ttl)"
    limited = "max-length" in settings or "max-length-bytes" in settings
    if limited and settings.get("overflow") not in ("reject-publish", "reject-publish-dlx"):
        yield f"queue {queue} drops its oldest messages when full: set overflow to reject-publish"


class _Stays(urllib.request.HTTPRedirectHandler):
    """Follows nobody elsewhere: the password would go along."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _direct() -> urllib.request.OpenerDirector:
    """Past every proxy of the environment, too: RabbitMQ's password is for RabbitMQ."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), _Stays)


async def _get(url: str, address: Address) -> Any:
    if not url.startswith(("http://", "https://")):
        raise Unreachable("management is the address of RabbitMQ's plugin, as http://host:15672")
    who = f"{address.user or 'guest'}:{address.password or 'guest'}".encode()
    secret = {"Authorization": f"Basic {base64.b64encode(who).decode()}"}
    request = urllib.request.Request(url, headers=secret)  # noqa: S310  looked at above

    def get() -> Any:
        with _direct().open(request, timeout=_SECONDS) as answer:
            return json.loads(answer.read(_MOST_BYTES))

    try:
        return await asyncio.to_thread(get)
    except (OSError, ValueError) as error:
        text = address.without_secrets(describe(error))
        raise Unreachable(f"RabbitMQ's management plugin does not answer: {text}") from error
