"""`Keys`: the register of requests in a database, and what a request says about itself.

    keys = Keys("postgresql://…", scope=lambda request: request["user"].username,
                policies={"POST /orders": Policy(mode="same_transaction", required=True)})

The scope is whose key it is. Without one, whoever guesses or repeats a key would be told another's
answer, so it has no default: a service with a single client says `scope=SHARED`. It must be a
verified identity: answers from memory are given before the route checks anything.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from postroom import framework
from postroom.calling import is_async
from postroom.errors import ConfigurationError
from postroom.idempotency import problems
from postroom.idempotency.canonical import fingerprint
from postroom.idempotency.exchange import Asked
from postroom.idempotency.policy import Policies, Policy, checked_policies
from postroom.idempotency.rules import (
    Answer,
    BadKey,
    Name,
    checked_key,
    is_nobody,
    parse_key,
    scope_name,
)

if TYPE_CHECKING:
    from postroom.idempotency.engines import Engines
    from postroom.idempotency.leases import Beats

__all__ = ["AT_CLAIM", "SHARED", "UNKEYED", "Keys", "Seen", "asked_of"]


class UNKEYED:
    """What `scope` gives for a request that keys are none of the business of."""


def SHARED(request: Any) -> str:
    """The scope of a service that has one client, or whose keys nobody else can know."""
    return "shared"


def AT_CLAIM(request: Any) -> Any:
    """The scope of routes that say it where they claim, after their own authentication."""
    return AT_CLAIM


@dataclass(frozen=True, slots=True)
class Seen:
    """A request as far as its key is concerned. Names of headers are lower case."""

    method: str
    path: str
    query: str = ""
    headers: Sequence[tuple[str, str]] = ()
    body: bytes = field(default=b"", repr=False)
    root: str = ""  # of the application, before its paths

    def header(self, name: str) -> list[str]:
        """Every value of a header."""
        return [value for each, value in self.headers if each == name]


class Keys:
    """Idempotency keys in one database: give it to a middleware or a decorator.

    In a Django project `using` names an alias of DATABASES in place of a URL; without both it is
    the one of POSTROOM. It is resolved at use, so that tests work on the test database.
    """

    def __init__(
        self,
        database: str | None = None,
        *,
        scope: Callable[[Any], Any],
        using: str | None = None,
        policies: Policies | Mapping[str, Policy] | None = None,
        connections: int = 10,
        timeout_seconds: float = 10.0,
    ) -> None:
        if not callable(scope):
            raise ConfigurationError(
                "scope must be a function that says whose key it is, such as "
                "lambda request: request.user.id; for a single client use SHARED."
            )
        if not timeout_seconds > 0:
            raise ConfigurationError("timeout_seconds of Keys must be above zero.")
        self.engines = _engines(
            database, using, connections=connections, timeout_seconds=timeout_seconds
        )
        self.scope = scope
        self.policies = checked_policies(policies)
        if scope is AT_CLAIM and self.policies.has_external:
            raise ConfigurationError(
                'scope=AT_CLAIM is for routes that claim themselves: "external" ones need a scope.'
            )

    def find(self, method: str, path: str) -> tuple[str, Policy] | None:
        """The operation and policy of a request; None: keys are none of its business."""
        return self.policies.find(method, path)

    def whose(self, request: Any) -> Any:
        """What the scope says of a request, or the answer it refuses it with."""
        try:
            return self.scope(request)
        except Exception as error:
            if (refusal := problems.refusal(error)) is None:
                raise
            return refusal

    async def whose_async(self, request: Any) -> Any:
        """The same where the scope may be async."""
        try:
            who = self.scope(request)
            return await who if inspect.isawaitable(who) else who
        except Exception as error:
            if (refusal := problems.refusal(error)) is None:
                raise
            return refusal

    def for_threads(self) -> None:
        """Refuse a scope that nobody would await."""
        if is_async(self.scope):
            raise ConfigurationError(
                "the scope of these Keys is async, and this application is not: give it a function "
                "that is not async."
            )

    def for_decorator(self) -> None:
        """Refuse a scope that a decorator could never learn."""
        self.for_threads()
        if self.scope is AT_CLAIM:
            raise ConfigurationError(
                "scope=AT_CLAIM is for routes that claim themselves: a decorator needs a function "
                "that says whose key it is, such as lambda request: request.user.id."
            )

    def policy_in(self, method: str, path: str, given: Policy | None) -> Policy:
        """The policy of a view that is carried out in its own transaction: the one it was given, or
        the one that stands here for its route."""
        found = None if given else self.find(method, path)
        return replace(given or (found[1] if found else Policy()), mode="same_transaction")

    @cached_property
    def beats(self) -> Beats:
        """Keeps the leases of whatever works in threads."""
        from postroom.idempotency.leases import Beats

        return Beats(self.engines)

    async def close_async(self) -> None:
        """Give every connection up that this event loop has, and those of threads."""
        await self.engines.close_async()

    def close(self) -> None:
        """The same in an application without an event loop."""
        self.engines.close()

    def __repr__(self) -> str:
        return f"Keys({self.engines.name!r})"


def _engines(database: str | None, using: str | None, **how: Any) -> Engines:
    from postroom.idempotency.engines import Engines

    if database is not None and using is not None:
        raise ConfigurationError("Keys takes a database URL or using=…, not both.")
    if database is not None:
        return Engines(database, **how)
    if (host := framework.present()) is None:
        raise ConfigurationError(
            'Keys needs a database URL, or in a Django project the app "postroom.django" in '
            "INSTALLED_APPS and using=…."
        )
    from postroom.idempotency.django_engines import DjangoEngines

    return DjangoEngines(host, using, **how)


def needs_body(policy: Policy, seen: Seen) -> bool:
    """Whether a request can have a key at all: one without is not read to its end."""
    return policy.body_field is not None or bool(seen.header(problems.HEADER.lower()))


def asked_of(seen: Seen, operation: str, policy: Policy, scope: object) -> Asked | Answer | None:
    """The request with its key; a problem with it; or None: it has none and needs none.

    A key without a principal is refused: to carry the request out would leave it unprotected.
    """
    if scope is UNKEYED:
        return None
    try:
        key = _key_of(seen, policy)
        if key is None:
            return problems.missing(policy) if policy.required else None
    except BadKey as error:
        return problems.invalid(str(error))
    if isinstance(scope, Answer):
        return scope
    if is_nobody(scope):
        return problems.unowned()
    chosen = {name.lower() for name in policy.fingerprint_headers}
    digest = fingerprint(
        seen.method,
        seen.path.rstrip("/") or "/",  # as the operation: routers redirect to the other spelling
        seen.query,
        seen.body,
        next(iter(seen.header("content-type")), ""),
        [pair for pair in seen.headers if pair[0] in chosen],
    )
    whose = "" if scope is AT_CLAIM else scope_name(scope)
    return Asked(Name(whose, operation, key), digest, policy, path=seen.root + seen.path)


def _key_of(seen: Seen, policy: Policy) -> str | None:
    key = parse_key(seen.header(problems.HEADER.lower()))
    if policy.body_field is None:
        return key
    try:
        document = json.loads(seen.body or b"null")
    except (ValueError, RecursionError):
        return key  # what is wrong with the body is the route's to say
    inside = document.get(policy.body_field) if isinstance(document, dict) else None
    if inside is None:
        return key
    found = checked_key(inside)
    if key is not None and key != found:
        raise BadKey(f"header and {policy.body_field!r} in the body hold different keys")
    return found
