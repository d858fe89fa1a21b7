"""What makes two requests the same: a SHA-256 over method, path, query, body and chosen headers.

JSON is hashed by what it says: the order of its members, white space, escapes and the spelling of
numbers (100, 100.0, 1e2) do not matter. Anything else, and JSON that names a member twice, is
hashed byte by byte. Dates, trace ids and signatures are left out because headers are, unless named.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Any
from urllib.parse import parse_qsl

from postroom.spelling import LONGEST_WHOLE, spelled

__all__ = ["HASH_VERSION", "canonical_json", "fingerprint"]

HASH_VERSION = 1


def fingerprint(
    method: str,
    path: str,
    query: str = "",
    body: bytes = b"",
    content_type: str = "",
    headers: Iterable[tuple[str, str]] = (),
) -> str:
    """The SHA-256 of a request, in hexadecimal."""
    kind = content_type.partition(";")[0].strip().lower()
    content = canonical_json(body) if kind == "application/json" or kind.endswith("+json") else None
    named = sorted((name.lower(), value) for name, value in headers)
    given = parse_qsl(query, keep_blank_values=True, errors="surrogateescape")
    pairs = sorted(given, key=lambda pair: pair[0])  # the order of one name's values may matter
    outside = json.dumps([method.upper(), path, pairs, named, content is not None])
    digest = hashlib.sha256(f"{len(outside)}:{outside}".encode())
    digest.update(body if content is None else content)
    return digest.hexdigest()


class _Twice(ValueError):
    """A member was named twice, and readers differ about which of them counts."""


def canonical_json(body: bytes) -> bytes | None:
    """The document in its one spelling; None if it is no JSON or may be read in two ways."""
    try:
        document = _reader.decode(body.decode(json.detect_encoding(body), "surrogatepass"))
        try:
            return _writer.encode(document).encode()
        except TypeError:  # it holds fractions, or long numbers
            return spelled(document).encode()
    except (ValueError, RecursionError, ArithmeticError):
        return None


def _members(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _Twice
    return found


def _refuse(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _whole(text: str) -> int | Decimal:
    return int(text) if len(text) <= LONGEST_WHOLE else Decimal(text)


_reader = json.JSONDecoder(
    object_pairs_hook=_members, parse_int=_whole, parse_float=Decimal, parse_constant=_refuse
)
_writer = json.JSONEncoder(sort_keys=True, separators=(",", ":"))
