"""Forms, compared by what they hold: whoever parses one takes its bytes, as checks against CSRF do.

The same fields and files are the same form, whether somebody has parsed it before, and whatever
boundary its client chose this time.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from postroom.errors import WrongCall

__all__ = ["FILES", "FORMS", "comparable", "held_by"]

FILES = "multipart/form-data"
FORMS = frozenset((FILES, "application/x-www-form-urlencoded"))
_CHUNK_BYTES = 1 << 16
_LAST_BOUNDARY_BYTES = 8  # around its name, which stands in the content type


def held_by(fields: Any, files: Any) -> bytes:
    """Fields and digests of files, each a name with its values in order; b"" of an empty form. No
    JSON object, since a key may be looked for in one."""
    texts = dict(fields.lists())
    contents = {name: [_told(each) for each in several] for name, several in files.lists()}
    if not texts and not contents:
        return b""
    return json.dumps([texts, contents], sort_keys=True).encode()


def comparable(raw: bytes, form: bytes, length: int, content_type: str = "") -> bytes:
    """What stands for the body in its fingerprint: all of it, or nothing is claimed.

    `content_type` is that of a form with boundaries: an empty one has the last of them only.
    """
    if form:
        return form
    empty = len(content_type) + _LAST_BOUNDARY_BYTES if content_type else 0
    if len(raw) < length > empty:
        raise WrongCall(
            "something has read the body of this request before its key was claimed, so that it "
            "cannot be compared: put the decorator outermost, or let that read it in a way that "
            "keeps it (Flask: request.get_data(); Django: request.body)"
        )
    return raw


def _told(file: Any) -> list[str | None]:
    """Its name, type and digest; whoever reads it next finds it where it was."""
    digest, position = hashlib.sha256(), file.tell()
    file.seek(0)
    while chunk := file.read(_CHUNK_BYTES):
        digest.update(chunk)
    file.seek(position)
    return [getattr(file, "filename", file.name), file.content_type, digest.hexdigest()]
