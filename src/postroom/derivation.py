"""One way to make a key out of others, so that a retry anywhere carries the same key.

A request's key, a message handled by a consumer, a step of a saga and a call to another system all
name themselves alike: parts with a colon between them. Parts whose texts differ never make the same
key, and every key is one that a header can carry: visible ASCII characters, 255 at most.
"""

from __future__ import annotations

import hashlib
import uuid
from typing import TypeAlias
from urllib.parse import quote

from postroom.errors import ConfigurationError

__all__ = ["KEY_CHARACTERS", "Part", "derive_key"]

KEY_CHARACTERS = 255
# Quotation marks and commas too: a bare key with one would be read as another, or as two.
_VISIBLE = "".join(chr(each) for each in range(0x21, 0x7F) if chr(each) not in '%:",')
Part: TypeAlias = "str | int | uuid.UUID"


def derive_key(*parts: Part) -> str:
    """The key of a thing within a thing: `derive_key(order_id, "charge")` is `17:charge`.

    The same parts give the same key in every process and version. Colons, percent signs, commas,
    quotation marks, spaces and what is not ASCII are written as in a URL (%3A); what would be
    longer than 255 characters is named by its SHA-256.
    """
    if not parts:
        raise ConfigurationError("a key is derived from at least one part")
    key = ":".join(_escaped(part) for part in parts)
    if len(key) <= KEY_CHARACTERS:
        return key
    digest = hashlib.sha256(key.encode()).hexdigest()
    return f"sha256%{digest}"  # no part is written with a bare percent sign


def _escaped(part: Part) -> str:
    if isinstance(part, bool) or not isinstance(part, str | int | uuid.UUID):
        # By its type alone: what it holds may be secret.
        raise ConfigurationError(
            f"a key is made of text, numbers and UUIDs, not of {type(part).__name__}: give its id"
        )
    text = str(part)
    if not text:
        raise ConfigurationError("a part of a key must not be empty")
    if "\x00" in text:
        raise ConfigurationError("a part of a key must not hold a NUL character")
    return quote(text, safe=_VISIBLE, errors="surrogatepass")
