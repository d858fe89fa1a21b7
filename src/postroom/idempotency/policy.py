"""How the requests of one route are treated; every limit and time there is."""

from __future__ import annotations

import math
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeAlias

from postroom.errors import ConfigurationError
from postroom.idempotency.rules import Answer, Mode, Name

__all__ = ["DAY_SECONDS", "NotDone", "Policies", "Policy", "Verify"]

DAY_SECONDS = 86_400
MIB_BYTES = 1024 * 1024
METHODS = frozenset(("POST", "PATCH"))
# Which change nothing, so that a decorator claims nothing for them.
SAFE_METHODS = frozenset(("GET", "HEAD", "OPTIONS", "TRACE"))


class NotDone:
    """What `verify` returns when nothing was done, for certain: the request is tried again."""


# None: it cannot be said yet.
Found: TypeAlias = "Answer | type[NotDone] | NotDone | None"
Verify: TypeAlias = "Callable[[Name], Found | Awaitable[Found]]"


@dataclass(frozen=True)
class Policy:
    """What a route does with its keys.

    `external` is for routes that change something outside of the database: a claim with a lease
    stands before the work, and a request whose process is lost is indeterminate. `same_transaction`
    is for routes that work on the session Postroom gives them. `resume` goes on from named points.
    """

    mode: Mode = "external"
    required: bool = False
    body_field: str | None = None
    mismatch_status: Literal[422, 409] = 422
    wait_seconds: float | None = None
    lease_seconds: float = 30
    longest_seconds: float = 900
    keep_seconds: float = DAY_SECONDS
    most_request_bytes: int = 4 * MIB_BYTES
    most_stored_bytes: int = MIB_BYTES
    fingerprint_headers: tuple[str, ...] = ()
    stored_headers: tuple[str, ...] = ()
    on_error: Literal["doubt", "retry"] = "doubt"
    on_unreachable: Literal["refuse", "run"] = "refuse"
    verify: Verify | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        words: dict[str, tuple[object, ...]] = {
            "mode": ("same_transaction", "resume", "external"),
            "mismatch_status": (422, 409),
            "on_error": ("doubt", "retry"),
            "on_unreachable": ("refuse", "run"),
        }
        for name, allowed in words.items():
            if getattr(self, name) not in allowed:
                choices = " or ".join(map(str, allowed))
                raise ConfigurationError(f"{name} of a policy must be {choices}.")
        for name in ("lease_seconds", "longest_seconds", "keep_seconds", "most_request_bytes"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name} of a policy must be above zero.")
        for name in ("lease_seconds", "keep_seconds"):
            if math.isinf(getattr(self, name)):
                raise ConfigurationError(f"{name} of a policy must have an end: write a number.")
        if self.wait_seconds is not None and not self.wait_seconds >= 0:
            raise ConfigurationError("wait_seconds of a policy must be zero or more.")


_SLASHES = re.compile("/{2,}")
_PLACE = re.compile(r"(\{[^/{}]*\})")
_IN_NO_PATH = re.compile(r"[<>?#\s]")  # "<int:id>" is how Flask and Django write it


def _pattern(piece: str) -> str:
    if not _PLACE.fullmatch(piece):
        return re.escape(piece)
    return ".+" if piece.endswith(":path}") else "[^/]+"


@dataclass(frozen=True)
class Policies:
    """Which policy a request falls under: by `"POST /orders/{id}/pay"`, else the default.

    The name of what matched is the operation: one key may be used once for each. Without a default
    only the routes named here have keys.
    """

    routes: Mapping[str, Policy] = field(default_factory=dict)
    default: Policy | None = None

    @cached_property
    def _compiled(self) -> list[tuple[str, re.Pattern[str], str, Policy]]:
        found = []
        for route, policy in self.routes.items():
            method, _, path = route.partition(" ")
            if not method.isupper() or not path.startswith("/"):
                raise ConfigurationError(
                    f'{route!r} is no route: write method and path, such as "POST /orders".'
                )
            if strange := _IN_NO_PATH.search(path):
                raise ConfigurationError(
                    f"{route!r} would match no request, for its {strange[0]!r}: what varies stands "
                    'in braces, such as "POST /orders/{id}/pay", and no query belongs to a route.'
                )
            if len(route) > 255:
                raise ConfigurationError(f"{route[:40]!r}… has more than 255 characters.")
            pattern = "".join(map(_pattern, _PLACE.split(path)))
            found.append((method, re.compile(pattern + "/?"), route, policy))
        return found

    @property
    def has_external(self) -> bool:
        """Whether a middleware claims for any of them."""
        there = [*self.routes.values(), *([self.default] if self.default else [])]
        return any(policy.mode == "external" for policy in there)

    def check(self) -> Policies:
        """Refuse now what could never match, or would fail at the first request."""
        there = {**self.routes, **({} if self.default is None else {"default": self.default})}
        for route, policy in there.items():
            if not isinstance(policy, Policy):
                raise ConfigurationError(
                    f'what {route!r} has is no Policy: write Policy(mode="external") or the like.'
                )
        self._compiled  # noqa: B018
        return self

    def could_be(self, operation: str, method: str, path: str) -> bool:
        """Whether requests to a route of a framework could be of this operation, by its path as it
        is written there."""
        return any(
            (verb, route) == (method, operation) and pattern.fullmatch(path) is not None
            for verb, pattern, route, _ in self._compiled
        )

    def find(self, method: str, path: str) -> tuple[str, Policy] | None:
        """The operation and the policy of a request; None: keys are none of its business."""
        method = method.upper()
        # As generously as any router reads it: what matches too much is only protected.
        plain = _SLASHES.sub("/", path).removesuffix("\n")
        for verb, pattern, route, policy in self._compiled:
            if verb == method and pattern.fullmatch(plain):
                return route, policy
        if self.default is None or method not in METHODS:
            return None
        operation = f"{method} {path}"
        fits = len(operation) <= 255 and "\x00" not in operation
        return (operation if fits else f"{method} *"), self.default


def checked_policies(given: Policies | Mapping[str, Any] | None) -> Policies:
    """Policies as a middleware is given them: by route, or for every POST and PATCH."""
    if given is None:
        return Policies(default=Policy())
    return (given if isinstance(given, Policies) else Policies(dict(given))).check()
