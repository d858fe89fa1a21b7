"""What a client is told: problem documents (RFC 9457) with a type for each case, since their status
codes are used for business too; and the same for the generated OpenAPI."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from postroom.idempotency.policy import Policy
from postroom.idempotency.rules import Answer, Doubtful, Other, Replay, Running

__all__ = ["HEADER", "PROBLEMS", "REPLAYED", "answer_to", "openapi_header", "openapi_responses"]

HEADER = "Idempotency-Key"
REPLAYED = "Idempotent-Replayed"
MEDIA_TYPE = "application/problem+json"
_URN = "urn:postroom:problem:"

# type: status, title
PROBLEMS: dict[str, tuple[int, str]] = {
    "key-missing": (400, "This operation needs an idempotency key"),
    "key-invalid": (400, "The idempotency key cannot be used"),
    "key-unowned": (401, "Whose idempotency key it is is not known"),
    "request-incomplete": (400, "The request was cut off"),
    "key-reused": (422, "The idempotency key was used for another request"),
    "key-in-progress": (409, "A request with this idempotency key is being carried out"),
    "key-indeterminate": (409, "Whether the request was carried out is not known"),
    "response-not-kept": (409, "The request was carried out; its response was not kept"),
    "request-too-large": (413, "The request is too large to be given an idempotency key"),
    "transaction-conflict": (503, "The request met another one, and was undone"),
    "keys-unreachable": (503, "Idempotency keys cannot be looked up now"),
}


def problem(
    kind: str,
    detail: str,
    *,
    status: int | None = None,
    retry_after_seconds: float | None = None,
    **members: Any,
) -> Answer:
    """A problem document as an answer."""
    usual, title = PROBLEMS[kind]
    document = {
        "type": _URN + kind,
        "title": title,
        "status": status or usual,
        "detail": detail,
        **members,
    }
    headers = [("content-type", MEDIA_TYPE), ("cache-control", "no-store")]
    if retry_after_seconds is not None:
        headers.append(("retry-after", str(max(1, math.ceil(retry_after_seconds)))))
    return Answer(status or usual, tuple(headers), json.dumps(document).encode())


def missing(policy: Policy) -> Answer:
    """The key is required and was not sent."""
    where = f"the header {HEADER}"
    if policy.body_field is not None:
        where += f" or the member {policy.body_field!r} of the body"
    return problem("key-missing", f"Send a key of your own making in {where}.")


def invalid(why: str) -> Answer:
    """What was sent is no key."""
    return problem("key-invalid", f"{HEADER}: {why}.")


def too_large(limit: int, setting: str = "") -> Answer:
    """The body is above the limit up to which it can be compared; `setting`: a limit not ours."""
    if setting:
        detail = f"The body is above {setting}, which is {limit} bytes."
    else:
        detail = f"The body may have {limit} bytes."
    return problem("request-too-large", detail)


def incomplete() -> Answer:
    """Less of the body came than was announced."""
    return problem("request-incomplete", "Nothing was carried out; send all of it again.")


def unowned() -> Answer:
    """A key without a principal: it can neither be looked up nor kept."""
    return problem("key-unowned", "Nothing was carried out; say who you are, and send it again.")


def unreachable() -> Answer:
    """Nothing was carried out, because nobody could have remembered it."""
    return problem(
        "keys-unreachable", "Nothing was carried out; try again later.", retry_after_seconds=1
    )


def conflict() -> Answer:
    """The database let another transaction go first; nothing of this one is left."""
    return problem(
        "transaction-conflict",
        "Nothing was carried out; send the same request again.",
        retry_after_seconds=1,
    )


def refusal(error: Exception) -> Answer | None:
    """What an exception such as HTTPException(401) says to the client; None: it is an error."""
    status = getattr(error, "status_code", None)
    if not isinstance(status, int) or not 400 <= status < 500:
        return None
    title = HTTPStatus(status).phrase if status in set(HTTPStatus) else "Refused"
    document = {"type": "about:blank", "title": title, "status": status}
    if isinstance(detail := getattr(error, "detail", None), str):
        document["detail"] = str(detail)
    given = getattr(error, "headers", None)
    headers = [("content-type", MEDIA_TYPE), ("cache-control", "no-store")]
    for name, value in given.items() if isinstance(given, Mapping) else ():
        if name.lower() not in ("content-type", "content-length", "cache-control"):
            headers.append((name.lower(), str(value)))
    return Answer(status, tuple(headers), json.dumps(document).encode())


def answer_to(verdict: Replay | Running | Other | Doubtful, policy: Policy) -> Answer:
    """What a client is answered whose request is not carried out now."""
    if isinstance(verdict, Replay):
        return replayed(verdict.answer)
    if isinstance(verdict, Other):
        detail = "Use a new key for a new request; to repeat a request, send it unchanged."
        return problem("key-reused", detail, status=policy.mismatch_status)
    if isinstance(verdict, Running):
        # Its lease may be renewed; most requests end long before it.
        wait = min(max(verdict.retry_after_seconds, 1), 5)
        detail = "Send the same request again in a while to learn its result."
        return problem("key-in-progress", detail, retry_after_seconds=wait)
    detail = (
        "The process that carried it out was lost or could not tell. It is not carried out again "
        "by itself: send the same request later, or ask the operator."
    )
    return problem("key-indeterminate", detail)


def replayed(answer: Answer) -> Answer:
    """An answer said again, with the mark that it was."""
    mark = ((REPLAYED.lower(), "true"),)
    if answer.absent is None:
        return Answer(answer.status, answer.headers + mark, answer.body)
    why = {"too_large": "it was too large", "streamed": "it was streamed"}
    told = problem(
        "response-not-kept",
        f"It was answered with {answer.status}; {why.get(answer.absent, answer.absent)}.",
        original_status=answer.status,
    )
    kept = tuple(pair for pair in answer.headers if pair[0] in ("location", "etag", "link"))
    return Answer(told.status, told.headers + kept + mark, told.body)


def openapi_header(policy: Policy) -> dict[str, Any]:
    """The parameter of an operation that takes keys."""
    return {
        "name": HEADER,
        "in": "header",
        "required": policy.required and policy.body_field is None,
        "description": "The client's own name for this request: the same request sent again with "
        "the same key is carried out once and answered alike.",
        "schema": {"type": "string", "minLength": 1, "maxLength": 255},
    }


def openapi_responses(policy: Policy) -> dict[str, Any]:
    """The problem responses of an operation that takes keys, by status code."""
    kinds: dict[int, list[str]] = {}
    for kind, (status, _) in PROBLEMS.items():
        if kind == "key-missing" and not policy.required:
            continue
        code = policy.mismatch_status if kind == "key-reused" else status
        kinds.setdefault(code, []).append(kind)
    return {str(code): _response(code, names) for code, names in sorted(kinds.items())}


def _response(code: int, kinds: list[str]) -> dict[str, Any]:
    schema = {
        "type": "object",
        "required": ["type", "title", "status"],
        "properties": {
            "type": {"type": "string", "enum": [_URN + kind for kind in kinds]},
            "title": {"type": "string"},
            "status": {"type": "integer", "const": code},
            "detail": {"type": "string"},
        },
    }
    described: dict[str, Any] = {
        "description": "; ".join(PROBLEMS[kind][1] for kind in kinds),
        "content": {MEDIA_TYPE: {"schema": schema}},
    }
    if code in (409, 503):
        described["headers"] = {"Retry-After": {"schema": {"type": "integer"}}}
    return described
